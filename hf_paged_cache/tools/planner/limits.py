"""Bytes of one format for any rows and tokens, and how far a memory reaches with it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from .forward import StoredShapes
from .plan import FormatPlan
from .pools import PoolSizes

TIER = "device"
"""Where all blocks lie."""

MOST = 1 << 50
"""No number of rows or tokens goes further."""


@dataclass(frozen=True)
class Limits:
    """Pools and states of one format.

    Attributes:
        pools: Sizes of pools.
        stored: What the model stores.
        block_size: Tokens per block.
    """

    pools: PoolSizes
    stored: StoredShapes
    block_size: int

    def plan(self, name: str, context: int, batch: int, budget_bytes: int | None) -> FormatPlan:
        """The numbers of a format; the budget is what weights leave of the memory."""
        request, needed = self._cache_bytes(1, context), self._cache_bytes(batch, context)
        return FormatPlan(
            kv_cache_dtype=name,
            tier=TIER,
            bytes_per_token=self._per_token(self.pools.block_bytes),
            growth_bytes_per_token=self._growth,
            request_bytes=request,
            batch_bytes=batch * request,
            pool_bytes=self._pool_bytes(batch, context),
            state_bytes=self._state_bytes(batch, context),
            fits=None if budget_bytes is None else needed <= budget_bytes,
            max_context=None if budget_bytes is None else self._max_context(batch, budget_bytes),
            max_batch=None if budget_bytes is None else self._max_batch(context, budget_bytes),
        )

    @property
    def _growth(self) -> int:
        return self._per_token(self.pools.unbounded_block_bytes)

    def _per_token(self, block_bytes: int) -> int:
        return -(-block_bytes // self.block_size) + self.stored.state_token_bytes

    def _pool_bytes(self, batch: int, context: int) -> int:
        return self.pools.pool_bytes(batch, context + self.stored.own_tokens)

    def _state_bytes(self, batch: int, context: int) -> int:
        tokens = context + self.stored.own_tokens
        return batch * (self.stored.state_bytes + tokens * self.stored.state_token_bytes)

    def _cache_bytes(self, batch: int, context: int) -> int:
        return self._pool_bytes(batch, context) + self._state_bytes(batch, context)

    def _max_context(self, batch: int, budget_bytes: int) -> int | None:
        """Most tokens that fit; None if any number does."""
        if not self._growth and self._cache_bytes(batch, MOST) <= budget_bytes:
            return None
        return bisect_right(range(1, MOST), budget_bytes, key=lambda tokens: self._cache_bytes(batch, tokens))

    def _max_batch(self, context: int, budget_bytes: int) -> int:
        return bisect_right(range(1, MOST), budget_bytes, key=lambda rows: self._cache_bytes(rows, context))
