from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_paged_cache.kernels import reference
from hf_paged_cache.kernels.call import LayerBlocks
from hf_paged_cache.kernels.torch import partial_softmax, torch_kernels
from tests.kernels.cases import CASES, DTYPES, Case, assert_answers, build, case_id, rms_ratio

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES], ids=str)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_decode_is_a_dense_softmax(case: Case, dtype: torch.dtype) -> None:
    problem = build(case, dtype)
    got, lse = torch_kernels.decode(problem.blocks, problem.attention, return_lse=True)
    assert_answers(problem, got, lse)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_decode_in_chunks_of_one_block_is_the_same(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_kernels, "CHUNK_BYTES", 1)
    problem = build(case)
    got, lse = torch_kernels.decode(problem.blocks, problem.attention, return_lse=True)
    assert_answers(problem, got, lse)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_decode_without_the_cpu_flash_operator_is_the_same(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_softmax, "has_flash", lambda query, softcap: False)
    problem = build(case)
    got, lse = torch_kernels.decode(problem.blocks, problem.attention, return_lse=True)
    assert_answers(problem, got, lse)


@pytest.mark.parametrize("chunk_bytes", [1, 4 << 20])
def test_query_masked_everywhere_by_finfo_min_averages_all_tokens_alike(
    chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_kernels, "CHUNK_BYTES", chunk_bytes)
    problem = build(Case("padding", q_tokens=2, group=2, end=150))
    mask = torch.zeros(2, 1, 2, 150)
    mask[0, 0, 1] = torch.finfo(torch.float32).min
    problem.attention.mask = mask
    got = torch_kernels.decode(problem.blocks, problem.attention)[0]
    mean = problem.values[0].mean(dim=1).repeat_interleave(2, dim=0)
    assert rms_ratio(got[0, 1], mean) < 2e-6
    assert rms_ratio(got, reference.decode(problem.blocks, problem.attention)[0]) < 2e-6


def test_decode_of_no_tokens_is_zeros_and_the_sink() -> None:
    problem = build(Case("one", end=1, sinks=True))
    problem.attention.end = 0
    out, lse = torch_kernels.decode(problem.blocks, problem.attention, return_lse=True)
    assert not out.any()
    assert torch.equal(lse, problem.attention.sinks[None, :, None].expand(2, 2, 1))


def test_decode_is_nan_where_a_visible_value_is_nan() -> None:
    problem = build(Case("nan", end=500, batch=1, block_size=16))
    problem.blocks.values[problem.blocks.table[0, 3], 0, 3] = torch.nan
    out = torch_kernels.decode(problem.blocks, problem.attention)[0]
    assert out[0, 0, 0].isnan().all()
    assert not out[0, 0, 1].isnan().any()


def test_decode_never_makes_the_dense_history(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = build(Case("long", end=2048, batch=1, kv_heads=2))
    pools = [x.untyped_storage().data_ptr() for x in (problem.blocks.keys, problem.blocks.values)]

    class Largest(TorchDispatchMode):
        nbytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            for made in result if isinstance(result, tuple) else (result,):
                if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in pools:
                    self.nbytes = max(self.nbytes, made.untyped_storage().nbytes())
            return result

    monkeypatch.setattr(torch_kernels, "CHUNK_BYTES", 256 * 2 * 2 * 64 * 4)  # 256 tokens
    with Largest() as largest:
        torch_kernels.decode(problem.blocks, problem.attention)
    assert largest.nbytes == 256 * 2 * 64 * 4


@pytest.mark.parametrize(
    ("start", "tokens"), [(0, 1), (0, 64), (0, 65), (63, 1), (63, 2), (30, 100), (191, 1)], ids=str
)
@pytest.mark.parametrize("null", [False, True], ids=["all_stored", "null_block"])
def test_write_then_gather_is_the_reference(start: int, tokens: int, null: bool) -> None:
    nulls = ((0, 0), (1, 1)) if null else ()
    case = Case("w", end=192, v_head_dim=48, nulls=nulls)
    mine, theirs = build(case).blocks, build(case).blocks
    keys = torch.randn(2, tokens, 2, 64).transpose(1, 2)
    values = torch.randn(2, tokens, 2, 48).transpose(1, 2)
    torch_kernels.write(mine, keys, values, start)
    reference.write(theirs, keys, values, start)
    for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    got, want = (
        torch_kernels.gather(mine, start, start + tokens),
        reference.gather(mine, start, start + tokens),
    )
    for a, b in zip(got, want, strict=True):
        assert a.is_contiguous()
        assert torch.equal(a, b)


def test_gather_of_no_tokens_is_empty() -> None:
    keys, values = torch_kernels.gather(build(Case("g", v_head_dim=48)).blocks, 64, 64)
    assert keys.shape == (2, 2, 0, 64)
    assert values.shape == (2, 2, 0, 48)


def test_gather_reads_pools_of_any_strides() -> None:
    blocks = build(Case("g", end=130)).blocks
    slots_first = blocks.keys.transpose(1, 2).contiguous().transpose(1, 2)
    assert slots_first.stride() != blocks.keys.contiguous().stride()
    strided = LayerBlocks(slots_first, blocks.values, blocks.table)
    assert torch.equal(torch_kernels.gather(strided, 3, 130)[0], torch_kernels.gather(blocks, 3, 130)[0])


def test_copy_blocks_reads_all_sources_first() -> None:
    pool = torch.arange(4.0).view(4, 1).repeat(1, 3)
    torch_kernels.copy_blocks(pool, [0, 1, 3], [1, 2, 0])
    assert pool[:, 0].tolist() == [3, 0, 1, 3]
    torch_kernels.copy_blocks(pool, [], [])
    assert pool[:, 0].tolist() == [3, 0, 1, 3]


def test_nan_in_a_mask_is_not_hidden() -> None:
    problem = build(Case("nan", end=70))
    problem.attention.mask = torch.zeros(70)
    problem.attention.mask[3] = torch.nan
    assert torch_kernels.decode(problem.blocks, problem.attention)[0].isnan().all()
