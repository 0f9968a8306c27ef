"""Section a: every kernel on the device against what was computed on the CPU in float64, or copied there.

Cases come from the tables that the tests use. Inputs are drawn afresh for each run; slots that nobody may
read are NaN, and so is memory that nobody has written.
"""

from functools import partial
from itertools import product
from typing import Any

import torch

from eval.bench.models.workload import dtype_name
from eval.core.hardware import Device
from eval.gpu import cases
from eval.gpu.cases import DTYPES, bits, relative_error, shared, tolerance
from eval.gpu.plan import Item, Record, Settings
from hf_paged_cache.kernels import dispatch, reference
from hf_paged_cache.kernels.call import LayerBlocks

DRY_RUN_CASES = (
    "65_tokens", "gqa_5", "head_dim_97", "q5_not_causal", "start_with_mask", "window_q7_causal",
    "softcap", "sinks_q5_causal_window", "mask_minus_inf", "null_with_mask",
)  # fmt: skip
DRY_RUN_PREFILLS = ("history_begins_inside_a_block", "softcap_window_sinks", "left_padding")
SPANS = ((0, 1), (0, 64), (0, 65), (63, 1), (63, 2), (30, 100), (191, 1))  # first position, tokens written
STORED = {
    "head_dim_64": {"head_dim": 64, "v_head_dim": 48},
    "head_dim_97": {"head_dim": 97, "group": 1},
    "head_dim_128": {"head_dim": 128, "block_size": 32},
}
COPIES = (([0], [1]), ([0, 1, 3], [1, 2, 0]), ([5, 6, 7, 8, 9], [4, 3, 2, 1, 0]))  # read, overwritten
LARGE_ELEMENTS = (1 << 31) + (1 << 28)


def items(settings: Settings) -> list[Item]:
    """Writing, gathering, copying, prefill, attention in every case, and all at the end of a large pool."""
    is_dry, seed = settings.dry_run, settings.seed
    large = partial(_large, torch.bfloat16, seed, None if is_dry else LARGE_ELEMENTS)
    kinds = {"write": _write, "gather": _gather, "copy_blocks": _copy}
    prefills = [p for p in shared("kernels.prefills").PREFILLS if not is_dry or p.name in DRY_RUN_PREFILLS]
    attended = [c for c in shared("kernels.cases").CASES if not is_dry or c.name in DRY_RUN_CASES]
    return [
        Item("large_pool/bfloat16/decode_write_gather_copy", large, needs_s=5.0),
        *(
            Item(f"{kind}/{dtype_name(dtype)}/{name}", partial(run, name, dtype, seed))
            for kind, run in kinds.items()
            for dtype in (DTYPES[:2] if is_dry else DTYPES)
            for name in list(STORED)[: 1 if is_dry else None]
        ),
        *(
            Item(f"{kind}/{dtype_name(dtype)}/{case.name}", partial(run, case, dtype, seed))
            for kind, run, table in (("history", _prefill, prefills), ("decode", _decode, attended))
            for case in table
            for dtype in DTYPES
        ),
    ]


def _prefill(prefill: Any, dtype: torch.dtype, seed: int, record: Record, device: Device) -> None:
    """A prompt over stored history, against dense attention in float64."""
    with device.poisoned():
        got, want, _ = shared("kernels.prefills").prefill_answer(
            prefill, dtype, device.torch_device, seed=seed
        )
    error = relative_error(got.cpu(), want)
    record.values["rms_ratio"] = error
    record.bound("RMS ratio", error, tolerance(dtype))
    record.check("zeros where a query sees nothing", bool((got.cpu()[want == 0] == 0).all()))


def _decode(case: Any, dtype: torch.dtype, seed: int, record: Record, device: Device) -> None:
    problem = shared("kernels.cases").build(case, dtype, seed=seed)
    check_decode(record, device, problem, cases.blocks_on(problem.blocks, device.torch_device))


def check_decode(record: Record, device: Device, problem: Any, blocks: LayerBlocks) -> None:
    """Both forms of the call: with the log-sum-exp, and the one that models use."""
    attention = cases.attention_on(problem.attention, device.torch_device)
    before = [bits(x).clone() for x in (blocks.keys, blocks.values)]
    with device.poisoned():
        with_lse, lse = dispatch.decode(blocks, attention, return_lse=True)
        alone, _ = dispatch.decode(blocks, attention)
    assert lse is not None, "it was asked for"
    device.synchronize()
    record.values["backend"] = dispatch.backend_name(blocks)
    after = [bits(x) for x in (blocks.keys, blocks.values)]
    record.check("the pool is not changed", all(map(torch.equal, before, after)))
    answers = (with_lse.cpu(), lse.cpu()), (alone.cpu(), None)
    check = partial(shared("kernels.cases").assert_answers, tolerance=tolerance(attention.query.dtype))
    for name, answer in zip(("with lse", "without"), answers, strict=True):
        record.attempt(name, partial(check, problem, *answer))
    record.values["rms_ratio"] = max(relative_error(got, problem.want) for got, _ in answers)


