"""What fewer bits cost is bounded, also where keys are uneven, and nothing of it is silent garbage."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from hf_paged_cache import PagedCache, disable
from hf_paged_cache.formats import FORMATS
from tests.support.chats import AT_EDGES, BLOCK, FAMILIES, fill, generate, paged, prompt, reference
from tests.support.models import PAD, VOCAB, cache_kwarg, host_cache, shared_model
from tests.support.quantized import states, update_all
from tests.test_real_model import TEXTS, _batch, _generate, checkpoint, model, tokenizer

__all__ = ["checkpoint", "model", "tokenizer"]  # fixtures

CHANNEL_BOUND = 0.1
"""Error of the K of a channel over how much it differs from token to token: the worst is below this."""

LOGIT_BOUND = 0.25
"""Norm of the error of logits over their norm. Random weights make much of every bit: this is no measure of a
trained model, only of what outliers add."""


def _uneven_model(offset: float) -> Any:
    """Tiny, with a large constant in two channels of every K, as some trained models have."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, pad_token_id=PAD, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.3 if "embed" in name else 1.5 / weight.shape[-1] ** 0.5)
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias[[3, 20]] += offset
    return model


def _errors(format_name: str, offset: float, guard: str = "on") -> tuple[float, float]:
    """Of the worst channel of K in the first layer, and of the logits, the mean over steps."""
    model = _uneven_model(offset)
    exact = PagedCache(model, block_size=BLOCK)
    bits = PagedCache(
        model, block_size=BLOCK, kv_cache_dtype=format_name, group_size=8, key_error_guard=guard
    )
    errors = []
    for step in range(24):
        ids = prompt(2, 1 + 6 * (step % 2) if step else 5 * BLOCK, seed=step)
        want, got = fill(model, exact, ids), fill(model, bits, ids)
        errors.append(float((got - want)[:, -1].norm() / want[:, -1].norm()))
    got_keys, keys = bits.layers[0].keys.clone(), exact.layers[0].keys.clone()
    varied = keys - keys.mean(2, keepdim=True)
    channels = (got_keys - keys).norm(dim=2) / varied.norm(dim=2)
    return float(channels.max()), sum(errors) / len(errors)


@pytest.mark.parametrize("offset", [0.0, 60.0])
@pytest.mark.parametrize("format_name", FORMATS)
def test_logits_survive_keys_with_outliers(format_name: str, offset: float) -> None:
    """Case 60. In every channel; a guard moves K to 8 bits where 4 would lose them."""
    channel, logits = _errors(format_name, offset)
    assert 0 < channel <= CHANNEL_BOUND
    assert 0 < logits <= LOGIT_BOUND


def test_outliers_ruin_what_the_guard_does_not_look_at() -> None:
    """Case 60. Whether the test above can fail."""
    channel, logits = _errors("int4_group", 60.0, guard="off")
    assert channel > 5 * CHANNEL_BOUND
    assert logits > 2 * LOGIT_BOUND


@pytest.mark.parametrize("factor", [50.0, 1000.0])
@pytest.mark.parametrize("format_name", FORMATS)
def test_no_scale_is_fixed_by_the_first_tokens(format_name: str, factor: float) -> None:
    """Case 62. A tiny first prompt, then K and V that are much larger."""
    cache = paged(kv_cache_dtype=format_name)
    first, later = states(5, rows=2), states(3 * BLOCK, rows=2, seed=1)
    first = first[0] * 0.01, first[1] * 0.01
    later = later[0] * 0.01 * factor, later[1] * 0.01 * factor
    update_all(cache, *first)
    for start in range(0, 3 * BLOCK, 7):
        update_all(cache, *(x[:, :, start : start + 7] for x in later))
    for layer in cache.layers:
        for shown, a, b in ((layer.keys, first[0], later[0]), (layer.values, first[1], later[1])):
            assert shown.isfinite().all()
            for got, want in ((shown[:, :, BLOCK:], b[:, :, BLOCK - 5 :]), (shown[:, :, 5:], b)):
                assert (got - want).norm() <= 0.15 * want.norm()
            if "block" not in format_name:  # one scale for a block, by design
                assert (shown[:, :, :5] - a).norm() <= 0.15 * a.norm()
    cache.check_integrity()


