"""What is cropped is gone, from the tokens and from everything that is kept beside them."""

from __future__ import annotations

import pytest
import torch

from hf_paged_cache.formats import FORMATS
from tests.support.chats import AT_EDGES, BLOCK, FAMILIES, assert_sound, fill, paged, prompt
from tests.support.models import shared_model
from tests.support.quantized import states, update_all

TOKENS = 2 * BLOCK + 4
REMOVED = (0, 3, 4, 5, BLOCK, BLOCK + 4, TOKENS, TOKENS + 5)


@pytest.mark.parametrize("removed", REMOVED)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_cropped_cache_that_grows_again_equals_a_fresh_one(name: str, removed: int) -> None:
    """Case 30. Nothing, a little, all, and more than there is; over the edges of blocks."""
    model, cache, fresh = shared_model(name), paged(name), paged(name)
    for one in (cache, fresh):
        one.activate_past_recording()
    fill(model, cache, prompt(2, TOKENS))
    cache.crop(-removed)
    kept = max(0, TOKENS - removed)
    assert_sound(cache, kept)
    if kept:
        fill(model, fresh, prompt(2, TOKENS)[:, :kept])
        fresh.crop(0)
    assert cache.stats().used_blocks == fresh.stats().used_blocks
    for step, tokens in enumerate((3, BLOCK, 1)):
        ids = prompt(2, tokens, seed=step + 1)
        got, want = fill(model, cache, ids), fill(model, fresh, ids)
        assert (got - want).abs().max() <= 2e-4 * want.abs().max(), step
    assert_sound(cache, kept + 4 + BLOCK)


@pytest.mark.parametrize("removed", [1, 4, 5, BLOCK + 3, BLOCK + 4])
@pytest.mark.parametrize("form", ["auto", *FORMATS])
def test_nothing_of_the_cropped_tokens_is_left_in_bytes_scales_or_dense_blocks(
    form: str, removed: int
) -> None:
    """Case 31. Regrown with other tokens, of which no scale or zero point may know the old ones."""
    cache = paged(kv_cache_dtype=form, key_error_guard="off")
    keys, values = states(TOKENS, rows=2)
    # Tokens that would spoil every scale they leave behind.
    keys[:, :, -removed:], values[:, :, -removed:] = 500.0, -500.0
    update_all(cache, keys, values)
    cache.crop(-removed)
    kept = TOKENS - removed
    assert_sound(cache, kept)
    group = cache._state.groups[0]
    assert {len(table.ids) for table in group.manager.tables} == {-(-kept // BLOCK)}
    assert {layer.keys.shape[2] for layer in cache.layers} == {kept}
    new_keys, new_values = states(2 * BLOCK + 1, rows=2, seed=1)
    update_all(cache, new_keys[:, :, :1], new_values[:, :, :1])
    update_all(cache, new_keys[:, :, 1:], new_values[:, :, 1:])
    for given_, new, side in ((keys, new_keys, "keys"), (values, new_values, "values")):
        want = torch.cat((given_[:, :, :kept], new), dim=2)
        for layer in cache.layers:
            got = getattr(layer, side).clone()
            assert got.shape == want.shape
            error = (got - want)[:, :, kept:].norm() / new.norm()
            assert error <= (0.0 if form == "auto" else 0.2), (side, float(error))
    assert_sound(cache, kept + 2 * BLOCK + 1)


@pytest.mark.parametrize("form", FORMATS)
def test_what_a_crop_back_into_a_block_moves_is_bounded_and_a_fork_moves_nothing(form: str) -> None:
    """A question, its crop, another question: tokens before both were rounded beside the first one's."""
    kept = BLOCK + 6
    before, first, second = (states(tokens, seed=seed) for tokens, seed in ((kept, 0), (40, 1), (40, 2)))
    cache, fresh = (paged(kv_cache_dtype=form, key_error_guard="off") for _ in range(2))
    for one in (cache, fresh):
        update_all(one, *before)
    update_all(fresh, *second)
    asked = cache.fork()
    update_all(asked, *first)
    asked.crop(-40)
    rounded_once = [getattr(asked.layers[0], side) + 0 for side in ("keys", "values")]
    for one in (asked, cache):
        update_all(one, *second)

    codecs = asked._state.groups[0].formats[0]
    block, tail = slice(BLOCK, 2 * BLOCK), slice(BLOCK, kept)
    for index, side in enumerate(("keys", "values")):
        codec = getattr(codecs, side)
        assert torch.equal(getattr(cache.layers[0], side) + 0, getattr(fresh.layers[0], side) + 0)
        bound = sum(
            codec.error_bound(side_block).expand_as(side_block)
            for side_block in (
                torch.cat((before[index], first[index]), 2)[:, :, block],
                torch.cat((rounded_once[index], second[index]), 2)[:, :, block],
            )
        )
        error = (getattr(asked.layers[0], side)[:, :, tail] - before[index][:, :, tail]).abs()
        assert (error <= bound[:, :, : kept - BLOCK] + 1e-5).all(), side


@pytest.mark.parametrize("tokens", AT_EDGES)
def test_freed_blocks_go_back_to_the_pool(tokens: int) -> None:
    """Case 30. Blocks of a cropped row serve the next one."""
    model, cache = shared_model("llama"), paged(max_tokens=4 * BLOCK)
    for turn in range(6):
        fill(model, cache, prompt(1, tokens, seed=turn))
        fill(model, cache, prompt(1, 4 * BLOCK - tokens, seed=turn))
        cache.crop(-(4 * BLOCK))
        assert cache.stats().used_blocks == 0
        cache.check_integrity()
