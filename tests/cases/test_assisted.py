"""Drafts that are rejected leave no trace in the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged_cache import CacheMismatchError, PagedCache, disable
from tests.support.chats import (
    BLOCK,
    FAMILIES,
    assert_sound,
    fill,
    generate,
    generate_or_refuse,
    is_newest,
    paged,
    prompt,
    reference,
)
from tests.support.models import ModelCase, assistant_for, by_name, cache_kwarg, paged_cache, shared_model

LOOKUP = {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1}


def _repeated(tokens: int = 20) -> torch.Tensor:
    return prompt(1, 5, seed=3).repeat(1, 8)[:, :tokens]


def _crops(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Where crops of `PagedCache` begin and end, in tokens."""
    seen: list[tuple[int, int]] = []
    crop = PagedCache.crop

    def noted(self: PagedCache, tokens_to_remove: int) -> None:
        before = int(self.get_seq_length())
        crop(self, tokens_to_remove)
        seen.append((before, int(self.get_seq_length())))

    monkeypatch.setattr(PagedCache, "crop", noted)
    return seen


def _cross_an_edge(crops: list[tuple[int, int]]) -> bool:
    return any((before - 1) // BLOCK > (after - 1) // BLOCK for before, after in crops)


@pytest.mark.parametrize("name", FAMILIES)
def test_prompt_lookup_says_what_it_says_with_the_stock_cache(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 32. Drafts are rejected over the edges of blocks, and none of them stays."""
    crops = _crops(monkeypatch)
    model, cache = shared_model(name), paged(name)
    want = reference(model, _repeated(), new=30)
    got = generate(model, _repeated(), cache, new=30, **LOOKUP)
    assert got.tolist() == want.tolist()
    assert any(before > after for before, after in crops)
    assert_sound(cache, got.shape[1] - 1)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2"])
def test_a_second_turn_with_drafts_is_right_for_new_ids_and_refused_for_all(name: str) -> None:
    """Case 32. The host's assisted decoding feeds all ids that it gets after those that are cached."""
    model, cache = shared_model(name), paged(name)
    said = torch.cat((generate(model, _repeated(), cache, new=8), prompt(1, 5, seed=2)), dim=1)
    want, held = reference(model, said), int(cache.get_seq_length())
    PagedCache(model)
    with pytest.raises(CacheMismatchError, match=rf"whole prompt of 33 tokens after the {held} per row"):
        generate(model, said, cache, **LOOKUP)
    assert_sound(cache, held)
    got = generate_or_refuse(model, said[:, held:], cache, attention_mask=torch.ones_like(said), **LOOKUP)
    assert got is not None or not is_newest()
    if got is not None:
        assert got[0].tolist() == want[0, held:].tolist()
        assert_sound(cache, want.shape[1] - 1)
    cache.reset()
    assert generate(model, said, cache, **LOOKUP).tolist() == want.tolist()


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_second_turn_with_drafts_is_refused_for_the_decoder_of_a_pair(name: str) -> None:
    """Case 32. The same through an `EncoderDecoderCache`."""
    model, cache = shared_model(name), paged_cache(shared_model(name))
    source = prompt(1, BLOCK + 1)
    options = {"max_new_tokens": 8, "do_sample": False, cache_kwarg(): cache}
    said = model.generate(source, **options)
    longer = torch.cat((said, prompt(1, 3, seed=2)), dim=1)
    with pytest.raises(CacheMismatchError, match="whole prompt of 12 tokens after the 8 per row"):
        model.generate(source, decoder_input_ids=longer, **options, **LOOKUP)


def _small_assistant() -> Any:
    """Another number of layers and another head size than the model that it drafts for."""
    llama = by_name("llama")
    options = llama.options | {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    assistant = ModelCase("llama", llama.config, options).build()
    assistant.generation_config.num_assistant_tokens = 5
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    return assistant


@pytest.mark.parametrize("kind", ["alike", "small"])
def test_an_assistant_drafts_with_a_cache_of_its_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 33. The cache that was passed has the layers, the shapes and the length of the main model."""
    crops = _crops(monkeypatch)
    model = shared_model("llama")
    assistant = assistant_for("llama") if kind == "alike" else _small_assistant()
    for tokens in (9, BLOCK):
        cache, ids = paged(), prompt(1, tokens)
        want = reference(model, ids, new=12)
        got = generate(model, ids, cache, new=12, assistant_model=assistant)
        assert got.tolist() == want.tolist()
        assert len(cache) == model.config.num_hidden_layers
        assert cache.layers[0].keys.shape == (1, 2, got.shape[1] - 1, 16)
        assert_sound(cache, got.shape[1] - 1)
    assert any(before > after for before, after in crops)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_recording_may_be_switched_on_again_and_again(name: str) -> None:
    """Case 34. On a new cache, on a filled one, and between two steps."""
    model, cache, plain = shared_model(name), paged(name), paged(name)
    for step, tokens in enumerate((BLOCK + 1, 1, BLOCK, 1)):
        cache.activate_past_recording()
        cache.activate_past_recording()
        ids = prompt(2, tokens, seed=step)
        got, want = fill(model, cache, ids), fill(model, plain, ids)
        assert (got - want).abs().max() <= 1e-4 * want.abs().max()
    cache.crop(0)
    assert cache.stats().used_blocks == plain.stats().used_blocks


@pytest.mark.parametrize("format_name", ["int8", "fp8", "int8_block"])
def test_prompt_lookup_over_bytes_says_what_the_same_cache_says_without(
    format_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 35. Drafts are rejected that had reached into the next block.

    Drafts see each other in full precision, one token sees itself as stored: in 4 bits that alone moves
    tokens, so those formats are held against their simulation (`test_quantized_parity`).
    """
    crops = _crops(monkeypatch)
    model = shared_model("llama")
    plain, cache = (paged(kv_cache_dtype=format_name) for _ in range(2))
    want = generate(model, _repeated(), plain, new=50)
    got = generate(model, _repeated(), cache, new=50, **LOOKUP)
    assert _cross_an_edge(crops)
    assert got.tolist() == want.tolist()
    assert_sound(cache, got.shape[1] - 1)
    # Rejected drafts have changed nothing that is stored.
    for mine, theirs in zip(cache.layers, plain.layers, strict=True):
        for side in ("keys", "values"):
            a, b = getattr(mine, side).clone(), getattr(theirs, side).clone()
            assert (a - b).norm() <= 0.05 * b.norm()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("tokens", [6, 7, 8, 9, BLOCK, 2 * BLOCK + 1])
def test_bursts_of_drafts_in_a_window_fit_their_mask(tokens: int, attention: str) -> None:
    """Case 36. A window of 8 tokens, drafts of 4."""
    case = by_name("mistral")
    model = ModelCase(case.name, case.config, case.options, attention=attention).build()
    want = reference(model, _repeated(tokens), new=24)
    cache = PagedCache(model, block_size=BLOCK)
    got = generate(model, _repeated(tokens), cache, new=24, **LOOKUP)
    assert got.tolist() == want.tolist()
    assert_sound(cache, got.shape[1] - 1)
    disable(model)


@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_mask_sizes_are_those_of_the_keys_that_come_back(name: str, recording: bool) -> None:
    """Case 36. In every layer, for bursts of every length."""
    cache = paged(name)
    if recording:
        cache.activate_past_recording()
    for step, tokens in enumerate((5, 1, 4, 7, 8, 9, BLOCK, 1, 4)):
        shape = (1, _heads(name), tokens, 16)
        for index in range(len(cache.layers)):
            length, offset = cache.get_mask_sizes(tokens, index)
            keys, values = cache.update(torch.full(shape, float(step)), torch.zeros(shape), index)
            assert keys.shape[2] == values.shape[2] == length, (step, index)
            assert length + offset == cache.get_seq_length(index)
            assert (keys[:, :, -tokens:] == step).all()


def _heads(name: str) -> int:
    heads: int = shared_model(name).config.num_key_value_heads
    return heads
