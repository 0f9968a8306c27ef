"""A cache knows which text it holds: no prompt is answered from another one, and reading leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged_cache import CacheMismatchError, PagedCache, PagedCacheError, disable
from hf_paged_cache.formats import FORMATS
from tests.support.chats import (
    AT_EDGES,
    BLOCK,
    FAMILIES,
    assert_sound,
    fill,
    generate,
    given,
    paged,
    prompt,
    reference,
)
from tests.support.models import by_name, shared_model


@pytest.mark.parametrize("tokens", AT_EDGES)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_that_is_all_cached_has_its_last_token_computed_again(name: str, tokens: int) -> None:
    """Case 3. The cache is as long as the prompt."""
    model, ids, cache = shared_model(name), prompt(2, tokens), paged(name)
    want = reference(model, ids, new=6)
    PagedCache(model)
    fill(model, cache, ids)
    assert generate(model, ids, cache, new=6).tolist() == want.tolist()
    assert_sound(cache, want.shape[1] - 1)


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_prompt_that_is_all_cached_in_bits_is_written_once(format_name: str) -> None:
    """Case 3. Formats: the tokens are those of a cache that never held the last one."""
    model, ids = shared_model("llama"), prompt(1, 2 * BLOCK)
    cache, shorter = (paged(kv_cache_dtype=format_name) for _ in range(2))
    fill(model, cache, ids)
    fill(model, shorter, ids[:, :-1])
    want = generate(model, ids, shorter, new=4)
    assert generate(model, ids, cache, new=4).tolist() == want.tolist()
    assert_sound(cache, want.shape[1] - 1)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tokens", [1, 5, BLOCK])
def test_a_prompt_that_is_shorter_than_the_cache_is_refused_with_both_lengths(name: str, tokens: int) -> None:
    """Case 1. The same beginning, and the cache has gone further."""
    model, cache, ids = shared_model(name), paged(name), prompt(1, BLOCK + 5)
    fill(model, cache, ids)
    message = rf"the prompt has {tokens} tokens, but the cache already holds {BLOCK + 5} per row"
    with pytest.raises(CacheMismatchError, match=message):
        generate(model, ids[:, :tokens], cache)
    assert_sound(cache, BLOCK + 5)


@pytest.mark.parametrize("length", [-2, 0, 1, 6])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_that_disagrees_with_the_cached_text_is_refused_then_right_after_truncate_to(
    name: str, length: int
) -> None:
    """Case 1. An answer that was rendered anew, as long as the cached one, shorter and longer."""
    model, cache = shared_model(name), paged(name)
    cache.activate_past_recording()
    said = generate(model, prompt(1, BLOCK), cache, new=8)
    held = int(cache.get_seq_length())
    edited = torch.cat((said[:, :-4], (said[:, -4:-3] + 1) % 90 + 3, prompt(1, 9, seed=4)), dim=1)
    edited = edited[:, : held + length]
    message = (
        rf"another text .* differ at token {BLOCK + 4} " if length >= 0 else "but the cache already holds"
    )
    with pytest.raises(CacheMismatchError, match=message):
        generate(model, edited, cache, new=6)
    assert_sound(cache, held)
    assert cache.truncate_to(edited) == BLOCK + 4
    want = reference(model, edited, new=6)
    PagedCache(model)
    assert generate(model, edited, cache, new=6).tolist() == want.tolist()
    assert_sound(cache, want.shape[1] - 1)


def test_ids_that_no_forward_showed_can_be_told() -> None:
    """Case 1. A cache filled from embeddings learns its text from `commit`."""
    model, cache, ids = shared_model("llama"), paged(), prompt(1, BLOCK + 3)
    with torch.no_grad():
        model(inputs_embeds=model.get_input_embeddings()(ids), **given(cache))
    with pytest.raises(PagedCacheError, match=r"not known; call `cache\.commit"):
        cache.truncate_to(ids)
    cache.commit(ids)
    other = torch.cat((ids[:, :-2], prompt(1, 6, seed=5)), dim=1)
    with pytest.raises(CacheMismatchError, match="another text"):
        generate(model, other, cache)
    assert cache.truncate_to(other) == BLOCK + 1
    want = reference(model, other)
    PagedCache(model)
    assert generate(model, other, cache).tolist() == want.tolist()


@pytest.mark.parametrize("format_name", ["auto", "int8", "int4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_forward_without_use_cache_reads_and_leaves_the_cache_alone(name: str, format_name: str) -> None:
    """Case 6. `use_cache=False` with a warm cache, then without it again."""
    model, ids = shared_model(name), prompt(2, 2 * BLOCK)
    for tokens in AT_EDGES[:3]:
        cache, twin = (paged(name, kv_cache_dtype=format_name) for _ in range(2))
        for one in (cache, twin):
            fill(model, one, ids[:, :tokens])
        held = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
        for new in (1, 5):
            peeked = fill(model, cache, ids[:, tokens : tokens + new], use_cache=False)
            assert_sound(cache, tokens)
            for layer, (keys, values) in zip(cache.layers, held, strict=True):
                assert torch.equal(layer.keys + 0, keys)
                assert torch.equal(layer.values + 0, values)
            if format_name == "auto":
                want = fill(model, None, ids[:, : tokens + new], use_cache=False)[:, tokens:]
                assert (peeked - want).abs().max() <= 2e-4 * want.abs().max()
        rest = ids[:, tokens : tokens + 3]
        assert torch.equal(fill(model, cache, rest), fill(model, twin, rest))


@pytest.mark.parametrize("name", FAMILIES)
def test_generation_without_use_cache_is_refused_with_the_way_to_read(name: str) -> None:
    """Case 6. `generate(use_cache=False)` would need the whole prompt at every step."""
    model, cache, ids = shared_model(name), paged(name), prompt(1, BLOCK + 1)
    fill(model, cache, ids[:, :-1])
    with pytest.raises(PagedCacheError, match="use_cache"):
        generate(model, ids, cache, use_cache=False)
    assert_sound(cache, BLOCK)


@pytest.mark.parametrize("format_name", ["auto", "int8", "int4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_done_with_a_frozen_cache_never_shows_in_the_original(name: str, format_name: str) -> None:
    """Case 6. Generate from a prefix, many times."""
    model, ids = shared_model(name), prompt(1, BLOCK + 5)
    cache, alone = (paged(name, kv_cache_dtype=format_name) for _ in range(2))
    for one in (cache, alone):
        fill(model, one, ids)
    used = cache.stats().used_blocks
    for turn in range(3):
        said = torch.cat((ids, prompt(1, 3, seed=turn)), dim=1)
        with cache.frozen() as peek:
            got = generate(model, said, peek, new=4)
            assert_sound(peek, said.shape[1] + 3)
        if format_name == "auto":
            want = reference(model, said, new=4)
            PagedCache(model)
            assert got.tolist() == want.tolist()
        assert_sound(cache, BLOCK + 5)
        assert cache.stats().used_blocks == used
    more = prompt(1, 3, seed=9)
    assert torch.equal(fill(model, cache, more), fill(model, alone, more))


DROPPED = ((0, 4), (3, 9), (BLOCK - 1, BLOCK + 1), (5, BLOCK + 5))


@pytest.mark.parametrize(("start", "end"), DROPPED)
def test_a_part_of_the_history_is_dropped_where_keys_carry_no_position(start: int, end: int) -> None:
    """Case 31. Nothing of it is attended later; at the end it is a crop, for every model."""
    model, ids = shared_model("falcon-alibi"), prompt(2, 2 * BLOCK)
    cache = paged("falcon-alibi")
    keys = {}
    fill(model, cache, ids)
    for index, layer in enumerate(cache.layers):
        keys[index] = torch.cat((layer.keys[:, :, :start], layer.keys[:, :, end:]), dim=2)
    cache.prune(start, end)
    assert_sound(cache, 2 * BLOCK - (end - start))
    for index, layer in enumerate(cache.layers):
        assert torch.equal(layer.keys + 0, keys[index])
    assert cache.input_ids.tolist() == torch.cat((ids[:, :start], ids[:, end:]), dim=1).tolist()


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_a_part_of_the_history_is_not_dropped_where_keys_carry_their_position(name: str) -> None:
    """Case 31. Refused with the reason, and right at the end of the history."""
    model, cache, ids = shared_model(name), paged(name), prompt(1, BLOCK + 5)
    cache.activate_past_recording()
    fill(model, cache, ids)
    with pytest.raises(PagedCacheError, match=r"prune\(2, 5\).*`cache\.crop\(-19\)`"):
        cache.prune(2, 5)
    assert_sound(cache, BLOCK + 5)
    cache.prune(BLOCK - 1, BLOCK + 5)
    assert_sound(cache, BLOCK - 1)


MISFITS: dict[str, tuple[Any, str]] = {
    "more rows": (lambda: prompt(3, BLOCK + 8), r"3 rows, but the cache holds 2 rows"),
    "fewer rows": (lambda: prompt(1, BLOCK + 8), r"1 rows, but the cache holds 2 rows"),
    "shorter": (lambda: prompt(2, BLOCK + 5)[:, :4], r"has 4 tokens, but the cache already holds 21 per row"),
}


@pytest.mark.parametrize("misfit", MISFITS)
@pytest.mark.parametrize("name", FAMILIES)
def test_sizes_that_disagree_are_refused_with_what_is_held_and_what_came(name: str, misfit: str) -> None:
    """Case 51. Through `generate`."""
    make, message = MISFITS[misfit]
    model, cache = shared_model(name), paged(name)
    fill(model, cache, prompt(2, BLOCK + 5))
    with pytest.raises(CacheMismatchError, match=message):
        generate(model, make(), cache)
    assert_sound(cache, BLOCK + 5)
    assert cache.batch_size == 2


OTHERS: dict[str, tuple[str, str]] = {
    "other weights": ("qwen2", r"the 21 cached tokens .* another model"),
    "head size": ("qwen3", r"layer 0: this cache stores .* head_dim 16 .* got K \(2, 2, 3, 24\)"),
    "heads": ("gpt2", r"layer 0: this cache stores 2 kv heads.* got K \(2, 4, 3, 16\)"),
}


@pytest.mark.parametrize("is_active", [False, True])
@pytest.mark.parametrize("difference", OTHERS)
def test_a_cache_of_another_model_is_refused_with_layer_expected_and_got(
    difference: str, is_active: bool
) -> None:
    """Case 51. Also where the other model computes attention by itself."""
    name, message = OTHERS[difference]
    other, cache = shared_model(name), paged("llama")
    fill(shared_model("llama"), cache, prompt(2, BLOCK + 5))
    PagedCache(other) if is_active else disable(other)
    with pytest.raises(CacheMismatchError, match=message):
        fill(other, cache, prompt(2, 3))
    assert_sound(cache, BLOCK + 5)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cache_that_other_weights_filled_is_refused(name: str) -> None:
    """Case 51. Two models of one shape, whatever code computes their attention."""
    first, other = shared_model(name), by_name(name).build(noise=0.5)
    for filler, reader in ((first, other), (other, first)):
        cache = PagedCache(filler, block_size=BLOCK)
        fill(filler, cache, prompt(1, 9))
        disable(reader)
        with pytest.raises(CacheMismatchError, match=r"the 9 cached tokens .* another model"):
            fill(reader, cache, prompt(1, 1))
        assert_sound(cache, 9)
        fill(filler, cache, prompt(1, 1))


def test_another_dtype_is_refused_with_layer_expected_and_got() -> None:
    """Case 51. The same model in half precision."""
    cache = paged("llama")
    fill(shared_model("llama"), cache, prompt(2, BLOCK + 5))
    half = shared_model("llama", dtype=torch.bfloat16)
    with pytest.raises(CacheMismatchError, match=r"layer 0: .*torch\.float32 .*got .*torch\.bfloat16"):
        fill(half, cache, prompt(2, 3))
    assert_sound(cache, BLOCK + 5)
