"""Beams and copies of rows keep their own history, whatever is stored of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged_cache import PagedCache
from hf_paged_cache.formats import FORMATS
from tests.support.chats import AT_EDGES, BLOCK, FAMILIES, fill, generate, paged, prompt, reference
from tests.support.models import host_cache, shared_model


@pytest.mark.parametrize("options", [{"num_beams": 4}, {"num_beams": 4, "num_return_sequences": 3}], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_beams_say_what_they_say_with_the_stock_cache(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 25. And `reorder_cache` did run, with beams that change places."""
    model, orders = shared_model(name), []
    reorder = PagedCache.reorder_cache

    def seen(self: PagedCache, beam_idx: torch.Tensor) -> None:
        orders.append(beam_idx.tolist())
        reorder(self, beam_idx)

    monkeypatch.setattr(PagedCache, "reorder_cache", seen)
    ids = prompt(2, BLOCK - 3)
    want = reference(model, ids, **options)
    cache = paged(name)
    assert generate(model, ids, cache, **options).tolist() == want.tolist()
    assert any(order != sorted(order) for order in orders)
    cache.check_integrity()


@pytest.mark.parametrize("tokens", AT_EDGES)
@pytest.mark.parametrize("name", FAMILIES)
def test_sampled_copies_of_a_prompt_say_what_they_say_with_the_stock_cache(name: str, tokens: int) -> None:
    """Case 25. `num_return_sequences` under one seed."""
    model, ids = shared_model(name), prompt(1, tokens)
    options = {"do_sample": True, "top_k": 0, "num_return_sequences": 4, "new": 6}
    torch.manual_seed(3)
    want = reference(model, ids, **options)
    torch.manual_seed(3)
    assert generate(model, ids, paged(name), **options).tolist() == want.tolist()


@pytest.mark.parametrize("tokens", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK])
@pytest.mark.parametrize("format_name", FORMATS)
def test_every_row_becomes_the_stored_copy_of_the_other(format_name: str, tokens: int) -> None:
    """Case 26. Bytes and the tokens that are none yet move together, before and after a block is sealed."""
    model, cache = shared_model("llama"), paged(kv_cache_dtype=format_name)
    fill(model, cache, prompt(2, tokens - 1))
    fill(model, cache, prompt(2, 1, seed=1))
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    cache.reorder_cache(torch.tensor([1, 0]))
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys + 0, keys.flip(0))
        assert torch.equal(layer.values + 0, values.flip(0))
    twin = paged(kv_cache_dtype=format_name)
    fill(model, twin, prompt(2, tokens - 1).flip(0))
    fill(model, twin, prompt(2, 1, seed=1).flip(0))
    for step in range(BLOCK + 1):  # over the next edge, where the block that was open is sealed
        ids = prompt(2, 1, seed=step + 2)
        got, want = fill(model, cache, ids), fill(model, twin, ids)
        assert (got - want).abs().max() <= 1e-4 * want.abs().max()
    cache.check_integrity()


@pytest.mark.parametrize("name", FAMILIES)
def test_guidance_has_a_second_history_of_its_own(name: str) -> None:
    """Case 37. The stream of the negative prompt inside a logits processor."""
    model, ids = shared_model(name), prompt(1, BLOCK + 1)
    options = {"guidance_scale": 1.5, "negative_prompt_ids": prompt(1, 5, seed=4)}
    want = reference(model, ids, **options)
    cache = paged(name)
    assert generate(model, ids, cache, **options).tolist() == want.tolist()
    assert cache.get_seq_length() == want.shape[1] - 1


def _contrastive(model: Any, cache: Any, ids: torch.Tensor, *, new: int, candidates: int) -> list[list[int]]:
    """Rows are repeated for every candidate, scored, and the best one of each is kept."""
    rows = ids.shape[0]
    logits = fill(model, cache, ids)[:, -1]
    for _ in range(new):
        top = logits.topk(candidates).indices.reshape(-1, 1)
        cache.batch_repeat_interleave(candidates)
        scored = fill(model, cache, top)[:, -1].reshape(rows, candidates, -1)
        best = scored.logsumexp(-1).argmax(-1)
        kept = torch.arange(rows) * candidates + best
        cache.batch_select_indices(kept)
        logits = scored[torch.arange(rows), best]
        ids = torch.cat((ids, top[kept]), dim=1)
    return ids.tolist()


