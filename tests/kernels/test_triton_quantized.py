"""The Triton kernels over quantized blocks, on a GPU where there is one and else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_paged_cache.errors import UnstorableValueError
from hf_paged_cache.formats import FORMATS, RecordFormat, with_keys_in_int8
from hf_paged_cache.formats.int4_token import Int4Token
from hf_paged_cache.formats.record import KVFormat, Side
from hf_paged_cache.kernels import reference, triton
from hf_paged_cache.kernels.call import NULL_BLOCK, Attention, LayerBlocks, RowLengths, dense_entry
from tests.kernels.cases import CASES, Case, Problem, assert_answers, rms_ratio, smaller
from tests.kernels.quantized import FORMAT_NAMES, TOLERANCE, Dense, build_quantized, layout_of
from tests.support.tails import few

pytest.importorskip("triton")

from hf_paged_cache.kernels.triton import launch

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PER_TOKEN = tuple(name for name, layer_format in FORMATS.items() if layer_format.is_per_token)

HALF_LSE_TOLERANCE = 2e-3
"""Absolute, in nats: scores of queries and keys around 4, with 12 bits each."""

FEW = (
    "65_tokens",
    "gqa_5",
    "v_larger_than_k",
    "start_inside_a_block",
    "q4_history",
    "window_q7_causal_start",
    "softcap_causal_window",
    "sinks_where_nothing_is_seen",
    "mask_minus_inf",
    "mask_bool_padding_q1",
    "mask_bias_per_head",
    "null_several",
)
SMALLER_CASES = tuple(smaller(case, kv_heads=1, end=min(case.end, 200)) for case in CASES if case.name in FEW)
ONE_OF_EACH_KIND = {"int8", "fp8", "int4"}
"""Integers and floats of tokens, and a format of whole blocks."""
SHAPES = ((64, 64), (80, 32), (97, 16), (128, 256), (256, 16))
"""Head dims and block sizes."""


def on_device(problem: Problem) -> Problem:
    """The problem with everything that kernels read on the device."""
    b, a = problem.blocks, problem.attention
    assert b.records is not None
    moved = replace(
        a,
        query=a.query.to(DEVICE),
        mask=None if a.mask is None else a.mask.to(DEVICE),
        sinks=None if a.sinks is None else a.sinks.to(DEVICE),
    )
    placed = LayerBlocks(
        *(b.keys.to(DEVICE), b.values.to(DEVICE), b.table.to(DEVICE), None, b.records.to(DEVICE), b.layout),
        offsets=None if b.offsets is None else b.offsets.to(DEVICE),
    )
    return replace(problem, blocks=placed, attention=moved)


def check(problem: Problem) -> None:
    placed = on_device(problem)
    out, lse = (x.cpu() for x in triton.decode(placed.blocks, placed.attention, return_lse=True))
    dtype = problem.attention.query.dtype
    if dtype == torch.float32:
        assert_answers(problem, out, lse, tolerance=TOLERANCE[dtype])
        return
    assert_answers(problem, out, tolerance=TOLERANCE[dtype])
    assert float((lse.double() - problem.want_lse).abs().max()) <= HALF_LSE_TOLERANCE


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("number", range(len(SMALLER_CASES)), ids=lambda i: SMALLER_CASES[i].name)
def test_decode_reads_what_the_records_say(number: int, name: str) -> None:
    case = SMALLER_CASES[number]
    dense: Dense = ("none", "edges")[(number + FORMAT_NAMES.index(name)) % 2]  # type: ignore[assignment]
    check(build_quantized(case, layout_of(name, case), dense=dense))


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize(("head_dim", "block_size"), SHAPES, ids=str)
def test_decode_of_every_head_dim(head_dim: int, block_size: int, name: str) -> None:
    case = Case("shape", kv_heads=1, group=3, head_dim=head_dim, block_size=block_size, end=70)
    check(build_quantized(case, layout_of(name, case), dense="none"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    case = Case("half", batch=1, kv_heads=1, group=3, q_tokens=2, causal=True, end=150, head_dim=80)
    for dense in ("none", "edges"):
        check(build_quantized(case, layout_of(name, case), dtype, dense=dense))


@pytest.mark.parametrize("dense", ["none", "edges"])
@pytest.mark.parametrize("name", few(FORMAT_NAMES, ONE_OF_EACH_KIND))
def test_decode_in_three_splits_is_the_same(name: str, dense: Dense, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "choose_splits", lambda *_: 3)
    case = Case("splits", batch=1, kv_heads=1, group=3, end=600, head_dim=80, sinks=True, softcap=3.0)
    check(build_quantized(case, layout_of(name, case), dense=dense))


@pytest.mark.full
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_several_tiles_of_queries(name: str) -> None:
    case = Case("queries", batch=1, kv_heads=1, group=2, q_tokens=40, causal=True, end=130, window=70)
    check(build_quantized(case, layout_of(name, case)))


@pytest.mark.parametrize("name", few(["k8v4", "int4"], {"int4"}))
def test_history_of_a_prefill(name: str) -> None:
    case = Case("history", kv_heads=1, group=2, q_tokens=20, queries_are_last=False, end=100, block_size=32)
    problem = build_quantized(case, layout_of(name, case))
    placed = on_device(problem)
    part = triton.attend_history(placed.blocks, placed.attention, None, None)
    assert_answers(problem, part.tokens_first(torch.float32).cpu(), tolerance=TOLERANCE[torch.float32])


def test_pairs_of_codecs_without_a_name_of_their_own() -> None:
    case = Case("pair", kv_heads=1, head_dim=64, v_head_dim=96, end=70)
    layout = with_keys_in_int8(FORMATS["int4_group"]).bind(64, 64, 96)
    assert layout.format.name == "int4_group+k8"
    check(build_quantized(case, layout, dense="edges"))


@pytest.mark.parametrize("start", few([0, 20, 48, 64], {"0", "48"}))
def test_dense_columns_may_be_known_unknown_all_or_none(start: int) -> None:
    """Blocks of 16: 0 and 6 are dense. From 20 on the first is out of reach, from 96 on all are dense."""
    case = Case("dense", kv_heads=1, group=2, block_size=16, end=100, start=start)
    problem = build_quantized(case, layout_of("int4", case))
    check(problem)
    placed = on_device(problem)
    placed.blocks.dense_columns = ((0, 6),)
    with refuses_to_wait() if DEVICE == "cuda" else noting_nothing():
        got = triton.decode(placed.blocks, placed.attention)[0]
    assert_answers(problem, got.cpu(), tolerance=TOLERANCE[torch.float32])


@pytest.mark.parametrize(("start", "end"), [(0, 16), (100, 110), (0, 32)])
def test_what_is_all_dense_is_attended_as_dense_blocks_are(start: int, end: int) -> None:
    case = Case("edge", kv_heads=1, group=2, block_size=16, start=start, end=end, sinks=True)
    problem = build_quantized(case, layout_of("int4", case))
    assert (problem.blocks.table[:, start // 16 : -(-end // 16)] < NULL_BLOCK).all()
    check(problem)


@contextmanager
def noting_nothing() -> Iterator[None]:
    yield


def empty_blocks(
    layout: RecordFormat, entries: list[list[int]], kv_heads: int = 2, dtype: torch.dtype = torch.float32
) -> LayerBlocks:
    """Records and slots without content, under the given table."""
    keys = torch.full((3, kv_heads, layout.block_size, layout.head_dim), torch.nan, dtype=dtype)
    values = torch.full((3, kv_heads, layout.block_size, layout.v_head_dim), torch.nan, dtype=dtype)
    stored = torch.full((9, kv_heads, layout.nbytes), 0xFF, dtype=torch.uint8)
    table = torch.tensor(entries, dtype=torch.int32)
    if not any(entry < NULL_BLOCK for row in entries for entry in row):
        keys, values = keys[:0], values[:0]
    return LayerBlocks(keys.to(DEVICE), values.to(DEVICE), table.to(DEVICE), None, stored.to(DEVICE), layout)


def unpacked(layout: RecordFormat, stored: torch.Tensor, side: Side) -> torch.Tensor:
    """Codes as numbers that are near where values are: int8 and e4m3 with their sign."""
    codes, _ = layout.parts(stored, side)
    name = layout.codec(side).name
    if layout.codec(side).bits == 4:
        return torch.stack((codes & 15, codes >> 4)).int()
    if name == "int8_token":
        return codes.view(torch.int8).int()
    return torch.where(codes >= 128, 128 - codes.int(), codes.int()) if name == "fp8_token" else codes.int()


def assert_same_records(layout: RecordFormat, got: torch.Tensor, want: torch.Tensor) -> None:
    """Parameters at most one float16 apart; codes at most 1, in at most one place of a thousand."""
    sides: tuple[Side, Side] = ("keys", "values")
    for side in sides:
        (_, params), (_, want_params) = layout.parts(got.cpu(), side), layout.parts(want, side)
        apart = (params.view(torch.int16).int() - want_params.view(torch.int16).int()).abs()
        assert apart.max() <= 1, f"parameters of {side} are {int(apart.max())} float16 apart"
        differs = (unpacked(layout, got.cpu(), side) - unpacked(layout, want, side)).abs()
        assert differs.max() <= 1, f"codes of {side} differ by {int(differs.max())}"
        assert (differs > 0).float().mean() <= 1e-3, f"codes of {side} differ often"


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("head_dim", [64, 80, 97, 128, 256])
def test_write_gives_the_bytes_of_the_reference(head_dim: int, name: str) -> None:
    case = Case("write", head_dim=head_dim, v_head_dim=64 if head_dim == 256 else None, block_size=16)
    layout = layout_of(name, case)
    entries = [[dense_entry(0), 4], [dense_entry(1), 7], [NULL_BLOCK, 1]]
    mine, theirs = empty_blocks(layout, entries), replace_on_cpu(empty_blocks(layout, entries))
    tokens = 12 if layout.format.is_per_token else 22  # from the tenth on; all of the second block
    keys = torch.randn(3, tokens, 2, head_dim).transpose(1, 2) * 3 + 1
    values = torch.randn(3, 2, tokens, layout.v_head_dim)
    triton.write(mine, keys.to(DEVICE), values.to(DEVICE), 10)
    reference.write(theirs, keys, values, 10)
    assert mine.records is not None
    assert theirs.records is not None
    assert_same_records(layout, mine.records, theirs.records)
    for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
        assert torch.equal(a.cpu().nan_to_num(7.0), b.nan_to_num(7.0))


def replace_on_cpu(blocks: LayerBlocks) -> LayerBlocks:
    assert blocks.records is not None
    stored = blocks.records.cpu()
    return LayerBlocks(
        blocks.keys.cpu(), blocks.values.cpu(), blocks.table.cpu(), None, stored, blocks.layout
    )


@pytest.mark.parametrize("name", PER_TOKEN)
def test_writing_token_by_token_gives_the_same_bytes(name: str) -> None:
    layout = layout_of(name, Case("write", block_size=16))
    one, many = (empty_blocks(layout, [[4, 7]]) for _ in range(2))
    keys, values = torch.randn(1, 2, 8, 64).to(DEVICE), torch.randn(1, 2, 8, 64).to(DEVICE)
    triton.write(many, keys, values, 12)
    for first, last in ((0, 3), (3, 4), (4, 7), (7, 8)):
        triton.write(one, keys[:, :, first:last], values[:, :, first:last], 12 + first)
    assert one.records is not None
    assert many.records is not None
    assert torch.equal(one.records, many.records)


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 64), (80, 32), (256, 16)], ids=str)
def test_sealing_and_back(head_dim: int, block_size: int, name: str) -> None:
    layout = layout_of(name, Case("seal", head_dim=head_dim, block_size=block_size))
    stored = torch.full((5, 2, 2, layout.nbytes), 0xFF, dtype=torch.uint8)
    keys, values = (torch.randn(4, 2, 2, block_size, head_dim).bfloat16() for _ in range(2))
    want = stored.clone()
    reference.encode_blocks(layout, want, keys, values, [2, 0], [4, 1])
    placed, slots = stored.to(DEVICE), [keys.to(DEVICE), values.to(DEVICE)]
    triton.encode_blocks(layout, placed, slots[0], slots[1], [2, 0], [4, 1])
    assert torch.equal(slots[0].cpu(), keys)
    assert (placed.cpu()[[0, 2, 3]] == 0xFF).all()
    assert_same_records(layout, placed[[1, 4]], want[[1, 4]])
    triton.decode_blocks(layout, placed, slots[0], slots[1], [1, 3], [4, 1])
    assert 0 < rms_ratio(slots[0].cpu()[[1, 3]], keys[[2, 0]]) < 0.2
    triton.encode_blocks(layout, placed, slots[0], slots[1], [], [])


@pytest.mark.parametrize(
    ("name", "bad"), [*((name, torch.nan) for name in FORMAT_NAMES), ("int8", -torch.inf), ("fp8", 1e5)]
)
def test_what_has_no_scale_is_flagged_and_becomes_zeros(name: str, bad: float) -> None:
    layout = layout_of(name, Case("write", block_size=16))
    keys, values = torch.randn(1, 2, 20, 64), torch.randn(1, 2, 20, 64)
    values[0, 1, 18, 5] = bad
    blocks = empty_blocks(layout, [[dense_entry(0), 7]])
    blocks.fault = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    triton.write(blocks, keys.to(DEVICE), values.to(DEVICE), 12)
    assert blocks.fault.tolist() == [0, 1]
    assert blocks.records is not None
    got_keys, got = layout.decode(blocks.records[7].cpu())
    assert got.isfinite().all()
    assert got_keys.isfinite().all()
    zero = got[1, 14].abs().max()
    assert zero == 0 if layout.codec("values").is_per_token else zero < 0.02  # half a scale
    blocks.fault.zero_()
    keys[0, 1, 3, 0] = bad  # in a slot
    triton.write(blocks, keys[:, :, :4].to(DEVICE), values[:, :, :4].to(DEVICE), 12)
    assert blocks.fault.tolist() == [1, 0]


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_without_a_flag_what_has_no_scale_is_refused_and_nothing_written(name: str) -> None:
    layout = layout_of(name, Case("write", block_size=16))
    blocks = empty_blocks(layout, [[dense_entry(0), 7], [dense_entry(1), 1]])
    keys, values = torch.randn(2, 2, 32, 64), torch.randn(2, 2, 32, 64)
    keys[1, 1, 30, 5] = torch.inf
    with pytest.raises(UnstorableValueError, match=r"^K has a NaN"):
        triton.write(blocks, keys.to(DEVICE), values.to(DEVICE), 0)
    assert blocks.records is not None
    assert (blocks.records == 0xFF).all()
    assert blocks.keys.isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", few(FORMAT_NAMES, ONE_OF_EACH_KIND))
def test_the_largest_values_stay_finite(name: str, dtype: torch.dtype) -> None:
    case = Case("large", batch=1, kv_heads=1, block_size=16, end=32)
    layout = layout_of(name, case)
    blocks = empty_blocks(layout, [[3, 5]], kv_heads=1, dtype=dtype)
    if not len(blocks.keys):
        blocks.keys = blocks.values = torch.zeros(0, 1, 16, 64, dtype=dtype, device=DEVICE)
    signs = 1.0 - 2.0 * (torch.randn(1, 1, 32, 64) > 0)
    largest = (signs * 65280.0).to(dtype).to(DEVICE)  # the same in both dtypes
    triton.write(blocks, largest, largest, 0)
    query = torch.randn(1, 2, 1, 64).to(dtype).to(DEVICE) / 65536
    a = replace(build_quantized(case, layout).attention, query=query)
    out = triton.decode(blocks, a)[0]
    want = reference.decode(replace_on_cpu(blocks), replace(a, query=query.cpu()))[0]
    assert rms_ratio(out.cpu(), want.double()) <= 4 * TOLERANCE[dtype]


def test_a_block_that_is_not_full_has_no_record_in_a_format_of_blocks() -> None:
    layout = layout_of("int4", Case("write", block_size=16))
    blocks = empty_blocks(layout, [[dense_entry(0), 7]])
    states = torch.zeros(1, 2, 20, 64, device=DEVICE)
    with pytest.raises(AssertionError, match=r"full blocks, got some tokens of columns \[1\]"):
        triton.write(blocks, states, states, 0)


class Launches:
    """Stands for a kernel and notes its grids instead of running."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def warmup(self, *args: Any, **kwargs: Any) -> None:
        """Compiles nothing either."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grids.append(grid)
        return lambda *args, **kwargs: None


KERNELS = ("write_kernel", "encode_kernel", "attend_kernel", "merge_kernel")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, Launches]:
    kernels = {name: Launches() for name in KERNELS}
    for name, kernel in kernels.items():
        monkeypatch.setattr(launch, name, kernel)
    return kernels


@pytest.mark.parametrize("name", PER_TOKEN)
@pytest.mark.parametrize(("splits", "merges"), [(1, 0), (4, 1)])
def test_a_step_over_records_alone_launches_write_attend_and_where_rows_are_split_merge(
    name: str, splits: int, merges: int, launches: dict[str, Launches], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "choose_splits", lambda *_: splits)
    layout = layout_of(name, Case("step", block_size=16))
    blocks = empty_blocks(layout, [[4, 7], [2, 1]])
    step(blocks, 31)
    assert [len(kernel.grids) for kernel in launches.values()] == [1, 0, 1, merges]


@pytest.mark.parametrize("splits", [1, 4])
def test_a_step_with_dense_blocks_launches_attention_for_each_kind_and_a_merge(
    splits: int, launches: dict[str, Launches], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "choose_splits", lambda *_: splits)
    layout = layout_of("int4", Case("step", block_size=16))
    blocks = empty_blocks(layout, [[dense_entry(0), 7, dense_entry(1)], [dense_entry(2), 1, dense_entry(2)]])
    step(blocks, 40)
    assert [len(kernel.grids) for kernel in launches.values()] == [1, 0, 2, 1]


def test_sealing_launches_once_for_all_layers(launches: dict[str, Launches]) -> None:
    layout = layout_of("int4", Case("seal", block_size=16))
    stored = torch.zeros(5, 3, 2, layout.nbytes, dtype=torch.uint8, device=DEVICE)
    pool = torch.zeros(4, 3, 2, 16, 64, device=DEVICE)
    triton.encode_blocks(layout, stored, pool, pool, [2, 0], [4, 1])
    assert launches["encode_kernel"].grids == [(2, 6, 1)]


def step(blocks: LayerBlocks, position: int) -> None:
    """Write a token and attend all."""
    batch, kv_heads = blocks.table.shape[0], blocks.keys.shape[1]
    new = torch.zeros(batch, kv_heads, 1, 64, device=DEVICE)
    query = torch.zeros(batch, 2 * kv_heads, 1, 64, device=DEVICE)
    triton.write(blocks, new, new, position)
    triton.decode(blocks, Attention(query, 0, position + 1, 0.125))


class NoWaiting(TorchDispatchMode):
    """Refuses operators whose result the host has to wait for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
            torch.ops.aten.equal.default,
        ), f"{func} makes the host wait for the device"
        return func(*args, **(kwargs or {}))


