from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from hf_paged_cache.kernels import cpp, reference
from hf_paged_cache.kernels.call import NULL_BLOCK, Attention, LayerBlocks
from hf_paged_cache.kernels.cpp import build as cpu_build
from tests.kernels.cases import CASES, DTYPES, Case, Problem, assert_answers, build, case_id, rms_ratio

pytestmark = pytest.mark.skipif(cpp.unavailable_reason() is not None, reason=str(cpp.unavailable_reason()))

ISAS = ("avx512", "avx2", "portable")

MORE_CASES = (
    Case("group_71", kv_heads=1, group=71, head_dim=64, end=100),
    Case("group_71_q16", batch=1, kv_heads=1, group=71, q_tokens=16, causal=True, end=90),
    Case("more_queries_than_one_block", q_tokens=70, causal=True, group=2, end=140),
    Case("head_dim_512", head_dim=512, group=4, end=65),
    Case("latent_576_512", batch=1, kv_heads=1, group=5, head_dim=576, v_head_dim=512, end=300),
    Case("head_dim_1", head_dim=1, v_head_dim=3, group=3, end=65),
    Case("head_dim_33", head_dim=33, v_head_dim=31, group=7, kv_heads=1, end=65),
    Case("many_splits", batch=1, end=2500, group=4, q_tokens=3, causal=True, block_size=16, kv_heads=1),
    Case("many_splits_nothing_in_some", batch=1, end=2100, kv_heads=1, mask="bool_sees_nothing", q_tokens=2),
    Case("many_splits_sinks", batch=1, end=2100, kv_heads=1, group=3, sinks=True, softcap=3.0),
    Case(
        "window_starts_in_a_later_split", batch=1, end=2100, kv_heads=1, window=700, q_tokens=5, causal=True
    ),
)


@functools.cache
def built(case: Case, dtype: torch.dtype) -> Problem:
    return build(case, dtype)


@functools.cache
def library(isa: str) -> cpu_build.Library | str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_PAGED_CACHE_CPU_ISA", isa)
        patch.setattr(cpp, "_loaded", None)
        return cpp._load()


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    loaded = library(request.param)
    if isinstance(loaded, str):
        pytest.skip(loaded)
    monkeypatch.setattr(cpp, "_loaded", loaded)
    assert cpp.isa() == request.param
    return cpp.isa()


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*CASES, *MORE_CASES], ids=case_id)
def test_decode_is_a_dense_softmax(case: Case, dtype: torch.dtype, isa: str) -> None:
    problem = built(case, dtype)
    got, lse = cpp.decode(problem.blocks, problem.attention, return_lse=True)
    assert_answers(problem, got, lse)
    assert torch.equal(cpp.decode(problem.blocks, problem.attention)[0], got)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["500_tokens", "many_splits", "many_splits_sinks", "batch_5"])
def test_one_thread_and_two_agree(name: str, dtype: torch.dtype, threads: None) -> None:
    case = next(case for case in (*CASES, *MORE_CASES) if case.name == name)
    problem = built(case, dtype)
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        got, lse = cpp.decode(problem.blocks, problem.attention, return_lse=True)
        assert_answers(problem, got, lse)


def test_float32_is_as_exact_as_float32_sums_can_be() -> None:
    problem = built(Case("long", batch=1, end=3000, group=3, head_dim=128), torch.float32)
    assert rms_ratio(cpp.decode(problem.blocks, problem.attention)[0], problem.want) < 6e-7


def test_equal_scores_of_a_wholly_finfo_min_row_give_the_average_of_its_values() -> None:
    problem = built(Case("long", batch=1, end=700, kv_heads=1), torch.float32)
    mask = torch.full((1, 1, 1, 700), torch.finfo(torch.float32).min)
    got = cpp.decode(problem.blocks, replace(problem.attention, mask=mask))[0]
    assert rms_ratio(got[0, 0, 0], problem.values[0, 0].double().mean(0)) < 1e-5


def test_finfo_min_mask_hides_a_token_beside_others(isa: str) -> None:
    case = Case("finfo", end=130, mask="finfo_min", group=3)
    for dtype in (torch.float32, torch.bfloat16):
        problem = built(case, dtype)
        assert_answers(problem, cpp.decode(problem.blocks, problem.attention)[0])


def test_nan_that_is_attended_reaches_the_output(isa: str) -> None:
    problem = build(Case("nan", batch=2, end=65), torch.float32)
    block, slot = problem.blocks.table[1, 0], 5
    problem.blocks.values[block, 1, slot, 7] = torch.nan
    got = cpp.decode(problem.blocks, problem.attention)[0]
    nan = got.isnan().nonzero().tolist()
    assert nan == [[1, 0, 1, 7]]

    problem.blocks.keys[block, 1, slot, 7] = torch.nan
    got, lse = cpp.decode(problem.blocks, problem.attention, return_lse=True)
    assert got[1, 0, 1].isnan().all()
    assert lse[1, 1, 0].isnan()
    assert got[0].isfinite().all()
    assert got[1, 0, 0].isfinite().all()