# --- full precision: what differs from the stock cache is rounding, and nothing that is stored --------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_attention_is_handed_the_same_bits_as_from_the_stock_cache(name: str, dtype: torch.dtype) -> None:
    """Case 9. With the host's own attention every logit is equal to the bit, in half precision too."""
    model = shared_model(name, dtype=dtype)
    for tokens in AT_EDGES:
        stock, cache = host_cache(model), PagedCache(model, block_size=BLOCK)
        disable(model)
        ids = prompt(2, tokens)
        assert torch.equal(fill(model, cache, ids), fill(model, stock, ids))
        for step in range(4):
            ids = prompt(2, 1 + step % 2, seed=step)
            assert torch.equal(fill(model, cache, ids), fill(model, stock, ids)), (tokens, step)


@pytest.mark.parametrize("name", FAMILIES)
def test_float32_tokens_are_those_of_a_run_without_a_cache(name: str) -> None:
    """Case 9. Rounding never shows in the tokens."""
    model, ids = shared_model(name), prompt(2, BLOCK + 1)
    want = reference(model, ids, new=6, use_cache=False)
    assert generate(model, ids, paged(name), new=6).tolist() == want.tolist()


# --- a trained model ---------------------------------------------------------------------------------------

PERPLEXITY_BOUNDS = {"int8": 1.01, "fp8": 1.05, "k8v4": 1.05, "int4": 1.12}


def _perplexity(model: Any, cache: Any, ids: torch.Tensor) -> float:
    """Of all but the first tokens, fed a few at a time."""
    edges = [0, *range(64, ids.shape[1] + 1, 8)]
    logits = torch.cat([fill(model, cache, ids[:, a:b]) for a, b in pairwise(edges)], 1)
    return float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).exp())


@pytest.mark.slow
def test_perplexity_over_512_tokens_is_within_the_bound_of_the_format(model: Any, tokenizer: Any) -> None:
    """Case 61. The prompt becomes bytes in one go, and the rest as it comes."""
    text = " ".join(json.loads(line)["document"] for line in TEXTS.read_text("utf-8").splitlines()[:8])
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :512]
    assert ids.shape[1] == 512
    disable(model)
    want = _perplexity(model, host_cache(model), ids)
    for format_name, bound in PERPLEXITY_BOUNDS.items():
        got = _perplexity(model, PagedCache(model, kv_cache_dtype=format_name), ids)
        assert got <= bound * want, (format_name, got, want)


@pytest.mark.slow
def test_the_first_token_of_an_answer_is_that_of_the_stock_cache(model: Any, tokenizer: Any) -> None:
    """Case 61. A first prompt is computed from what it is, and not from its bytes: 20 prompts."""
    options = {"max_new_tokens": 1, "do_sample": False}
    for first in range(0, 20, 10):
        inputs = _batch(tokenizer, first, rows=10)
        disable(model)
        want = model.generate(**inputs, **options)[:, -1].tolist()
        for format_name in ("int8", "int4"):
            cache = PagedCache(model, kv_cache_dtype=format_name)
            got = model.generate(**inputs, **options, **{cache_kwarg(): cache})
            assert got[:, -1].tolist() == want, format_name


def _repeats(tokens: torch.Tensor, end: int) -> tuple[int, int]:
    """How many tokens are the one before, and of how many. What fills up an ended row says nothing."""
    said = tokens[:, 1:] != end
    return int(((tokens[:, 1:] == tokens[:, :-1]) & said).sum()), int(said.sum())


@pytest.mark.slow
def test_no_more_tokens_are_said_twice_than_with_the_stock_cache(model: Any, tokenizer: Any) -> None:
    """Case 63. A gate on what is said, beside those on speed."""
    inputs, end = _batch(tokenizer, 0, rows=8), model.config.eos_token_id
    start = inputs["input_ids"].shape[1]
    disable(model)
    want, of = _repeats(_generate(model, inputs, host_cache(model), new_tokens=64)[:, start:], end)
    for format_name in ("auto", "int8", "int4"):
        cache = PagedCache(model, kv_cache_dtype=format_name)
        got, said = _repeats(_generate(model, inputs, cache, new_tokens=64)[:, start:], end)
        assert said > 200, "answers that end at once repeat nothing"
        assert got / said <= want / of + 0.01, format_name