@contextmanager
def refuses_to_wait() -> Iterator[None]:
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        with NoWaiting():
            yield
    finally:
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_step_does_not_wait_for_the_device(name: str, request: pytest.FixtureRequest) -> None:
    if DEVICE == "cpu":  # the interpreter itself reads what tensors hold
        request.getfixturevalue("launches")
    layout = layout_of(name, Case("step", block_size=16))
    dense = not layout.format.is_per_token
    entries = [[dense_entry(0), 7, dense_entry(1)]] if dense else [[4, 7, 2]]
    blocks = empty_blocks(layout, entries)
    blocks.dense_columns = ((0, 2),) if dense else ()
    blocks.fault = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    blocks.lengths = RowLengths(41, torch.full((1,), 41, dtype=torch.int32, device=DEVICE))
    step(blocks, 40)  # compiles
    with refuses_to_wait():
        step(blocks, 40)


def test_formats_that_have_no_kernel_are_refused_and_all_others_accepted() -> None:
    for name in FORMAT_NAMES:
        assert triton.unsupported_reason(empty_blocks(layout_of(name, Case("ok")), [[1]])) is None
    odd = KVFormat("odd", Int4Token(), Int4Token()).bind(64, 64, 64)
    assert "no K in int4_token" in str(triton.unsupported_reason(empty_blocks(odd, [[1]])))


def test_records_beyond_two_to_the_31_bytes_are_reached() -> None:
    if DEVICE == "cuda":
        pytest.skip("memory that is never touched is free only on a CPU")
    case = Case("far", batch=1, kv_heads=1, head_dim=128, end=65)
    problem = build_quantized(case, layout_of("int8", case))
    near, layout = problem.blocks, problem.blocks.layout
    assert layout is not None
    assert near.records is not None
    far = torch.empty((1 << 31) // layout.nbytes + 8, 1, layout.nbytes, dtype=torch.uint8)
    table = torch.tensor([[len(far) - 1, len(far) - 3]], dtype=torch.int32)
    far[table[0].long()] = near.records[near.table[0, :2].long()]
    placed = LayerBlocks(near.keys, near.values, table, None, far, layout)
    check(replace(problem, blocks=placed))
    triton.write(placed, problem.keys, problem.values, 0)
    codes, _ = layout.parts(far[-1], "keys")
    assert codes.any()
