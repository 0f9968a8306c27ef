from __future__ import annotations

import pytest
import torch

from hf_paged_cache.kernels import reference
from hf_paged_cache.kernels.call import NULL_BLOCK, LayerBlocks
from tests.kernels.cases import CASES, Case, assert_answers, build, case_id, rms_ratio

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_decode_is_a_dense_softmax(case: Case, dtype: torch.dtype) -> None:
    problem = build(case, dtype)
    got, lse = reference.decode(problem.blocks, problem.attention, return_lse=True)
    assert_answers(problem, got, lse)


def test_decode_sums_in_the_dtype_that_the_module_says(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = build(Case("long", end=500))
    single = rms_ratio(reference.decode(problem.blocks, problem.attention)[0], problem.want.float())
    monkeypatch.setattr(reference, "ACCUMULATE_DTYPE", torch.float64)
    double = rms_ratio(reference.decode(problem.blocks, problem.attention)[0], problem.want.float())
    assert double < 2e-8 < single


def test_decode_of_no_tokens_is_zeros() -> None:
    problem = build(Case("one", end=1))
    problem.attention.end = 0
    out, lse = reference.decode(problem.blocks, problem.attention, return_lse=True)
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_decode_is_nan_where_a_visible_value_is_nan() -> None:
    problem = build(Case("nan", end=10, batch=1))
    problem.blocks.values[problem.blocks.table[0, 0], 0, 3] = torch.nan
    out = reference.decode(problem.blocks, problem.attention)[0]
    assert out[0, 0, 0].isnan().all()
    assert not out[0, 0, 1].isnan().any()


def _numbered_blocks() -> LayerBlocks:
    """Four blocks of two slots, one head, all -1; tables `[2, 0, null]` and `[3, null, 1]`."""
    table = torch.tensor([[2, 0, NULL_BLOCK], [3, NULL_BLOCK, 1]], dtype=torch.int32)
    return LayerBlocks(torch.full((4, 1, 2, 1), -1.0), torch.full((4, 1, 2, 2), -1.0), table)


def test_write_puts_each_token_in_its_slot_and_drops_those_of_null_blocks() -> None:
    blocks = _numbered_blocks()
    new = torch.tensor([[1.0, 2, 3, 4], [11, 12, 13, 14]]).view(2, 1, 4, 1)
    reference.write(blocks, new, new.repeat(1, 1, 1, 2) + 100, 1)  # positions 1, 2, 3, 4
    #       block 0    block 1     block 2    block 3
    want = [[2.0, 3], [14.0, -1], [-1.0, 1], [-1.0, 11]]
    assert blocks.keys[:, 0, :, 0].tolist() == want
    assert blocks.values[:, 0, :, 1].tolist() == [[x if x < 0 else x + 100 for x in block] for block in want]


def test_gather_reads_null_blocks_as_zeros() -> None:
    blocks = _numbered_blocks()
    blocks.keys[:, 0, :, 0] = torch.arange(8.0).view(4, 2)
    blocks.values[:, 0, :, :] = torch.arange(8.0).view(4, 2, 1) + torch.tensor([10.0, 20.0])
    keys, values = reference.gather(blocks, 1, 6)
    assert keys[:, 0, :, 0].tolist() == [[5, 0, 1, 0, 0], [7, 0, 0, 2, 3]]
    assert values[0, 0].tolist() == [[15, 25], [10, 20], [11, 21], [0, 0], [0, 0]]


def test_copy_blocks_reads_all_sources_first() -> None:
    pool = torch.arange(4.0).view(4, 1).repeat(1, 3)
    reference.copy_blocks(pool, [0, 1, 3], [1, 2, 0])
    assert pool[:, 0].tolist() == [3, 0, 1, 3]


def test_copy_blocks_refuses_lists_of_different_lengths() -> None:
    with pytest.raises(ValueError, match="shorter"):
        reference.copy_blocks(torch.zeros(4, 1), [0, 1], [2])
