"""The Triton kernels, on a GPU where there is one and else in Triton's interpreter on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_paged_cache.kernels import reference, triton
from hf_paged_cache.kernels.call import NULL_BLOCK, Attention, LayerBlocks, RowLengths
from tests.kernels.cases import (
    CASES,
    DTYPES,
    QUICK,
    TOLERANCE,
    Case,
    Problem,
    assert_answers,
    build,
    case_id,
    dense_answer,
    rms_ratio,
)
from tests.kernels.prefills import PREFILLS, Prefill, prefill_answer
from tests.support.tails import few

pytest.importorskip("triton")

from hf_paged_cache.kernels.triton import launch, tiles, variants

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

MORE_CASES = (
    Case("many_splits", batch=1, end=2500, group=4, q_tokens=3, causal=True, block_size=16, kv_heads=1),
    Case("many_splits_nothing_in_some", batch=1, end=2100, kv_heads=1, mask="bool_sees_nothing", q_tokens=2),
    Case("many_splits_sinks", batch=1, end=2100, kv_heads=1, group=3, sinks=True, softcap=3.0),
    Case("many_splits_finfo_min", batch=1, end=1100, kv_heads=1, group=3, mask="finfo_min"),
    Case(
        "window_starts_in_a_later_split", batch=1, end=2100, kv_heads=1, window=700, q_tokens=5, causal=True
    ),
    Case("several_tiles_of_queries", q_tokens=70, causal=True, group=2, end=140),
    Case(
        "several_tiles_of_queries_window", q_tokens=70, causal=True, group=3, window=20, end=140, mask="bool"
    ),
    Case("group_71", kv_heads=1, group=71, head_dim=64, end=100),
    Case("head_dim_1", head_dim=1, v_head_dim=3, group=3, end=65),
)


def on_device(problem: Problem) -> Problem:
    """The problem with everything that kernels read on the device."""
    blocks, a = problem.blocks, problem.attention
    moved = replace(
        a,
        query=a.query.to(DEVICE),
        mask=None if a.mask is None else a.mask.to(DEVICE),
        sinks=None if a.sinks is None else a.sinks.to(DEVICE),
    )
    placed = LayerBlocks(
        *(blocks.keys.to(DEVICE), blocks.values.to(DEVICE), blocks.table.to(DEVICE)),
        offsets=None if blocks.offsets is None else blocks.offsets.to(DEVICE),
    )
    return replace(problem, blocks=placed, attention=moved)


def str_or_name(value: Case | torch.dtype) -> str:
    return case_id(value) if isinstance(value, Case) else str(value)


def answer(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    placed = on_device(problem)
    out, lse = triton.decode(placed.blocks, placed.attention, return_lse=True)
    return out.cpu(), lse.cpu()


QUICK_HERE = QUICK | {
    *("many_splits_sinks", "window_starts_in_a_later_split"),
    *("several_tiles_of_queries_window", "head_dim_1"),
}


# What a case is about and the dtype are different code: every case in one of them, in turns.
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, DTYPES[i % len(DTYPES)], marks=[pytest.mark.full] * (case.name not in QUICK_HERE))
        for i, case in enumerate([*CASES, *MORE_CASES])
    ],
    ids=str_or_name,
)
def test_decode_is_a_dense_softmax(case: Case, dtype: torch.dtype) -> None:
    problem = build(case, dtype)
    assert_answers(problem, *answer(problem))


IN_SPLITS = ("sinks_q5_causal_window", "null_several", "offsets_history")


@pytest.mark.parametrize("case", few(CASES, IN_SPLITS), ids=case_id)
def test_decode_in_three_splits_is_the_same(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "choose_splits", lambda *_: 3)
    problem = build(case)
    assert_answers(problem, *answer(problem))


@pytest.mark.parametrize("splits", few([2, 5, 40], {"5"}))
def test_split_of_few_tokens_each_is_the_same(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "choose_splits", lambda *_: splits)
    monkeypatch.setattr(tiles, "_SPLIT_TOKENS", 16)
    variants.attend_constants.cache_clear()
    problem = build(Case("splits", end=500, group=3, window=300, sinks=True))
    assert_answers(problem, *answer(problem))
    variants.attend_constants.cache_clear()


LENGTHS = (1, 63, 64, 65, 500)


@dataclass(frozen=True)
class Ragged:
    """Rows of all `LENGTHS` in one call."""

    group: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        return f"group{self.group}-dim{self.head_dim}-{self.dtype}-{self.window}-{self.softcap}-{self.sinks}"


RAGGED = (
    *(Ragged(group, head_dim) for group in (1, 3, 5, 8) for head_dim in (64, 80, 97, 128, 256)),
    Ragged(3, 80, torch.bfloat16),
    Ragged(5, 128, torch.float16),
    Ragged(3, 64, window=40),
    Ragged(5, 97, softcap=2.0),
    Ragged(8, 64, sinks=True),
    Ragged(3, 128, torch.bfloat16, window=64, softcap=2.0, sinks=True),
)


QUICK_RAGGED = (RAGGED[0], RAGGED[7], RAGGED[12], *RAGGED[20:22], RAGGED[-1])


@pytest.mark.parametrize(
    ("r", "poison"),
    [
        pytest.param(r, (1e4, float("nan"))[i % 2], marks=[pytest.mark.full] * (r not in QUICK_RAGGED))
        for i, r in enumerate(RAGGED)
    ],
    ids=str,
)
def test_rows_of_different_lengths_are_each_a_dense_softmax_whatever_lies_in_unused_slots(
    r: Ragged, poison: float
) -> None:
    kv_heads, block_size, batch = 2, 64, len(LENGTHS)
    g = torch.Generator().manual_seed(1)
    columns = -(-max(LENGTHS) // block_size)
    order = torch.randperm(batch * columns + 3, generator=g, dtype=torch.int32)
    table = order[: batch * columns].view(batch, columns)
    shape = (len(order), kv_heads, block_size, r.head_dim)
    keys, values = (torch.full(shape, poison).to(r.dtype) for _ in range(2))
    query = torch.randn(batch, kv_heads * r.group, 1, r.head_dim, generator=g).to(r.dtype)
    sinks = torch.randn(kv_heads * r.group, generator=g).to(r.dtype) if r.sinks else None
    wants = []
    for row, length in enumerate(LENGTHS):
        dense = [torch.randn(1, kv_heads, length, r.head_dim, generator=g).to(r.dtype) for _ in range(2)]
        for pool, tokens in zip((keys, values), dense, strict=True):
            for position in range(length):
                pool[table[row, position // block_size], :, position % block_size] = tokens[0, :, position]
        visible = torch.arange(length) > length - 1 - (r.window or length)
        shown = visible.expand(1, kv_heads * r.group, 1, length)
        zero = torch.zeros(1).double()
        wants.append(
            dense_answer(query[row : row + 1], *dense, shown, zero, r.head_dim**-0.5, r.softcap, sinks)[0]
        )
    a = Attention(
        query.to(DEVICE),
        0,
        max(LENGTHS),
        r.head_dim**-0.5,
        causal=True,
        window=r.window,
        softcap=r.softcap,
        sinks=None if sinks is None else sinks.to(DEVICE),
    )
    blocks = LayerBlocks(keys.to(DEVICE), values.to(DEVICE), table.to(DEVICE))
    out, _ = launch.attend(blocks, a, torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE))
    for row, want in enumerate(wants):
        assert rms_ratio(out[row].cpu(), want[0]) <= TOLERANCE[r.dtype], f"row {row}, {LENGTHS[row]} tokens"


INTERPRETED = (  # in less than a second each
    *(
        "softcap_window_sinks",
        "window_into_history",
        "history_begins_inside_a_block",
        "sees_nothing_but_sinks",
    ),
    *("left_padding_window", "offsets_end_in_the_fresh_tokens_bias"),
)


@pytest.mark.parametrize("p", few(PREFILLS, INTERPRETED), ids=case_id)
def test_prefill_over_history_is_a_dense_softmax(p: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_PAGED_CACHE_BACKEND", "triton")
    got, want, _ = prefill_answer(p, torch.float32, DEVICE)
    assert got.is_contiguous()
    assert rms_ratio(got.cpu(), want) <= TOLERANCE[torch.float32]
    assert (got.cpu()[want == 0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "name",
    few(["plain", "softcap_window_sinks", "left_padding", "finfo_min"], {"plain"}),
)
def test_prefill_over_history_is_a_dense_softmax_in_half_precision(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_PAGED_CACHE_BACKEND", "triton")
    p = next(p for p in PREFILLS if p.name == name)
    got, want, _ = prefill_answer(p, dtype, DEVICE)
    assert rms_ratio(got.cpu(), want) <= TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("start", "tokens"), [(0, 1), (0, 64), (0, 65), (63, 1), (63, 2), (30, 100), (191, 1)], ids=str
)
@pytest.mark.parametrize("null", [False, True], ids=["all_stored", "null_block"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_write_is_the_reference(start: int, tokens: int, null: bool, dtype: torch.dtype) -> None:
    case = Case("w", end=192, head_dim=97, v_head_dim=48, kv_heads=3, nulls=((0, 0), (1, 1)) if null else ())
    mine, theirs = on_device(build(case, dtype)).blocks, build(case, dtype).blocks
    keys = torch.randn(2, tokens, 3, 97).transpose(1, 2).to(dtype)
    values = torch.randn(2, tokens, 3, 48).transpose(1, 2).to(dtype)
    triton.write(mine, keys.to(DEVICE), values.to(DEVICE), start)
    reference.write(theirs, keys, values, start)
    for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
        assert torch.equal(a.cpu().nan_to_num(7.0), b.nan_to_num(7.0))


def test_write_at_the_end_of_rows_of_different_lengths_drops_what_the_table_does_not_hold() -> None:
    keys, values = torch.zeros(4, 1, 16, 8, device=DEVICE), torch.zeros(4, 1, 16, 8, device=DEVICE)
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([17, 33], dtype=torch.int32, device=DEVICE)
    new = torch.arange(1.0, 5.0, device=DEVICE).view(2, 1, 2, 1).expand(2, 1, 2, 8).contiguous()
    launch.write(LayerBlocks(keys, values, table), lengths, new, new)
    got = {(b, s): float(keys[b, 0, s, 0]) for b in range(4) for s in range(16) if keys[b, 0, s, 0] != 0}
    #       row 0: tokens 15, 16        row 1: token 31; token 32 lies beyond its two blocks
    assert got == {(0, 15): 1.0, (1, 0): 2.0, (3, 15): 3.0}


def test_copy_blocks_reads_all_sources_first() -> None:
    pool = torch.arange(5.0, device=DEVICE).view(5, 1).repeat(1, 9000)
    triton.copy_blocks(pool, [0, 2], [1, 3])
    assert pool[:, 0].tolist() == pool[:, -1].tolist() == [0, 0, 2, 2, 4]
    triton.copy_blocks(pool, [0, 2, 4], [2, 4, 0])
    assert pool[:, 0].tolist() == pool[:, -1].tolist() == [4, 0, 0, 2, 2]
    triton.copy_blocks(pool, [], [])
    assert pool[:, 0].tolist() == [4, 0, 0, 2, 2]


@pytest.mark.skipif(DEVICE == "cuda", reason="memory that is never touched is free only on a CPU")
def test_blocks_beyond_two_to_the_31_elements_are_reached() -> None:
    case = Case("far", batch=1, kv_heads=1, head_dim=128, end=65)
    problem = build(case, torch.float16)
    blocks = (1 << 31) // (64 * 128) + 4
    far = [torch.empty(blocks, 1, 64, 128, dtype=torch.float16) for _ in range(2)]
    table = torch.tensor([[blocks - 1, blocks - 3]], dtype=torch.int32)
    placed = LayerBlocks(far[0], far[1], table)
    triton.write(placed, problem.keys, problem.values, 0)
    assert torch.equal(far[0][blocks - 1, 0], problem.keys[0, 0, :64])
    assert_answers(replace(problem, blocks=placed), triton.decode(placed, problem.attention)[0])
    triton.copy_blocks(far[0], [blocks - 1], [blocks - 2])
    assert torch.equal(far[0][blocks - 2], far[0][blocks - 1])


def test_lengths_on_the_device_are_used_also_for_a_view_that_ends_earlier() -> None:
    problem = on_device(build(Case("old", end=100)))
    held = RowLengths(100, torch.full((2,), 100, dtype=torch.int32, device=DEVICE))
    problem.blocks.lengths = held
    assert_answers(problem, triton.decode(problem.blocks, problem.attention)[0].cpu())
    held.set(130)
    assert_answers(problem, triton.decode(problem.blocks, problem.attention)[0].cpu())
    held.set(50)
    assert_answers(problem, triton.decode(problem.blocks, problem.attention)[0].cpu())


@pytest.mark.parametrize("splits", [1, 3])
def test_nan_in_a_visible_value_is_not_hidden(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "choose_splits", lambda *_: splits)
    problem = build(Case("nan", end=500, batch=1, block_size=16))
    problem.blocks.keys[problem.blocks.table[0, 3], 0] = torch.nan
    out, _ = answer(problem)
    assert out[0, 0, 0].isnan().all()
    assert not out[0, 0, 1].isnan().any()


class Launches:
    """Stands for a kernel and notes its grids and arguments instead of running."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def warmup(self, *args: Any, **kwargs: Any) -> None:
        """Compiles nothing either."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grids.append(grid)
        return lambda *args, **kwargs: None


def test_a_decode_step_launches_write_and_attend_and_where_rows_are_split_merge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = {name: Launches() for name in ("write_kernel", "attend_kernel", "merge_kernel", "copy_kernel")}
    for name, kernel in kernels.items():
        monkeypatch.setattr(launch, name, kernel)
    problem = on_device(build(Case("step", end=65)))
    new = problem.keys[:, :, -1:].to(DEVICE)
    for splits, merges in ((1, 0), (4, 1)):
        monkeypatch.setattr(launch, "choose_splits", lambda *_, splits=splits: splits)
        for kernel in kernels.values():
            kernel.grids.clear()
        triton.write(problem.blocks, new, new, 64)
        triton.decode(problem.blocks, problem.attention)
        counts = [len(kernel.grids) for kernel in kernels.values()]
        assert counts == [1, 1, merges, 0]


def test_grids_stay_while_rows_grow_within_a_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    attend, merge = Launches(), Launches()
    monkeypatch.setattr(launch, "attend_kernel", attend)
    monkeypatch.setattr(launch, "merge_kernel", merge)
    problem = on_device(build(Case("grow", end=65)))
    grids = {}
    for end in (1025, 1026, 1500, 2047, 2048, 2049):
        attend.grids.clear()
        triton.decode(problem.blocks, replace(problem.attention, end=end))
        grids[end] = attend.grids[0]
    assert len({grids[end] for end in (1025, 1026, 1500, 2047, 2048)}) == 1
    assert merge.grids


@pytest.mark.parametrize(
    ("programs", "tokens", "splits"),
    [
        (8, 100, 1),  # 256 tokens a program at least
        (8, 512, 1),  # the launch of a merge costs more
        (8, 1024, 4),
        (8, 1025, 8),  # the class up to 2048 tokens
        (8, 128 << 10, 33),  # two programs for each of 132 multiprocessors
        (64, 128 << 10, 4),
        (132, 128 << 10, 2),
        (256, 128 << 10, 1),  # a second program for some only would make all wait for it
    ],
)
def test_splits_fill_the_device_but_are_worth_a_merge(programs: int, tokens: int, splits: int) -> None:
    assert tiles.choose_splits(programs, tokens, 132) == splits


class NoWaiting(TorchDispatchMode):
    """Refuses operators whose result the host has to wait for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
            torch.ops.aten.equal.default,
        ), f"{func} makes the host wait for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["gqa_5", "mask_bool_padding", "mask_bias", "many_splits_sinks"])
