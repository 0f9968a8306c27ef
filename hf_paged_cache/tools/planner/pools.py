"""Bytes of the pools of a cache that nobody has made, from the code that would make it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig

from hf_paged_cache.cache.paged_cache import PagedCache
from hf_paged_cache.errors import PagedCacheError
from hf_paged_cache.store.capacity import Capacity
from hf_paged_cache.store.pool_tensors import PoolShape

from .forward import StoredShapes

_LONG_PROMPT_TOKENS = 1 << 31
"""A prompt this long tells no more than a longer one."""


class PoolSizes:
    """How large the pools of a cache with these settings are, for any rows and tokens.

    A real cache is opened on the meta device, where its pools take no memory, and asked.

    Args:
        config: Of the model.
        stored: What the model stores of a token.
        settings: Of the cache, without `max_tokens`.
        context: Tokens of a row, prompt included, which the format `adaptive` goes by.

    Raises:
        PagedCacheError: A setting is out of range, or the format cannot store these heads.
    """

    def __init__(
        self, config: PreTrainedConfig, stored: StoredShapes, settings: Mapping[str, Any], context: int
    ) -> None:
        cache = PagedCache(copy.deepcopy(config), max_tokens=1, **settings)  # a config that stays as it was
        state = cache._state
        self._settings = state.config
        for index, shape in stored.layers.items():
            tokens, meta = min(context, _LONG_PROMPT_TOKENS), torch.device("meta")
            dims = (shape.head_dim, shape.v_head_dim)
            keys, values = (
                torch.empty(1, shape.kv_heads, tokens, dim, dtype=shape.dtype, device=meta) for dim in dims
            )
            if not state.groups:
                self._shape = PoolShape.of(keys, values)
            state.claim(index, keys, values)
        self._precision = state.layer_groups.precision
        self._specs = {index: spec for group in state.groups for index, spec in group.specs.items()}
        self._block_bytes = {
            group.window: sum(pool.tensors.bytes_per_block for pool in group.pools) for group in state.groups
        }
        self._sizes = {group.window: group.block_size for group in state.groups}
        self._row_bytes = sum(pool.slot_bytes for group in state.groups for pool in group.pools)

    @property
    def block_bytes(self) -> int:
        """Bytes of `block_size` tokens in all layers, as they are stored for good."""
        whole = self._settings.block_size
        return sum(bytes_ * (whole // self._sizes[window]) for window, bytes_ in self._block_bytes.items())

    @property
    def unbounded_block_bytes(self) -> int:
        """The same, of the layers that keep all tokens."""
        return self._block_bytes.get(None, 0)

    def pool_bytes(self, batch: int, tokens: int) -> int:
        """Bytes of all pools at the first forward of a cache with `max_tokens=batch * tokens`."""
        if not self._block_bytes:
            return 0
        config = replace(self._settings, max_tokens=batch * tokens)
        wanted = Capacity(config, self._specs, None).wanted_blocks(
            batch, tokens, self._shape, self._precision, keep_history=False, is_static=False
        )
        blocks = sum(count * self._block_bytes[window] for window, count in wanted.items())
        return blocks + batch * self._row_bytes


def pool_sizes(
    config: PreTrainedConfig, stored: StoredShapes, settings: Mapping[str, Any], context: int
) -> PoolSizes | str:
    """The sizes of pools, or why a format cannot be used for this model."""
    try:
        return PoolSizes(config, stored, settings, context)
    except PagedCacheError as error:
        return str(error)
