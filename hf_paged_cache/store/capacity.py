"""Sizes of pools, in blocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from hf_paged_cache.errors import PagedCacheError
from hf_paged_cache.host import generation

from .device.memory import free_memory_bytes, total_memory_bytes

if TYPE_CHECKING:
    import torch

    from hf_paged_cache.config import PagedCacheConfig
    from hf_paged_cache.host.architectures import LayerSpec

    from .pool_tensors import NewTokens
    from .precision import Precision
    from .window_store import WindowStore

_DEFAULT_TOKENS = 8192  # per sequence, for a config that names no `max_position_embeddings`
_RESERVE_TOKENS = 256  # beside the prompt, where memory is taken at once and nobody says how long rows get


class Capacity:
    """Sizes of pools: as asked for, or what rows may need, cut to the memory.

    On a CPU memory that was never written costs nothing, so rows get the model's length. Elsewhere pools
    begin with the length at which the call in progress stops, or a reserve beside the prompt, and grow.
    """

    def __init__(
        self, config: PagedCacheConfig, specs: dict[int, LayerSpec], max_positions: int | None
    ) -> None:
        self._config = config
        self._row_tokens = config.max_cache_len or max_positions or _DEFAULT_TOKENS
        self._specs = specs
        # Whether the settings say how many tokens there are to be.
        self.is_asked_for = config.max_tokens is not None or config.max_cache_len is not None

    def wanted_blocks(
        self, new: NewTokens, precision: Precision, *, keep_history: bool, is_static: bool
    ) -> dict[int | None, int]:
        """Blocks of each group, by window, for rows that begin with such tokens of one layer.

        Others have as many heads and channels. Windows that `keep_history`, or are static, drop nothing.
        """
        batch, shape = new.batch, new.shape
        wanted = {
            window: self.full_blocks(batch, self._config.block_size_of(window))
            if is_static
            else self._first_blocks(window, new, keep_history)
            for window in dict.fromkeys(spec.window for spec in self._specs.values())
        }
        block_bytes: Counter[int | None] = Counter()
        dense_bytes = 0  # of blocks that quantized layers keep in the model's dtype
        for index, spec in self._specs.items():
            dim, v_dim = spec.head_dim or shape.head_dim, spec.head_dim or shape.v_head_dim
            layer = replace(shape, head_dim=dim, v_head_dim=v_dim, format=precision.formats[index])
            size = self._config.block_size_of(spec.window)
            block_bytes[spec.window] += layer.block_bytes(size)
            if layer.format is not None:
                dense_bytes += batch * precision.dense_blocks(size).dense_per_row * layer.dense_bytes(size)
        wanted_bytes = sum(blocks * block_bytes[window] for window, blocks in wanted.items())
        if self.is_asked_for:
            self._check_memory(wanted_bytes, batch, shape.device)
            return wanted
        budget = self._config.gpu_memory_utilization * free_memory_bytes(shape.device) - dense_bytes
        if wanted_bytes <= budget:
            return wanted
        return {window: max(1, int(blocks * budget / wanted_bytes)) for window, blocks in wanted.items()}

    def _first_blocks(self, window: int | None, new: NewTokens, keep_history: bool) -> int:
        """What rows of one window begin with."""
        size = self._config.block_size_of(window)
        blocks = self.full_blocks(new.batch, size)
        if not self.is_asked_for and _is_taken_at_once(new.shape.device):
            length = max(generation.generated_length() or new.count + _RESERVE_TOKENS, new.count)
            blocks = min(blocks, new.batch * -(-length // size))
        if window is not None:
            history = new.count if keep_history else 0
            blocks = min(blocks, new.batch * (self.window_blocks(window) + -(-history // size)))
        return blocks

    def grown_blocks(self, store: WindowStore, missing: int, at_least: int) -> int:
        """What a store grows to that lacks so many blocks; it may have `at_least` so many in any case."""
        rows = sum(holder.manager.batch for holder in store.holders)
        wanted = max(self._enough_blocks(store, rows), store.num_blocks + missing)
        return min(wanted, max(self._ceiling_blocks(store, rows), at_least))

    def _enough_blocks(self, store: WindowStore, rows: int) -> int:
        """What a store grows to where no more is missing."""
        if store.window is not None:  # what layers take for a chunk is given back, so it is no more than that
            return rows * self.window_blocks(store.window)
        if not self.is_asked_for and (length := generation.generated_length()) is not None:
            return rows * -(-length // self._config.block_size)
        if store.grows_in_place:
            return store.num_blocks + rows * -(-_RESERVE_TOKENS // self._config.block_size)
        return 2 * store.num_blocks

    def shared_blocks(self, store: WindowStore) -> int:
        """Blocks of a store that another cache has joined."""
        rows = sum(max(1, holder.manager.batch) for holder in store.holders)
        ceiling = self._ceiling_blocks(store, rows)
        wanted = min(self.full_blocks(rows, store.block_size), ceiling)
        if store.window is not None:
            # Some cache may take a chunk while another is writing, and the pool cannot grow.
            wanted = min(wanted, rows * 2 * self.window_blocks(store.window))
        if wanted <= store.num_blocks:
            return store.num_blocks
        return max(wanted, min(2 * store.num_blocks, ceiling))

    def _ceiling_blocks(self, store: WindowStore, rows: int) -> int:
        """Blocks that a store may have: what full rows take, cut to the memory.

        Repeated rows, and windows that are kept for a roll-back, may want more than it began with.
        """
        full = self.full_blocks(rows, store.block_size)
        block_bytes = sum(tensors.bytes_per_block for tensors in store.tensors)
        if self.is_asked_for or not block_bytes:
            return full
        budget = self._config.gpu_memory_utilization * free_memory_bytes(store.tensors[0].shape.device)
        held = store.tensors[0].num_blocks if store.grows_in_place else 0
        return min(full, held + int(budget / block_bytes))

    def _check_memory(self, wanted_bytes: int, batch: int, device: torch.device) -> None:
        """Raise PagedCacheError if pools could never be filled, even by a process alone on the machine."""
        there = total_memory_bytes(device)
        if there is None or wanted_bytes <= there:
            return
        size = self._config.block_size
        tokens = self.full_blocks(batch, size) * size
        asked = f"max_tokens={self._config.max_tokens}"
        if self._config.max_tokens is None:
            asked = f"max_cache_len={self._config.max_cache_len} for {batch} rows"
        raise PagedCacheError(
            f"{asked} wants pools of {wanted_bytes / 2**30:.1f} GiB, and {device} has {there / 2**30:.1f} "
            f"GiB in all, room for {tokens * there // wanted_bytes} tokens; leave it away for what fits, or "
            "store fewer bits (`kv_cache_dtype`)"
        )

    def full_blocks(self, batch: int, block_size: int) -> int:
        """Blocks that hold the capacity however its tokens are spread over the rows."""
        if self._config.max_tokens is None:
            return batch * -(-self._row_tokens // block_size)
        return (self._config.max_tokens + batch * (block_size - 1)) // block_size

    def window_blocks(self, window: int) -> int:
        """Blocks a row of a window layer holds at decode: so many tokens, wherever in a block they begin.

        A chunk of new tokens over a full window holds the old window beside the new one while it is computed.
        """
        return -(-(window - 1) // self._config.block_size_of(window)) + 1


def _is_taken_at_once(device: torch.device) -> bool:
    """Whether memory is taken when it is allocated, and not when it is first written."""
    return device.type != "cpu"