def test_large_garbage_in_unread_slots_changes_no_bit() -> None:
    problem = build(Case("garbage", end=65, group=3, mask="bool_padding"), torch.bfloat16)
    want = cpp.decode(problem.blocks, problem.attention)[0]
    for tensor in (problem.blocks.keys, problem.blocks.values):
        tensor.nan_to_num_(nan=1e4)
    assert torch.equal(cpp.decode(problem.blocks, problem.attention)[0], want)


def test_queries_of_any_strides_give_the_same_answer() -> None:
    problem = built(Case("strides", q_tokens=3, group=3, end=100), torch.float32)
    a = problem.attention
    want = cpp.decode(problem.blocks, a)[0]
    contiguous = a.query.contiguous()
    spread = torch.full((*contiguous.shape[:-1], 2 * contiguous.shape[-1]), torch.nan)
    spread[..., ::2] = contiguous
    for query in (contiguous, spread[..., ::2]):
        assert torch.equal(cpp.decode(problem.blocks, replace(a, query=query))[0], want)


def test_no_tokens_give_zeros() -> None:
    problem = built(Case("strides", q_tokens=3, group=3, end=100), torch.float32)
    got, lse = cpp.decode(problem.blocks, replace(problem.attention, end=0), return_lse=True)
    assert (got == 0).all()
    assert (lse == -torch.inf).all()


def _empty_blocks(
    batch: int, columns: int, kv_heads: int, block_size: int, head_dims: tuple[int, int], dtype: torch.dtype
) -> LayerBlocks:
    num_blocks = batch * columns + 1
    pools = [
        torch.full((num_blocks, 2, kv_heads, block_size, dim), torch.nan, dtype=dtype) for dim in head_dims
    ]
    table = torch.randperm(num_blocks, dtype=torch.int32)[: batch * columns].view(batch, columns)
    return LayerBlocks(pools[0][:, 1], pools[1][:, 1], table)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("start", "tokens"),
    [(0, 1), (0, 16), (15, 1), (16, 1), (5, 40), (31, 33), (0, 64)],
)
def test_write_stores_what_the_reference_stores(start: int, tokens: int, dtype: torch.dtype) -> None:
    blocks = _empty_blocks(3, 4, 2, 16, (24, 40), dtype)
    blocks.table[1, 1] = NULL_BLOCK
    want = LayerBlocks(blocks.keys.clone(), blocks.values.clone(), blocks.table)
    keys = torch.randn(3, tokens, 2, 24).to(dtype).transpose(1, 2)
    values = torch.randn(3, 2, tokens, 40).to(dtype)
    cpp.write(blocks, keys, values, start)
    reference.write(want, keys, values, start)
    assert torch.equal(blocks.keys.nan_to_num(nan=-77.0), want.keys.nan_to_num(nan=-77.0))
    assert torch.equal(blocks.values.nan_to_num(nan=-77.0), want.values.nan_to_num(nan=-77.0))
    assert not blocks.keys.isnan().all()


def test_write_of_many_tokens_by_several_threads_stores_each() -> None:
    blocks = _empty_blocks(2, 20, 3, 64, (64, 64), torch.float32)
    keys, values = torch.randn(2, 3, 1200, 64), torch.randn(2, 3, 64, 1200).transpose(2, 3)
    cpp.write(blocks, keys, values, 37)
    stored_keys, stored_values = reference.gather(blocks, 37, 1237)
    assert torch.equal(stored_keys, keys)
    assert torch.equal(stored_values, values)
    assert blocks.keys[blocks.table[0, 0].long(), :, :37].isnan().all()


def test_offsets_past_2_31_elements_are_reached() -> None:
    # 4.3 GB of address space, of which the few pages touched here take memory.
    num_blocks = 2**31 // (16 * 64) + 2
    keys = torch.empty(num_blocks, 1, 16, 64, dtype=torch.bfloat16)
    table = torch.tensor([[num_blocks - 1, num_blocks - 2]], dtype=torch.int32)
    blocks = LayerBlocks(keys, keys, table)
    states = torch.randn(1, 1, 20, 64).bfloat16()
    cpp.write(blocks, states, states, 0)
    assert torch.equal(keys[num_blocks - 1, 0], states[0, 0, :16])
    a = Attention(torch.randn(1, 3, 1, 64).bfloat16(), 0, 20, 0.125)
    assert rms_ratio(cpp.decode(blocks, a)[0], reference.decode(blocks, a)[0]) < 3e-3


def test_blocks_are_prepared_anew_after_the_table_is_replaced() -> None:
    problem = build(Case("table", end=130, group=3), torch.float32)
    want = cpp.decode(problem.blocks, problem.attention)[0]
    swapped = problem.blocks.table.flip(0).contiguous()
    problem.blocks.table, problem.blocks.native = swapped, None
    a = replace(problem.attention, query=problem.attention.query.flip(0))
    assert torch.equal(cpp.decode(problem.blocks, a)[0], want.flip(0))


