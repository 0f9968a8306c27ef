"""A cache that lives through several turns of a chat says what a fresh run over the whole chat says."""

from __future__ import annotations

import pytest
import torch

from hf_paged_cache import CacheMismatchError, PagedCache
from tests.chats import (
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
from tests.models import cache_kwargs, shared_model

CHATS = [("llama", size, size + past) for size in (16, 64) for past in (-1, 0, 1, size)] + [
    (name, BLOCK, BLOCK + 1) for name in FAMILIES
]


@pytest.mark.parametrize(("name", "block_size", "tokens"), CHATS)
def test_the_chat_loop_of_the_docs_runs(name: str, block_size: int, tokens: int) -> None:
    """Case 1. Whole conversations go in, turn by turn."""
    model = shared_model(name)
    cache, said = paged(name, block_size=block_size), prompt(1, tokens)
    for turn in range(3):
        want = reference(model, said, new=8)
        got = generate(model, said, cache, new=8)
        assert got.tolist() == want.tolist(), turn
        assert_sound(cache, got.shape[1] - 1)
        said = torch.cat((got, prompt(1, 5, seed=turn + 1)), dim=1)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tokens", AT_EDGES)
def test_an_answer_rendered_anew_is_right_after_a_crop_to_what_is_common(name: str, tokens: int) -> None:
    """Case 1. The chat template leaves out the end of the answer."""
    model, cache = shared_model(name), paged(name)
    cache.activate_past_recording()
    said = generate(model, prompt(1, tokens), cache)
    rendered = torch.cat((said[:, :-3], prompt(1, 5, seed=2)), dim=1)
    cache.crop(-2)  # the last token of the answer was never fed
    assert generate(model, rendered, cache, new=6).tolist() == reference(model, rendered, new=6).tolist()
    cache.check_integrity()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tokens", AT_EDGES)
def test_new_ids_alone_are_right_with_the_mask_of_all_and_refused_without(name: str, tokens: int) -> None:
    """Case 2. Nothing but the new ids is passed."""
    model, cache = shared_model(name), paged(name)
    said = torch.cat((generate(model, prompt(1, tokens), cache), prompt(1, 5, seed=2)), dim=1)
    want, held = reference(model, said), cache.get_seq_length()
    tail = said[:, held:]
    PagedCache(model)  # switches paged attention on again
    with pytest.raises(
        CacheMismatchError,
        match=r"another text than what is cached|prompt has 6 tokens, but the cache already holds",
    ):
        generate(model, tail, cache, attention_mask=None)
    assert_sound(cache, held)
    got = generate(model, tail, cache, attention_mask=torch.ones_like(said))
    assert got[:, tail.shape[1] :].tolist() == want[:, said.shape[1] :].tolist()
    assert_sound(cache, want.shape[1] - 1)


@pytest.mark.parametrize("form", ["auto", "int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon-alibi"])
def test_a_cache_rebuilt_from_keys_and_values_goes_on_with_the_mask_of_all(name: str, form: str) -> None:
    """Case 4. Somebody hands over the K and V of another cache."""
    model = shared_model(name)
    for tokens in AT_EDGES:
        ids = prompt(2, tokens + 1)
        source, rebuilt = paged(name, kv_cache_dtype=form), paged(name)
        fill(model, source, ids[:, :-1])
        for index, layer in enumerate(source.layers):
            rebuilt.update(layer.keys, layer.values, index)
        mask = torch.ones_like(ids)
        got = fill(model, rebuilt, ids[:, -1:], attention_mask=mask)
        if form == "auto":
            want = fill(model, None, ids)[:, -1:]
        else:  # in bits the new token is stored as bytes too
            unquantised = paged(name)
            fill(model, unquantised, ids[:, :-1])
            want = fill(model, unquantised, ids[:, -1:])
        assert (got - want).abs().max() <= (1e-4 if form == "auto" else 0.15) * want.abs().max()
        assert_sound(rebuilt, tokens + 1)


@pytest.mark.parametrize("attribute", cache_kwargs())
@pytest.mark.parametrize("name", FAMILIES)
def test_the_cache_that_generate_returns_serves_the_next_turn(name: str, attribute: str) -> None:
    """Case 5. Under every name that the output has."""
    model, cache = shared_model(name), paged(name)
    out = generate(model, prompt(1, 9), cache, return_dict_in_generate=True)
    assert getattr(out, attribute) is cache
    said = torch.cat((out.sequences, prompt(1, 5, seed=2)), dim=1)
    want = reference(model, said)
    assert generate(model, said, getattr(out, attribute)).tolist() == want.tolist()


def test_a_prompt_in_two_parts_ends_in_the_logits_of_one_wherever_it_is_split() -> None:
    """Case 8. Several new tokens on a warm cache."""
    model, ids = shared_model("llama"), prompt(1, 40)
    want = fill(model, None, ids, use_cache=False)[:, -1]
    for split in range(1, 40):
        cache = paged()
        fill(model, cache, ids[:, :split])
        got = fill(model, cache, ids[:, split:])[:, -1]
        assert (got - want).abs().max() <= 2e-4 * want.abs().max(), split


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_in_two_parts_ends_in_the_logits_of_one(name: str, block_size: int) -> None:
    """Case 8. In every family."""
    model, ids = shared_model(name), prompt(1, 40)
    want = fill(model, None, ids, use_cache=False)[:, -1]
    for split in (*AT_EDGES, 1, 7, 8, 9, 39):
        cache = paged(name, block_size=block_size)
        fill(model, cache, ids[:, :split])
        got = fill(model, cache, ids[:, split:])[:, -1]
        assert (got - want).abs().max() <= 2e-4 * want.abs().max(), split


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tokens", [9, 16])
def test_embeddings_instead_of_ids_give_the_same_in_both_turns(name: str, tokens: int) -> None:
    """Case 10. `inputs_embeds` with a cache."""
    model, cache = shared_model(name), paged(name)
    embed = model.get_input_embeddings()
    first = prompt(1, tokens)
    want = reference(model, None, inputs_embeds=embed(first))
    got = generate(model, None, paged(name), inputs_embeds=embed(first))
    assert got.tolist() == want.tolist()

    said = torch.cat((generate(model, first, cache), prompt(1, 5, seed=2)), dim=1)
    want = reference(model, None, inputs_embeds=embed(said))
    assert generate(model, None, cache, inputs_embeds=embed(said)).tolist() == want.tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_cache_that_was_passed_is_the_one_that_is_filled_and_returned(name: str) -> None:
    """Case 11. Five hand-written steps say what `generate` says."""
    model, cache, ids = shared_model(name), paged(name), prompt(1, 9)
    want = reference(model, ids, new=5)
    PagedCache(model)
    said = ids
    for step in range(5):
        with torch.no_grad():
            out = model(said[:, -1:] if step else ids, **given(cache), use_cache=True)
        assert out.past_key_values is cache
        assert_sound(cache, 9 + step)
        said = torch.cat((said, out.logits[:, -1:].argmax(-1)), dim=1)
    assert said.tolist() == want.tolist()
