"""Section a: every kernel on the device against what was computed on the CPU in float64, or copied there.

Attention cases come from the table that the tests use. Inputs are drawn afresh for each run; slots that
nobody may read are NaN, and so is memory that nobody has written.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from eval.gpu import history, moved
from eval.gpu.device import Device
from eval.gpu.items import Item, Record, Skip
from eval.gpu.settings import Settings
from eval.gpu.shared_cases import attention_cases, tolerance
from hf_paged_cache.kernels import dispatch, reference
from hf_paged_cache.kernels.call import LayerBlocks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DRY_RUN_CASES = (
    "65_tokens", "gqa_5", "head_dim_97", "q5_not_causal", "start_with_mask", "window_q7_causal",
    "softcap", "sinks_q5_causal_window", "mask_minus_inf", "null_with_mask",
)  # fmt: skip
SPANS = ((0, 1), (0, 64), (0, 65), (63, 1), (63, 2), (30, 100), (191, 1))
"""First position and number of tokens written."""
STORED = {
    "head_dim_64": {"head_dim": 64, "v_head_dim": 48},
    "head_dim_97": {"head_dim": 97, "group": 1},
    "head_dim_128": {"head_dim": 128, "block_size": 32},
}
COPIES = (([0], [1]), ([0, 1, 3], [1, 2, 0]), ([5, 6, 7, 8, 9], [4, 3, 2, 1, 0]))
"""Blocks to read and to overwrite; some are both."""
LARGE_ELEMENTS = (1 << 31) + (1 << 28)


def items(settings: Settings) -> list[Item]:
    """Attention in every case, writing, gathering, copying, and all of them at the end of a large pool."""
    return [
        *_large_pool(settings),
        *_copying(settings),
        *history.items(settings),
        *_decoding(settings),
    ]


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def _decoding(settings: Settings) -> list[Item]:
    cases = attention_cases().CASES
    if settings.dry_run:
        cases = [case for case in cases if case.name in DRY_RUN_CASES]
    return [
        Item(f"decode/{dtype_name(dtype)}/{case.name}", partial(_decode, case, dtype, settings.seed))
        for case in cases
        for dtype in DTYPES
    ]


def _copying(settings: Settings) -> list[Item]:
    dtypes = DTYPES[:2] if settings.dry_run else DTYPES
    names = list(STORED)[:1] if settings.dry_run else list(STORED)
    kinds = {"write": _write, "gather": _gather, "copy_blocks": _copy}
    return [
        Item(f"{kind}/{dtype_name(dtype)}/{name}", partial(run, name, dtype, settings.seed))
        for kind, run in kinds.items()
        for dtype in dtypes
        for name in names
    ]


def _large_pool(settings: Settings) -> list[Item]:
    dtype = torch.bfloat16
    run = partial(_large, dtype, settings.seed, None if settings.dry_run else LARGE_ELEMENTS)
    return [Item(f"large_pool/{dtype_name(dtype)}/decode_write_gather_copy", run, needs_s=5.0)]


# --- one item each ------------------------------------------------------------------------------------------


def _decode(case: Any, dtype: torch.dtype, seed: int, record: Record, device: Device) -> None:
    shared = attention_cases()
    problem = shared.build(case, dtype, seed=seed)
    blocks = moved.blocks_on(problem.blocks, device.torch_device)
    _check_decode(record, device, problem, blocks)


def _check_decode(record: Record, device: Device, problem: Any, blocks: LayerBlocks) -> None:
    """Both forms of the call: with the log-sum-exp, and the one that models use."""
    shared = attention_cases()
    attention = moved.attention_on(problem.attention, device.torch_device)
    before = [moved.bits(x).clone() for x in (blocks.keys, blocks.values)]
    with device.poisoned():
        with_lse, lse = dispatch.decode(blocks, attention, return_lse=True)
        alone, _ = dispatch.decode(blocks, attention)
    assert lse is not None, "it was asked for"
    device.synchronize()
    record.values["backend"] = dispatch.backend_name(blocks)
    unchanged = all(
        torch.equal(moved.bits(x), old) for x, old in zip((blocks.keys, blocks.values), before, strict=True)
    )
    record.check("the pool is not changed", unchanged)
    want = problem.want
    for name, got, got_lse in (("with lse", with_lse.cpu(), lse.cpu()), ("without", alone.cpu(), None)):
        allowed = tolerance(attention.query.dtype)
        record.attempt(name, partial(shared.assert_answers, problem, got, got_lse, tolerance=allowed))
        error = relative_error(got, want)
        record.values["rms_ratio"] = max(record.values.get("rms_ratio", 0.0), error)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """RMS ratio, infinite for an answer that holds NaN (JSON keeps it as such)."""
    if not got.isfinite().all():
        return float("inf")
    return float(attention_cases().rms_ratio(got, want))


def _stored(name: str, dtype: torch.dtype, seed: int, *, null: bool) -> LayerBlocks:
    shared = attention_cases()
    nulls = ((0, 0), (1, 1)) if null else ()
    case = shared.Case("stored", **{"end": 192, "nulls": nulls, **STORED[name]})
    blocks: LayerBlocks = shared.build(case, dtype, seed=seed).blocks
    return blocks


def _new_states(
    blocks: LayerBlocks, tokens: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as projections leave them: heads and tokens swapped."""
    rows, heads = blocks.table.shape[0], blocks.keys.shape[1]
    keys, values = (
        torch.randn(rows, tokens, heads, pool.shape[3], generator=generator).to(pool.dtype).transpose(1, 2)
        for pool in (blocks.keys, blocks.values)
    )
    return keys, values


