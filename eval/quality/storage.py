"""Bytes that a cache keeps, counted from the tensors that hold it."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import QuantizedLayer

from hf_paged_cache import PagedCache
from hf_paged_cache.host.lazy_tensor import plain_tensors


@dataclass(frozen=True)
class Storage:
    """Bytes of K and V after a run, and how many numbers they stand for; stored is what is kept quantized."""

    stored_bytes: int
    stored_values: int
    all_bytes: int
    all_values: int

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
    dense = [states for layer in cache.layers for states in (layer.keys, layer.values)]
    dense_bytes, dense_values = sum(x.nbytes for x in dense), sum(x.numel() for x in dense)
    if not isinstance(cache.layers[0], QuantizedLayer):
        return Storage(dense_bytes, dense_values, dense_bytes, dense_values)
    packed = plain_tensors(tuple((layer._quantized_keys, layer._quantized_values) for layer in cache.layers))
    stored_bytes = sum(tensor.numel() * tensor.element_size() for tensor in packed)
    config = model.config.get_text_config(decoder=True)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    values = per_token * rows * cache.layers[0].cumulative_length
    return Storage(stored_bytes, values - dense_values, stored_bytes + dense_bytes, values)


def _of_paged(cache: PagedCache) -> Storage:
    """The entries of its tables say which blocks are records."""
    tokens, stored_bytes, stored_values, all_values = cache.stats().tokens, 0, 0, 0
    for blocks in cache._state.blocks.values():
        per_token = blocks.keys.shape[1] * (blocks.keys.shape[3] + blocks.values.shape[3])
        block = (blocks.keys[0], blocks.values[0]) if blocks.records is None else (blocks.records[0],)
        starts = torch.arange(0, tokens, blocks.block_size)
        sealed = blocks.table[:, : len(starts)] >= 0
        stored_bytes += int(sealed.sum()) * sum(tensor.nbytes for tensor in block)
        stored_values += int((sealed * (tokens - starts).clamp(max=blocks.block_size)).sum()) * per_token
        all_values += blocks.table.shape[0] * tokens * per_token
    return Storage(stored_bytes, stored_values, cache.memory_footprint().used_bytes, all_values)