def test_write_and_decode_do_not_wait_for_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in ("write_kernel", "attend_kernel", "merge_kernel"):
        if DEVICE == "cpu":  # the interpreter itself reads what tensors hold
            monkeypatch.setattr(launch, kernel, Launches())
    problem = on_device(build(next(case for case in (*CASES, *MORE_CASES) if case.name == name)))
    problem.blocks.lengths = RowLengths(
        problem.attention.end,
        torch.full((problem.blocks.table.shape[0],), problem.attention.end, dtype=torch.int32, device=DEVICE),
    )
    new_keys, new_values = (x[:, :, -1:].to(DEVICE) for x in (problem.keys, problem.values))
    triton.decode(problem.blocks, problem.attention)  # compiles
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        with NoWaiting():
            triton.write(problem.blocks, new_keys, new_values, problem.attention.end - 1)
            triton.decode(problem.blocks, problem.attention)
    finally:
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float64}, "float32, bfloat16 or float16 blocks, not torch.float64"),
        ({"head_dim": 257}, "head dims up to 256, not 257"),
        ({"v_head_dim": 512}, "head dims up to 256, not 512"),
        ({"block_size": 24}, "blocks of 16, 32, 64, ... tokens, not 24"),
        ({"transposed": True}, "rows of head_dim elements are contiguous"),
    ],
    ids=["float64", "head_dim", "v_head_dim", "block_size", "transposed"],
)
def test_blocks_that_the_kernels_cannot_read_are_refused(changes: dict[str, Any], reason: str) -> None:
    size = {"block_size": 64, "head_dim": 64, "v_head_dim": 64, "dtype": torch.float32} | changes
    keys = torch.zeros(2, 1, size["block_size"], size["head_dim"], dtype=size["dtype"], device=DEVICE)
    values = torch.zeros(2, 1, size["block_size"], size["v_head_dim"], dtype=size["dtype"], device=DEVICE)
    if size.get("transposed"):
        keys = keys.transpose(2, 3)
    table = torch.full((1, 1), NULL_BLOCK, dtype=torch.int32, device=DEVICE)
    assert reason in str(triton.unsupported_reason(LayerBlocks(keys, values, table)))


def test_blocks_of_every_supported_kind_are_accepted() -> None:
    for dtype in DTYPES:
        assert triton.unsupported_reason(on_device(build(Case("ok", head_dim=97), dtype)).blocks) is None


def test_attention_record_has_no_field_that_the_kernels_overlook() -> None:
    fields = set(Attention.__dataclass_fields__)
    assert fields == {
        "query", "start", "end", "scale", "mask", "causal", "window", "softcap", "sinks", "queries_are_last",
    }  # fmt: skip
