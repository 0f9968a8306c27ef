"""Bytes that a cache keeps, counted from the tensors that hold it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import QuantizedLayer

from hf_paged_cache import PagedCache
from hf_paged_cache.host.lazy_tensor import plain_tensors


@dataclass(frozen=True)
class Storage:
    """Bytes of K and V after a run, and how many numbers they stand for."""

    # of tokens in the cache's format for good: sealed records, or a stock cache's quantized part, with their
    # scales
    stored_bytes: int
    stored_values: int  # numbers of K and V in them
    all_bytes: int  # those and what is kept in the model's dtype (sink, open block, residual)
    all_values: int  # numbers of K and V of all tokens

    @property
    def stored_bits(self) -> float | None:
        """Bits per value of what is stored for good; None if nothing is yet."""
        return 8 * self.stored_bytes / self.stored_values if self.stored_values else None

    @property
    def all_bits(self) -> float:
        """Bits per value of everything."""
        return 8 * self.all_bytes / self.all_values


def measure(cache: Any, model: Any, rows: int) -> Storage:
    """What a `PagedCache`, a `QuantizedCache` with any backend or a `DynamicCache` holds."""
    if isinstance(cache, PagedCache):
        return _of_paged(cache)
    if isinstance(cache.layers[0], QuantizedLayer):
        return _of_quantized(cache, model, rows)
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    total, values = sum(tensor.nbytes for tensor in tensors), sum(tensor.numel() for tensor in tensors)
    return Storage(total, values, total, values)


def _of_paged(cache: PagedCache) -> Storage:
    """The entries of its tables say which blocks are records."""
    tokens, stored_bytes, stored_values, all_values = cache.stats().tokens, 0, 0, 0
    for blocks in cache._state.blocks.values():
        heads, dims = blocks.keys.shape[1], blocks.keys.shape[3] + blocks.values.shape[3]
        one = (blocks.keys[0], blocks.values[0]) if blocks.records is None else (blocks.records[0],)
        columns = -(-tokens // blocks.block_size)
        in_column = torch.full((columns,), blocks.block_size)
        in_column[-1] = tokens - (columns - 1) * blocks.block_size
        sealed = blocks.table[:, :columns] >= 0
        stored_bytes += int(sealed.sum()) * sum(tensor.nbytes for tensor in one)
        stored_values += int((sealed * in_column).sum()) * heads * dims
        all_values += blocks.table.shape[0] * tokens * heads * dims
    return Storage(stored_bytes, stored_values, cache.memory_footprint().used_bytes, all_values)


def _of_quantized(cache: Any, model: Any, rows: int) -> Storage:
    """Its quantized part, and the residual in the model's dtype."""
    stored = residual = residual_values = 0
    for layer in cache.layers:
        quantized = plain_tensors((layer._quantized_keys, layer._quantized_values))
        stored += sum(tensor.numel() * tensor.element_size() for tensor in quantized)
        residual += layer.keys.nbytes + layer.values.nbytes
        residual_values += layer.keys.numel() + layer.values.numel()
    config = model.config.get_text_config(decoder=True)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    total = per_token * rows * cache.layers[0].cumulative_length
    return Storage(stored, total - residual_values, stored + residual, total)