def test_copy_blocks_copies_whole_blocks_only() -> None:
    pool = torch.randn(9, 2, 3, 16, 8)
    want = pool.clone()
    want[[7, 0, 2]] = want[[1, 1, 8]]
    cpp.copy_blocks(pool, [1, 1, 8], [7, 0, 2])
    assert torch.equal(pool, want)


def test_copy_blocks_reads_all_sources_first() -> None:
    pool = torch.arange(4.0).view(4, 1).repeat(1, 5)
    cpp.copy_blocks(pool, [0, 1, 2], [1, 2, 0])
    assert pool[:, 0].tolist() == [2.0, 0.0, 1.0, 3.0]


def test_copy_blocks_of_many_bytes_by_several_threads() -> None:
    pool = torch.randn(64, 8192)
    want = pool.clone()
    want[32:] = want[:32]
    cpp.copy_blocks(pool, list(range(32)), list(range(32, 64)))
    assert torch.equal(pool, want)


@pytest.mark.parametrize(("src", "dst"), [([0], [4]), ([-1], [2]), ([4], [0]), ([0, 1], [2])])
def test_copy_blocks_refuses_what_lies_outside(src: list[int], dst: list[int]) -> None:
    pool = torch.zeros(4, 8)
    with pytest.raises(AssertionError, match=r"outside the pool of 4|cannot be copied"):
        cpp.copy_blocks(pool, src, dst)


def test_a_table_that_names_a_block_outside_the_pool_is_refused() -> None:
    problem = build(Case("outside", end=130), torch.float32)
    problem.blocks.table[1, 1] = problem.blocks.keys.shape[0]
    with pytest.raises(AssertionError, match="outside the pool"):
        cpp.decode(problem.blocks, problem.attention)
    states = torch.zeros(2, 2, 1, 64)
    with pytest.raises(AssertionError, match="outside the pool"):
        cpp.write(problem.blocks, states, states, 64)


def test_calls_that_do_not_fit_the_blocks_are_refused_before_memory_is_touched() -> None:
    problem = built(Case("fit", batch=2, kv_heads=2, group=3, end=130), torch.float32)
    blocks, a = problem.blocks, problem.attention
    capacity = blocks.table.shape[1] * blocks.block_size
    for wrong in (
        replace(a, end=capacity + 1),
        replace(a, start=131),
        replace(a, start=-1),
        replace(a, query=a.query[:1]),
        replace(a, query=a.query[..., :32]),
        replace(a, query=a.query[:, :5]),
        replace(a, query=a.query.bfloat16()),
    ):
        with pytest.raises(AssertionError, match="does not fit"):
            cpp.decode(blocks, wrong)
    states = torch.zeros(2, 2, 1, 64)
    for keys, values, start in (
        (states, states, capacity),
        (states, states, -1),
        (states[:1], states[:1], 0),
        (states, states[..., :32], 0),
        (states.bfloat16(), states, 0),
    ):
        with pytest.raises(AssertionError, match="do not fit"):
            cpp.write(blocks, keys, values, start)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda b: replace(b, keys=b.keys.double(), values=b.values.double()), "float64"),
        (lambda b: replace(b, values=b.values.bfloat16()), "bfloat16"),
        (lambda b: replace(b, keys=b.keys.transpose(2, 3)), "contiguous"),
        (lambda b: replace(b, table=b.table.long()), "int32"),
        (lambda b: replace(b, keys=b.keys.to("meta")), "meta"),
        (lambda b: replace(b, keys=torch.zeros(1, 1, 512, 8), values=torch.zeros(1, 1, 512, 8)), "512"),
    ],
)
def test_unsupported_blocks_are_named(change: object, match: str) -> None:
    blocks = _empty_blocks(1, 1, 1, 16, (16, 16), torch.float32)
    assert cpp.unsupported_reason(blocks) is None
    assert match in str(cpp.unsupported_reason(change(blocks)))  # type: ignore[operator]


def test_scratch_does_not_grow_from_step_to_step() -> None:
    problem = built(Case("scratch", end=130, group=3), torch.float32)
    cpp.decode(problem.blocks, problem.attention)
    held = cpp.scratch_bytes()
    assert held > 0
    for end in range(120, 130):
        cpp.decode(problem.blocks, replace(problem.attention, end=end))
    assert cpp.scratch_bytes() == held


def test_python_threads_may_call_at_once() -> None:
    problems = [built(case, torch.float32) for case in (*CASES[5:9], *MORE_CASES[-3:])]
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for problem in problems * 3:
                assert_answers(problem, cpp.decode(problem.blocks, problem.attention)[0])
        except BaseException as failure:
            failures.append(failure)

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == []
