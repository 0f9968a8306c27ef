"""Windows, and layers that keep no K and V per token: right, bounded, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM, LlamaConfig

from hf_paged_cache import PagedCache, PagedCacheError, UnsupportedLayerError
from tests.support.chats import (
    BLOCK,
    assert_sound,
    fill,
    generate,
    generate_or_refuse,
    is_newest,
    paged,
    prompt,
    reference,
)
from tests.support.models import PAD, VOCAB, WINDOW, host_cache, shared_model

WINDOWED = ("mistral", "gemma2", "gemma3", "gpt-oss")
AROUND_THE_WINDOW = (WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 20)


@pytest.mark.parametrize("tokens", AROUND_THE_WINDOW)
@pytest.mark.parametrize("name", WINDOWED)
def test_the_row_that_is_dropped_when_a_window_fills_is_the_right_one(name: str, tokens: int) -> None:
    """Case 53. Prompts around the window, and an answer that leaves it behind."""
    model, ids = shared_model(name), prompt(1, tokens)
    want = reference(model, ids, new=24)
    cache = paged(name)
    assert generate(model, ids, cache, new=24).tolist() == want.tolist()
    assert_sound(cache, tokens + 23)


@pytest.mark.parametrize("format_name", ["auto", "int8", "int4"])
def test_blocks_wholly_outside_the_window_are_freed(format_name: str) -> None:
    """Case 53. However long the answer is, a row holds what its window spans."""
    model, cache = shared_model("mistral"), paged("mistral", kv_cache_dtype=format_name)
    fill(model, cache, prompt(2, 5 * BLOCK + 3))
    for step in range(2 * BLOCK):
        fill(model, cache, prompt(2, 1, seed=step))
        spanned = 2 if cache.get_seq_length() % BLOCK in range(1, WINDOW) else 1
        assert cache.stats().used_blocks <= 2 * (spanned + 1), step
    cache.check_integrity()


def test_a_cache_cannot_be_made_without_knowing_the_windows() -> None:
    """Case 54. It takes a model or a config, and keeps no more rows than the stock cache with a config."""
    with pytest.raises(PagedCacheError, match="config_or_model"):
        PagedCache()
    model = shared_model("mistral")
    for source in (model, model.config):
        cache, stock = PagedCache(source, block_size=BLOCK), host_cache(model)
        for one in (cache, stock):
            fill(model, one, prompt(1, 43))
        assert [layer.keys.shape for layer in cache.layers] == [layer.keys.shape for layer in stock.layers]
        assert cache.is_sliding == stock.is_sliding == [True, True]


MIXED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "chunks": {"prefill_chunk_size": 7},
}


@pytest.mark.parametrize("way", MIXED)
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt-oss"])
def test_full_and_window_layers_together_survive_a_second_turn(name: str, way: str) -> None:
    """Case 55. Greedily, with beams and chunks (drafts: test_cases_assisted)."""
    model, options = shared_model(name), MIXED[way]
    again = {"num_beams": 1} if way == "beams" else options
    first = prompt(1, 6, seed=3).repeat(1, 4)[:, : BLOCK + 1]
    want = reference(model, first, **options)
    cache = paged(name)
    got = generate(model, first, cache, **options)
    assert got.tolist() == want.tolist()
    if way == "beams":
        cache.reset()  # its rows are beams
    said = torch.cat((got, prompt(1, 5, seed=2)), dim=1)
    want = reference(model, said, **again)
    PagedCache(model)
    got = generate_or_refuse(model, said, cache, **again)
    assert got is not None or (way == "chunks" and not is_newest())
    if got is not None:
        assert got.tolist() == want.tolist()
        assert_sound(cache, want.shape[1] - 1)


@pytest.fixture(scope="module")
def lfm2() -> Any:
    """Convolution and attention in turn, with an answer that depends on its history."""
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"] * 2, pad_token_id=PAD,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = Lfm2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.3 if "embed" in name else 1.5 / weight.shape[-1] ** 0.5)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


@pytest.mark.parametrize(
    "options",
    [{}, {"prefill_chunk_size": 7}, {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1}],
    ids=["greedy", "chunks", "drafts"],
)
def test_a_recurrent_state_survives_chunks_and_drafts(lfm2: Any, options: dict[str, Any]) -> None:
    """Case 56. Forwards of several tokens on a warm cache, beside layers that are not paged."""
    ids = prompt(1, 6, seed=3).repeat(1, 4)[:, : BLOCK + 1]
    want = reference(lfm2, ids, new=20)
    cache = PagedCache(lfm2, block_size=BLOCK)
    assert generate(lfm2, ids, cache, new=20, **options).tolist() == want.tolist()
    assert_sound(cache, BLOCK + 20)


def test_layers_that_nobody_can_store_are_refused_by_name() -> None:
    """Case 56. At construction, never as a bare KeyError."""
    config = LlamaConfig(num_hidden_layers=2)
    config.layer_types = ["full_attention", "some_new_kind"]
    with pytest.raises(UnsupportedLayerError, match=r"layer 1 .* 'some_new_kind'"):
        PagedCache(config)
