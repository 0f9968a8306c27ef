"""Section d, what it measures with: a random Llama, the caches by name, and K and V to fill them with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from eval.gpu.device import Device
from eval.gpu.items import Skip
from eval.gpu.parity import has_compile_argument

_BLOCK_SIZE = 64


@dataclass(frozen=True)
class Size:
    """The sizes of a Llama."""

    layers: int = 32
    hidden: int = 4096
    intermediate: int = 14336
    q_heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128256
    dtype: torch.dtype = torch.bfloat16


LLAMA_3_8B = Size()
TOY = Size(layers=2, hidden=64, intermediate=96, q_heads=4, kv_heads=2, vocabulary=128)


def random_llama(size: Size, device: Device) -> Any:
    """A Llama with random weights, made on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=size.layers,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_attention_heads=size.q_heads,
        num_key_value_heads=size.kv_heads,
        vocab_size=size.vocabulary,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=1,
        pad_token_id=0,
    )
    with torch.device(device.torch_device), _default_dtype(size.dtype):
        model: Any = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def new_cache(name: str, model: Any, batch: int, tokens: int) -> Any:
    """An empty cache of that name for `batch` rows of up to `tokens` tokens; the model's attention fits it.

    Raises:
        Skip: it cannot be had here.
    """
    from transformers import DynamicCache, StaticCache

    from hf_paged_cache import PagedCache, disable

    disable(model)
    if name == "dynamic":
        return DynamicCache(config=model.config)
    if name == "static":
        return StaticCache(config=model.config, max_cache_len=tokens)
    if name == "quantized":
        return _quantized(model)
    options: dict[str, Any] = {}
    if name == "paged_compiled":
        if not has_compile_argument():
            raise Skip("PagedCache takes no argument `compile`")
        options["compile"] = True
    blocks = batch * -(-tokens // _BLOCK_SIZE)
    return PagedCache(model, block_size=_BLOCK_SIZE, max_tokens=blocks * _BLOCK_SIZE, **options)


def fill(cache: Any, model: Any, batch: int, tokens: int, device: Device, seed: int) -> None:
    """Put K and V of `tokens` tokens into every layer, the same for every cache.

    V has a mean, so that an attention that loses part of its weight shows in the logits.
    """
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    generator = torch.Generator(device.torch_device).manual_seed(seed)
    shape = (batch, config.num_key_value_heads, tokens, head_dim)

    def normal(*size: int) -> torch.Tensor:
        empty = torch.empty(size, dtype=model.dtype, device=device.torch_device)
        return empty.normal_(generator=generator)

    keys = normal(*shape)
    values = normal(*shape).add_(normal(batch, config.num_key_value_heads, 1, head_dim))
    for layer_idx in range(config.num_hidden_layers):
        cache.update(keys, values, layer_idx)


def _quantized(model: Any) -> Any:
    """The host's own quantized cache with whichever of its two libraries is installed."""
    from transformers import QuantizedCache

    reasons: list[str] = []
    for backend, options in (("hqq", {"axis_key": 1, "axis_value": 1}), ("quanto", {})):
        try:
            return QuantizedCache(backend, config=model.config, nbits=4, **options)
        except (ImportError, ValueError) as error:
            reasons.append(f"{backend}: {str(error).splitlines()[0]}")
    raise Skip("; ".join(reasons))


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
