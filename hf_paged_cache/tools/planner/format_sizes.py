"""Bytes of a cache in one format for any rows and tokens, and how far a memory reaches with it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING

from hf_paged_cache.store.capacity import Capacity
from hf_paged_cache.store.pool_tensors import NewTokens

from .memory_plan import FormatPlan

if TYPE_CHECKING:
    from hf_paged_cache.cache.paged_cache import PagedCache

    from .stored_shapes import StoredShapes

MOST = 1 << 50  # no number of rows or tokens goes further
_LONG_PROMPT_TOKENS = 1 << 31  # a prompt this long tells no more than a longer one


class FormatSizes:
    """Sizes of pools and states in the format of a cache, an empty one with the settings that are planned.

    They come from the code that makes pools: the cache is opened on the meta device, where they take no
    memory, for rows of `context` tokens, which `adaptive` goes by. PagedCacheError if it cannot store them.
    """

    def __init__(self, cache: PagedCache, stored: StoredShapes, context: int) -> None:
        state = cache._state
        self._config, self._stored = state.config, stored
        tokens = min(context, _LONG_PROMPT_TOKENS)
        for index, shape in stored.layers.items():
            state.claim(index, NewTokens(1, tokens, shape))
        self._precision = state.layer_groups.precision
        self._specs = {index: spec for group in state.groups for index, spec in group.specs.items()}
        self._block_bytes = {
            g.window: sum(pool.tensors.bytes_per_block for pool in g.pools) for g in state.groups
        }
        # Layers with a short window have smaller blocks.
        sizes = {group.window: state.config.block_size // group.block_size for group in state.groups}
        self._whole_block_bytes = sum(sizes[window] * count for window, count in self._block_bytes.items())
        self._row_bytes = sum(pool.dense_bytes for group in state.groups for pool in group.pools)

    def plan(self, context: int, batch: int, budget_bytes: int | None) -> FormatPlan:
        """The numbers of the format; the budget is what weights leave of the memory."""
        request, needed = self._cache_bytes(1, context), self._cache_bytes(batch, context)
        growth = self._per_token(self._block_bytes.get(None, 0))
        max_context = max_batch = None
        if budget_bytes is not None:
            counts = range(1, MOST)
            if growth or self._cache_bytes(batch, MOST) > budget_bytes:  # otherwise any number of tokens fits
                max_context = bisect_right(counts, budget_bytes, key=lambda n: self._cache_bytes(batch, n))
            max_batch = bisect_right(counts, budget_bytes, key=lambda n: self._cache_bytes(n, context))
        return FormatPlan(
            kv_cache_dtype=self._config.kv_cache_dtype,
            tier="device",
            bytes_per_token=self._per_token(self._whole_block_bytes),
            growth_bytes_per_token=growth,
            request_bytes=request,
            batch_bytes=batch * request,
            pool_bytes=self._pool_bytes(batch, context),
            state_bytes=self._state_bytes(batch, context),
            fits=None if budget_bytes is None else needed <= budget_bytes,
            max_context=max_context,
            max_batch=max_batch,
        )

    def _per_token(self, block_bytes: int) -> int:
        return -(-block_bytes // self._config.block_size) + self._stored.state_token_bytes

    def _pool_bytes(self, batch: int, context: int) -> int:
        """Bytes of all pools at the first forward of a cache that has room for so many tokens."""
        if not self._block_bytes:
            return 0
        tokens = context + self._stored.own_tokens
        config = replace(self._config, max_tokens=batch * tokens)
        new = NewTokens(batch, tokens, next(iter(self._stored.layers.values())))
        wanted = Capacity(config, self._specs, None).wanted_blocks(
            new, self._precision, keep_history=False, is_static=False
        )
        blocks = sum(count * self._block_bytes[window] for window, count in wanted.items())
        return blocks + batch * self._row_bytes

    def _state_bytes(self, batch: int, context: int) -> int:
        tokens = context + self._stored.own_tokens
        return batch * (self._stored.state_bytes + tokens * self._stored.state_token_bytes)

    def _cache_bytes(self, batch: int, context: int) -> int:
        return self._pool_bytes(batch, context) + self._state_bytes(batch, context)