def _write(name: str, dtype: torch.dtype, seed: int, record: Record, device: Device) -> None:
    generator = torch.Generator().manual_seed(seed)
    for null in (False, True):
        for start, tokens in SPANS:
            want = _stored(name, dtype, seed, null=null)
            got = moved.blocks_on(want, device.torch_device)
            keys, values = _new_states(want, tokens, generator)
            reference.write(want, keys, values, start)
            keys, values = (moved.moved(x, device.torch_device) for x in (keys, values))
            with device.poisoned():
                dispatch.write(got, keys, values, start)
            device.synchronize()
            _check_same_pool(record, f"tokens {start}+{tokens}{', null blocks' if null else ''}", got, want)
    record.values["rms_ratio"] = 0.0 if not record.is_failure else float("inf")


def _check_same_pool(record: Record, what: str, got: LayerBlocks, want: LayerBlocks) -> None:
    for side in ("keys", "values"):
        mine, theirs = (moved.bits(moved.whole_pool(getattr(x, side))) for x in (got, want))
        wrong = int((mine.cpu() != theirs).sum())
        record.check(f"{side}, {what}", wrong == 0, f"{wrong} of {theirs.numel()} elements differ")


def _gather(name: str, dtype: torch.dtype, seed: int, record: Record, device: Device) -> None:
    for null in (False, True):
        want = _stored(name, dtype, seed, null=null)
        got = moved.blocks_on(want, device.torch_device)
        for start, tokens in SPANS:
            theirs = reference.gather(want, start, start + tokens)
            with device.poisoned():
                mine = dispatch.gather(got, start, start + tokens)
            for side, a, b in zip(("keys", "values"), mine, theirs, strict=True):
                record.check(f"{side} {start}+{tokens}", torch.equal(moved.bits(a).cpu(), moved.bits(b)))
    record.values["rms_ratio"] = 0.0 if not record.is_failure else float("inf")


def _copy(name: str, dtype: torch.dtype, seed: int, record: Record, device: Device) -> None:
    generator = torch.Generator().manual_seed(seed)
    dims = STORED[name]
    for src, dst in COPIES:
        shape = (11, 3, 2, dims.get("block_size", 64), dims["head_dim"])
        want = torch.randn(shape, generator=generator).to(dtype)
        got = want.to(device.torch_device, copy=True)
        reference.copy_blocks(want, src, dst)
        with device.poisoned():
            dispatch.copy_blocks(got, src, dst)
        device.synchronize()
        record.check(f"{src} to {dst}", torch.equal(got.cpu(), want))
    record.values["rms_ratio"] = 0.0 if not record.is_failure else float("inf")


def _large(dtype: torch.dtype, seed: int, elements: int | None, record: Record, device: Device) -> None:
    """Everything once more where the blocks in use lie past 2^31 elements."""
    shared = attention_cases()
    case = shared.Case("large", kv_heads=8 if elements else 2, group=4, head_dim=128, end=200)
    problem = shared.build(case, dtype, seed=seed)
    small = problem.blocks
    num_blocks = small.keys.shape[0] + 50
    if elements is not None:
        num_blocks = -(-elements // small.keys.stride(0))
        needed, free = 5 * elements * dtype.itemsize, device.free_bytes()
        if free is not None and free < needed:
            raise Skip(f"needs {needed / 2**30:.0f} GiB")
    large = moved.at_the_end_of(moved.blocks_on(small, device.torch_device), num_blocks)
    record.values["pool_elements"] = num_blocks * small.keys.stride(0)
    _check_decode(record, device, problem, large)

    keys, values = _new_states(small, 65, torch.Generator().manual_seed(seed))
    reference.write(small, keys, values, 100)
    dispatch.write(large, keys.to(device.torch_device), values.to(device.torch_device), 100)
    first = num_blocks - small.keys.shape[0]
    tail = LayerBlocks(large.keys[first:], large.values[first:], large.table)
    _check_same_pool(record, "written", tail, small)
    for side, a, b in zip(
        ("keys", "values"), dispatch.gather(large, 90, 170), reference.gather(small, 90, 170), strict=True
    ):
        record.check(f"{side} gathered", torch.equal(moved.bits(a).cpu(), moved.bits(b)))
    pool = moved.whole_pool(large.keys)
    last = moved.bits(pool[-1]).clone()
    dispatch.copy_blocks(pool, [num_blocks - 1, num_blocks - 2], [0, num_blocks - 1])
    device.synchronize()
    record.check("copied to the first block", torch.equal(moved.bits(pool[0]), last))
    record.check("copied to the last block", torch.equal(moved.bits(pool[-1]), moved.bits(pool[-2])))