def _stored(name: str, dtype: torch.dtype, seed: int, *, null: bool) -> LayerBlocks:
    nulls = ((0, 0), (1, 1)) if null else ()
    case = shared("kernels.cases").Case("stored", **{"end": 192, "nulls": nulls, **STORED[name]})
    blocks: LayerBlocks = shared("kernels.cases").build(case, dtype, seed=seed).blocks
    return blocks


def _new_states(
    blocks: LayerBlocks, tokens: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as projections leave them: heads and tokens swapped."""

    def states(pool: torch.Tensor) -> torch.Tensor:
        size = blocks.table.shape[0], tokens, pool.shape[1], pool.shape[3]
        return torch.randn(size, generator=generator).to(pool.dtype).transpose(1, 2)

    return states(blocks.keys), states(blocks.values)


def _write(name: str, dtype: torch.dtype, seed: int, record: Record, device: Device) -> None:
    generator = torch.Generator().manual_seed(seed)
    for null, (start, tokens) in product((False, True), SPANS):
        want = _stored(name, dtype, seed, null=null)
        got = cases.blocks_on(want, device.torch_device)
        keys, values = _new_states(want, tokens, generator)
        reference.write(want, keys, values, start)
        keys, values = (cases.moved(x, device.torch_device) for x in (keys, values))
        with device.poisoned():
            dispatch.write(got, keys, values, start)
        device.synchronize()
        _check_same_pool(record, f"tokens {start}+{tokens}{', null blocks' if null else ''}", got, want)
    _note_exact(record)


def _note_exact(record: Record) -> None:
    record.values["rms_ratio"] = 0.0 if not record.is_failure else float("inf")


def _check_same_pool(record: Record, what: str, got: LayerBlocks, want: LayerBlocks) -> None:
    for side in ("keys", "values"):
        mine, theirs = (bits(cases.whole_pool(getattr(x, side))) for x in (got, want))
        wrong = int((mine.cpu() != theirs).sum())
        record.check(f"{side}, {what}", wrong == 0, f"{wrong} of {theirs.numel()} elements differ")


def _check_gathered(
    record: Record, device: Device, got: LayerBlocks, want: LayerBlocks, start: int, end: int
) -> None:
    theirs = reference.gather(want, start, end)
    with device.poisoned():
        mine = dispatch.gather(got, start, end)
    for side, a, b in zip(("keys", "values"), mine, theirs, strict=True):
        record.check(f"{side} {start} to {end} gathered", torch.equal(bits(a).cpu(), bits(b)))


def _gather(name: str, dtype: torch.dtype, seed: int, record: Record, device: Device) -> None:
    for null in (False, True):
        want = _stored(name, dtype, seed, null=null)
        got = cases.blocks_on(want, device.torch_device)
        for start, tokens in SPANS:
            _check_gathered(record, device, got, want, start, start + tokens)
    _note_exact(record)


def _copy(name: str, dtype: torch.dtype, seed: int, record: Record, device: Device) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (11, 3, 2, STORED[name].get("block_size", 64), STORED[name]["head_dim"])
    for src, dst in COPIES:
        want = torch.randn(shape, generator=generator).to(dtype)
        got = want.to(device.torch_device, copy=True)
        reference.copy_blocks(want, src, dst)
        with device.poisoned():
            dispatch.copy_blocks(got, src, dst)
        device.synchronize()
        record.check(f"{src} to {dst}", torch.equal(got.cpu(), want))
    _note_exact(record)


def _large(dtype: torch.dtype, seed: int, elements: int | None, record: Record, device: Device) -> None:
    """Everything once more where the blocks in use lie past 2^31 elements."""
    tables = shared("kernels.cases")
    case = tables.Case("large", kv_heads=8 if elements else 2, group=4, head_dim=128, end=200)
    problem = tables.build(case, dtype, seed=seed)
    small = problem.blocks
    num_blocks = small.keys.shape[0] + 50
    if elements is not None:
        num_blocks = -(-elements // small.keys.stride(0))
        device.check_room(5 * elements * dtype.itemsize)
    large = cases.at_the_end_of(cases.blocks_on(small, device.torch_device), num_blocks)
    record.values["pool_elements"] = num_blocks * small.keys.stride(0)
    check_decode(record, device, problem, large)

    keys, values = _new_states(small, 65, torch.Generator().manual_seed(seed))
    reference.write(small, keys, values, 100)
    dispatch.write(large, keys.to(device.torch_device), values.to(device.torch_device), 100)
    first = num_blocks - small.keys.shape[0]
    tail = LayerBlocks(large.keys[first:], large.values[first:], large.table)
    _check_same_pool(record, "written", tail, small)
    _check_gathered(record, device, large, small, 90, 170)
    pool = cases.whole_pool(large.keys)
    last = bits(pool[-1]).clone()
    dispatch.copy_blocks(pool, [num_blocks - 1, num_blocks - 2], [0, num_blocks - 1])
    device.synchronize()
    record.check("copied to the first block", torch.equal(bits(pool[0]), last))
    record.check("copied to the last block", torch.equal(bits(pool[-1]), bits(pool[-2])))
