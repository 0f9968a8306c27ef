"""Encoder-decoder models: two caches, each for what it is there for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import EncoderDecoderCache

from hf_paged_cache import CacheMismatchError, PagedCache, disable
from tests.support.chats import AT_EDGES, BLOCK, generate, prompt
from tests.support.models import paged_cache, paged_parts, shared_model

ENCODER_DECODERS = ("t5", "bart")
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "3 beams": {"num_beams": 3},
    "3 samples": {"do_sample": True, "top_k": 0, "num_return_sequences": 3},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tokens", AT_EDGES)
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_cross_attention_sees_the_whole_source_and_is_written_once(
    name: str, tokens: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 58. Both parts paged."""
    model, ids = shared_model(name), prompt(2, tokens)
    disable(model)
    torch.manual_seed(1)
    want = model.generate(ids, max_new_tokens=20, **{"do_sample": False} | WAYS[way])
    cache = paged_cache(model)
    own, cross = paged_parts(cache)
    written: list[tuple[bool, int]] = []
    update = PagedCache.update

    def noted(self: PagedCache, keys: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        written.append((self is cross, keys.shape[2]))
        return update(self, keys, *args, **kwargs)

    monkeypatch.setattr(PagedCache, "update", noted)
    torch.manual_seed(1)
    got = generate(model, ids, cache, new=20, **WAYS[way])
    assert got.tolist() == want.tolist()
    assert [count for is_cross, count in written if is_cross] == [tokens] * len(cross)
    assert cross.get_seq_length() == tokens
    assert own.get_seq_length() == want.shape[1] - 1
    for part in (own, cross):
        part.check_integrity()


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "3 beams"])
@pytest.mark.parametrize("tokens", [1, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_a_bare_cache_for_an_encoder_decoder_is_refused_with_the_pair_to_use(
    name: str, tokens: int, options: dict[str, Any]
) -> None:
    """Case 59. Self- and cross-attention would write to the same layers."""
    model = shared_model(name)
    cache = PagedCache(model, block_size=BLOCK)
    with pytest.raises(CacheMismatchError, match=r"EncoderDecoderCache\(PagedCache"):
        generate(model, prompt(1, tokens), cache, **options)
    cache.check_integrity()
    pair = EncoderDecoderCache(cache, PagedCache(model, block_size=BLOCK))
    cache.reset()
    got = generate(model, prompt(1, tokens), pair, new=5)
    disable(model)
    assert got.tolist() == model.generate(prompt(1, tokens), max_new_tokens=5, do_sample=False).tolist()


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_a_second_answer_after_the_first_is_refused_and_a_continued_one_is_right(name: str) -> None:
    """Case 59. The decoder's start token alone would be read as what comes next."""
    model, source = shared_model(name), prompt(1, 9)
    pair = EncoderDecoderCache(PagedCache(model, block_size=BLOCK), PagedCache(model, block_size=BLOCK))
    said = generate(model, source, pair, new=6)
    for ids in (source, prompt(1, 9, seed=1)):
        with pytest.raises(CacheMismatchError, match="fed a text from its beginning"):
            generate(model, ids, pair, new=6)
    more = {"decoder_input_ids": said, "decoder_attention_mask": torch.ones_like(said)}
    got = generate(model, source, pair, new=6, **more)
    disable(model)
    want = model.generate(source, decoder_input_ids=said, max_new_tokens=6, do_sample=False)
    assert got.tolist() == want.tolist()
    pair.reset()
    assert generate(model, source, pair, new=6).tolist() == said.tolist()
