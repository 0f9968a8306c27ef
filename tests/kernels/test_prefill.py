from __future__ import annotations

import pytest
import torch

from hf_paged_cache.kernels import prefill
from hf_paged_cache.kernels.call import LayerBlocks
from hf_paged_cache.kernels.torch import partial_softmax, torch_kernels
from tests.kernels.cases import DTYPES, TOLERANCE, build, case_id, dense_answer, rms_ratio
from tests.kernels.prefills import PREFILLS, Prefill, attended, history_case, prefill_answer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES], ids=str)
@pytest.mark.parametrize("p", PREFILLS, ids=case_id)
def test_prefill_is_a_dense_softmax_over_history_and_fresh_tokens(p: Prefill, dtype: torch.dtype) -> None:
    got, want, _ = prefill_answer(p, dtype)
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert rms_ratio(got, want) <= TOLERANCE[dtype]
    assert (got[want == 0] == 0).all()


@pytest.mark.parametrize("p", PREFILLS, ids=case_id)
def test_prefill_in_chunks_of_one_block_is_the_same(p: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "CHUNK_TOKENS", 1)
    got, want, _ = prefill_answer(p, torch.float32)
    assert rms_ratio(got, want) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("p", PREFILLS, ids=case_id)
def test_prefill_in_strips_of_seven_queries_is_the_same(p: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "STRIP_TOKENS", 7)
    got, want, _ = prefill_answer(p, torch.float32)
    assert rms_ratio(got, want) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("p", PREFILLS, ids=case_id)
def test_prefill_without_the_cpu_flash_operator_is_the_same(
    p: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_softmax, "has_flash", lambda query, softcap: False)
    got, want, _ = prefill_answer(p, torch.float32)
    assert rms_ratio(got, want) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("mask", [None, "bool"])
def test_prefill_without_history_attends_the_fresh_tokens_alone(mask: str | None) -> None:
    p = Prefill("fresh", history_case(end=1, kv_heads=2), 20, mask=mask)
    _, _, arguments = prefill_answer(p, torch.float32)
    arguments["end"] = 0
    if mask is not None:
        arguments["mask"] = arguments["mask"][..., 1:]  # type: ignore[index]
    blocks = build(p.case).blocks
    blocks.table[:] = 10**6  # nothing may be read
    got = attended(blocks, **arguments)
    visible = torch.ones(20, 20, dtype=torch.bool).tril().expand(2, 6, 20, 20)
    if mask is not None:
        visible = visible & arguments["mask"]  # type: ignore[operator]
    keys, values = (arguments[x].nan_to_num() for x in ("fresh_keys", "fresh_values"))  # type: ignore[attr-defined]
    want, _ = dense_answer(
        arguments["query"],
        keys,
        values,
        visible,
        torch.zeros(1).double(),
        arguments["scale"],  # type: ignore[arg-type]
    )
    assert rms_ratio(got, want) <= TOLERANCE[torch.float32]


def test_fresh_tokens_are_not_read_back_from_their_blocks() -> None:
    p = Prefill("stored", history_case(end=100), 28)
    case = history_case(end=128)  # the same blocks, in which the fresh tokens' slots hold something else
    _, _, arguments = prefill_answer(p, torch.float32)
    stored = build(case)
    got = attended(stored.blocks, **arguments)
    blocks = LayerBlocks(stored.blocks.keys.clone(), stored.blocks.values.clone(), stored.blocks.table)
    for row in range(2):
        blocks.keys[blocks.table[row, 1], :, 36:] = torch.nan
        blocks.values[blocks.table[row, 1], :, 36:] = torch.nan
    assert torch.equal(attended(blocks, **arguments), got)


@pytest.mark.parametrize("chunk_tokens", [1, 2048])
def test_query_masked_everywhere_by_finfo_min_averages_all_tokens_alike(
    chunk_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "CHUNK_TOKENS", chunk_tokens)
    p = Prefill("padding", history_case(), 20, mask="bias", is_causal=False)
    _, _, arguments = prefill_answer(p, torch.float32)
    mask = torch.zeros(2, 1, 20, 150)
    mask[1, 0, 4] = torch.finfo(torch.float32).min
    arguments["mask"] = mask
    problem = build(p.case)
    got = attended(problem.blocks, **arguments)
    values = torch.cat([problem.values, arguments["fresh_values"]], dim=2)  # type: ignore[list-item]
    assert rms_ratio(got[1, 4], values[1].mean(dim=1).repeat_interleave(3, dim=0)) < 2e-6


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_no_more_of_the_history_is_dense_at_one_time_than_a_chunk(
    softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "CHUNK_TOKENS", 128)
    spans: list[int] = []
    tokens = torch_kernels._tokens

    def recorded(blocks: LayerBlocks, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        spans.append(end - start)
        return tokens(blocks, start, end)

    monkeypatch.setattr(torch_kernels, "_tokens", recorded)
    prefill_answer(Prefill("long", history_case(end=500), 20, softcap=softcap), torch.float32)
    assert spans == [128, 128, 128, 116]