@pytest.mark.parametrize("tokens", AT_EDGES)
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_repeated_scored_and_selected_go_on_as_with_the_stock_cache(name: str, tokens: int) -> None:
    """Case 37. A contrastive search written by hand."""
    model, ids, cache = shared_model(name), prompt(2, tokens), paged(name)
    want = _contrastive(model, host_cache(model), ids, new=6, candidates=3)
    assert _contrastive(model, cache, ids, new=6, candidates=3) == want
    assert cache.stats().batch == 2
    cache.check_integrity()


WIDER = ({"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 3}, {"num_return_sequences": 3})


@pytest.mark.parametrize("more", [0, 1, 5])
@pytest.mark.parametrize("options", WIDER, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_prefix_of_one_row_serves_as_many_rows_as_generate_asks_for(
    name: str, options: dict[str, Any], more: int
) -> None:
    """Case 27. Filled at batch 1; every row shares the prefix."""
    model, cache, ids = shared_model(name), paged(name), prompt(1, 2 * BLOCK + 1 + more)
    if "num_beams" not in options:
        options = {**options, "do_sample": True, "top_k": 0}
    torch.manual_seed(3)
    want = reference(model, ids, new=6, **options)
    PagedCache(model)
    fill(model, cache, ids[:, : 2 * BLOCK + 1])
    torch.manual_seed(3)
    got = generate(model, ids, cache, new=6, **options)
    assert got.tolist() == want.tolist()
    assert cache.batch_size == 3
    cache.check_integrity()


@pytest.mark.parametrize("format_name", ["auto", "int8", "int4"])
def test_the_prefix_of_one_row_is_stored_once_for_all(format_name: str) -> None:
    """Case 27. Blocks counted."""
    model, cache, ids = shared_model("llama"), paged(kv_cache_dtype=format_name), prompt(1, 6 * BLOCK + 3)
    fill(model, cache, ids[:, : 6 * BLOCK])
    assert cache.stats().used_blocks == 6
    generate(model, ids, cache, new=4, num_beams=3)
    assert cache.stats().used_blocks <= 6 + 3 * 2


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("format_name", ["auto", "int8", "int4"])
def test_beams_hold_the_blocks_of_the_prompt_and_their_own_new_ones(format_name: str, warm: bool) -> None:
    """Case 28. 8 beams on a prompt of 16 blocks."""
    model, ids = shared_model("llama"), prompt(1, 13 * BLOCK)
    cache = PagedCache(model, block_size=BLOCK, kv_cache_dtype=format_name)
    if warm:
        fill(model, cache, ids[:, :-1])
    new_blocks = 2
    generate(model, ids, cache, new=new_blocks * BLOCK, num_beams=8)
    assert cache.stats().used_blocks <= 13 + 8 * (new_blocks + 1)
    cache.check_integrity()


def test_a_write_to_one_beam_leaves_the_others_as_they_are() -> None:
    """Case 28. Blocks that are shared are copied before they are written."""
    model, cache = shared_model("llama"), paged()
    fill(model, cache, prompt(1, BLOCK + 3))
    cache.batch_repeat_interleave(4)
    before = cache.layers[0].keys.clone()
    new = prompt(4, 1, seed=2)
    fill(model, cache, new)
    assert torch.equal(cache.layers[0].keys[:, :, :-1], before)
    singles = []
    for row in range(4):
        single = paged()
        fill(model, single, prompt(1, BLOCK + 3))
        fill(model, single, new[row : row + 1])
        singles.append(single.layers[0].keys.clone())
    assert torch.allclose(cache.layers[0].keys + 0, torch.cat(singles), atol=1e-5)
