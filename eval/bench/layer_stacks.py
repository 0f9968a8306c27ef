"""Attention layers without a model: a cache with many layers, filled, and the function that attends it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from eval.bench.readers import l3_bytes
from eval.bench.seed import SEED
from eval.bench.workload import dtype_name, remove_last
from hf_paged_cache.config import KVCacheDtype

_SPARE_TOKENS = 64
_BLOCK_SIZE = 64


@dataclass(frozen=True)
class Shape:
    """Heads of one attention layer."""

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Case:
    """One thing to measure: a step that attends `tokens` tokens, the new one included."""

    shape: Shape
    batch: int
    dtype: torch.dtype
    tokens: int
    least_bits: float | None = None
    """Bits per value of the smallest contender, where one keeps fewer than the dtype has."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that one layer attends."""
        shape = self.shape
        return 2 * self.batch * shape.kv_heads * self.tokens * shape.head_dim * self.dtype.itemsize

    @property
    def layers(self) -> int:
        """Layers to go round, so that K and V come from memory and not from the processor's caches."""
        bits = 8 * self.dtype.itemsize
        least_bytes = int(self.kv_bytes * (self.least_bits or bits) / bits)
        return max(2, -(-4 * l3_bytes() // least_bytes))

    def __str__(self) -> str:
        return f"{self.shape.name}, batch {self.batch}, {dtype_name(self.dtype)}, {self.tokens} tokens"


class LayerStack:
    """The layers of one contender. `step` is a decode step of all of them, one after the other."""

    def __init__(
        self, name: str, case: Case, cache: Any, attention: Callable[..., Any], mask: torch.Tensor | None
    ):
        self.name = name
        self.case = case
        self.cache = cache
        self.attention = attention
        self.mask = mask
        self.layers = len(cache.layers)
        self.modules = [_AttentionModule(case.shape, layer_idx) for layer_idx in range(self.layers)]
        self.scaling = case.shape.head_dim**-0.5
        generator = torch.Generator().manual_seed(SEED)
        self.query, self.keys, self.values = (
            # Layers project to [batch, tokens, heads, head_dim] and swap the middle two.
            torch.randn(case.batch, 1, heads, case.shape.head_dim, generator=generator)
            .to(case.dtype)
            .transpose(1, 2)
            for heads in (case.shape.q_heads, case.shape.kv_heads, case.shape.kv_heads)
        )

    def attend(self, layer_idx: int) -> torch.Tensor:
        """The new token of one layer: write, attend. `[batch, 1, q_heads, head_dim]`."""
        keys, values = self.cache.update(self.keys, self.values, layer_idx)
        output: torch.Tensor = self.attention(
            self.modules[layer_idx], self.query, keys, values, self.mask, dropout=0.0, scaling=self.scaling
        )[0]
        return output

    def step(self) -> None:
        """The new token of every layer."""
        for layer_idx in range(self.layers):
            self.attend(layer_idx)

    def finish_pass(self, done: set[int]) -> None:
        """The new token of every layer that has not had it."""
        for layer_idx in range(self.layers):
            if layer_idx not in done:
                self.attend(layer_idx)

    def restore(self, steps: int) -> None:
        """Take the last tokens back."""
        remove_last(self.cache, steps)


class _AttentionModule(torch.nn.Module):
    """What attention functions read of a layer."""

    def __init__(self, shape: Shape, layer_idx: int) -> None:
        super().__init__()
        self.num_key_value_groups = shape.q_heads // shape.kv_heads
        self.is_causal = True
        self.layer_idx = layer_idx
        self.eval()


def filled(case: Case) -> list[LayerStack]:
    """The contenders, all holding the same random K and V of `case.tokens - 1` tokens."""
    return fill([dynamic(case), _static(case), paged(case)])


def fill(stacks: list[LayerStack]) -> list[LayerStack]:
    """Give all stacks of one case the same random K and V of `case.tokens - 1` tokens."""
    case = stacks[0].case
    generator = torch.Generator().manual_seed(SEED)
    shape = (case.batch, case.shape.kv_heads, case.tokens - 1, case.shape.head_dim)
    for layer_idx in range(max(stack.layers for stack in stacks)):
        keys, values = (torch.randn(shape, generator=generator, dtype=case.dtype) for _ in range(2))
        for stack in stacks:
            if layer_idx < stack.layers:
                stack.cache.update(keys, values, layer_idx)
    return stacks


def dynamic(case: Case) -> LayerStack:
    """A `DynamicCache`, empty, with SDPA."""
    return LayerStack(
        "dynamic", case, DynamicCache(config=config_of(case)), ALL_ATTENTION_FUNCTIONS["sdpa"], None
    )


def _static(case: Case) -> LayerStack:
    length = case.tokens + _SPARE_TOKENS
    cache = StaticCache(config=config_of(case), max_cache_len=length)
    mask = (torch.arange(length) < case.tokens).expand(case.batch, 1, 1, length)
    return LayerStack("static", case, cache, ALL_ATTENTION_FUNCTIONS["sdpa"], mask)


def paged(case: Case, kv_cache_dtype: KVCacheDtype = "auto") -> LayerStack:
    """A `PagedCache`, empty, with the attention function that a model would call."""
    from hf_paged_cache import PagedCache

    config = config_of(case)
    blocks = case.batch * -(-(case.tokens + _SPARE_TOKENS) // _BLOCK_SIZE)
    cache = PagedCache(
        config, block_size=_BLOCK_SIZE, max_tokens=blocks * _BLOCK_SIZE, kv_cache_dtype=kv_cache_dtype
    )
    name = "paged" if kv_cache_dtype == "auto" else kv_cache_dtype
    return LayerStack(name, case, cache, ALL_ATTENTION_FUNCTIONS[config._attn_implementation], None)


def config_of(case: Case, layers: int | None = None) -> LlamaConfig:
    """A model with such layers, of which there are `case.layers` unless said otherwise."""
    shape = case.shape
    config = LlamaConfig(
        hidden_size=shape.q_heads * shape.head_dim,
        num_attention_heads=shape.q_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        num_hidden_layers=case.layers if layers is None else layers,
        max_position_embeddings=2 * case.tokens,
    )
    config._attn_implementation = "sdpa"
    return config
