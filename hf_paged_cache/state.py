"""What all layers of one cache share: rows, token counts, groups, and the step that a forward makes.

A forward brings the same new tokens to every layer, one layer after the other. The first layer to get them
opens the step: blocks are reserved in every group, or nothing happens at all. The others then only write.

```
            layer 0   layer 1   layer 2
step_end  ─ written   written   ·           <- tokens [step_start, step_end) are reserved everywhere
step_start─ written   written   written
```
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .config import PagedCacheConfig
from .errors import CacheMismatchError, PagedCacheError, PoolExhausted
from .group import LayerGroup
from .kernels.problem import LayerBlocks
from .memory import free_memory_bytes
from .spec import LayerSpec

_DEFAULT_CAPACITY_TOKENS = 8192
"""Tokens per sequence for a config that names no `max_position_embeddings`."""


class CacheState:
    """The shared part of a cache. Layers hold it; it holds no layer.

    Attributes:
        config: Settings.
        batch: Rows, or 0 before the first update and after a reset.
        tokens: Layer index -> tokens that this layer holds of every row.
        step_start: Tokens stored before the step in progress (or the last one).
        step_end: Tokens stored when that step is complete.
        record_past: Window layers keep what they would drop, so that `crop` can bring it back.
        has_host_states: Other layers of the cache keep recurrent states, which cannot be taken back.
        broken: A forward failed after such a state had moved on; only a reset helps.
    """

    def __init__(
        self, config: PagedCacheConfig, specs: dict[int, LayerSpec], max_positions: int | None
    ) -> None:
        self.config = config
        self.batch = 0
        self.tokens = dict.fromkeys(specs, 0)
        self.step_start = 0
        self.step_end = 0
        self.record_past = False
        self.has_host_states = False
        self.broken = False
        self._specs = specs
        self._max_positions = max_positions or _DEFAULT_CAPACITY_TOKENS
        self._last_written: int | None = None
        self._groups: dict[int | None, LayerGroup] = {}

    @property
    def groups(self) -> list[LayerGroup]:
        """The groups, in the order of their first layers; empty before the first update."""
        return list(self._groups.values())

    def group_of(self, layer_idx: int) -> LayerGroup:
        """The group that a layer belongs to (only after the first update)."""
        return self._groups[self._specs[layer_idx].window]

    # --- the step -------------------------------------------------------------------------------------------

    def begin_step(self, layer_idx: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Reserve room for the new tokens in every group, all or nothing.

        Raises:
            CacheMismatchError: The layers do not advance together.
            PoolExhausted: Too few blocks. Nothing was written, nothing changed.
        """
        start, new_tokens = self.tokens[layer_idx], key_states.shape[2]
        if self.broken:
            raise CacheMismatchError(
                "a forward failed after layers with a recurrent state had moved on, and those cannot be "
                "taken back; call `cache.reset()` and start from the prompt"
            )
        if new_tokens == 0:
            raise CacheMismatchError(
                f"layer {layer_idx}: no new tokens. The cache already holds {start} tokens per row, and the "
                "prompt has no more than that; pass a longer prompt, `cache.crop(...)` what differs, or "
                "`cache.reset()`"
            )
        self._check_in_step(layer_idx, start)
        if not self.batch:
            self._open_rows(key_states, value_states)
        try:
            self._reserve(start, new_tokens)
        except PoolExhausted:
            self.broken = self.has_host_states
            if not start:
                self.reset()
            raise
        self.step_start, self.step_end = start, start + new_tokens

    def check_room(self, new_tokens: int) -> None:
        """Raise PoolExhausted if a forward of so many tokens would, before any layer has run."""
        for group in self.groups if self.batch else ():
            self._make_room(group, self.step_end, new_tokens)

    def written(self, layer_idx: int) -> None:
        """Note that a layer holds the tokens of this step."""
        self.tokens[layer_idx] = self.step_end
        self._last_written = layer_idx

    def is_next_in_step(self, layer_idx: int) -> bool:
        """Whether a step is in progress that this layer has yet to join."""
        return self.tokens[layer_idx] == self.step_start < self.step_end

    def abort_step(self) -> None:
        """Take back the step in progress, in every layer."""
        if self.step_end > self.step_start:
            self.broken = self.has_host_states
            self._crop_to(self.step_start)

    def claim(self, layer_idx: int, key_states: torch.Tensor, value_states: torch.Tensor) -> LayerBlocks:
        """Give a layer its place in a pool."""
        if not self._groups:
            self._open_rows(key_states, value_states)
        return self.group_of(layer_idx).claim(layer_idx, key_states, value_states)

    # --- what a user does between forwards ------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens of every row; more than there are forgets all."""
        if tokens_to_remove and self.step_end:
            self._crop_to(max(0, self.step_end - tokens_to_remove))
        if self.record_past:
            # What a rejected draft could have needed is settled now.
            for group in self.groups:
                if group.manager.release_outside_window():
                    group.sync_tables()

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise what `crop` would raise; changes nothing."""
        num_tokens = self.step_end - tokens_to_remove
        try:
            for group in self.groups if num_tokens > 0 else ():
                group.manager.check_crop(num_tokens)
        except ValueError as error:
            raise PagedCacheError(
                f"cannot crop to {num_tokens} tokens: {error}. Call `cache.activate_past_recording()` before "
                "the forwards that may be rolled back"
            ) from error

    def reorder(self, row_indices: Sequence[int]) -> None:
        """Make the rows copies of the given old rows, by reference; their number may change."""
        if not self.batch:
            return
        bad = [row for row in row_indices if not -self.batch <= row < self.batch]
        if bad or not row_indices:
            raise PagedCacheError(
                f"row indices must be a non-empty selection of 0…{self.batch - 1} (the cache holds "
                f"{self.batch} rows), got {list(row_indices)}"
            )
        rows = [row % self.batch for row in row_indices]
        for group in self.groups:
            group.reorder(rows)
        self.batch = len(rows)

    def reset(self) -> None:
        """Forget all rows and give their blocks back; pools stay."""
        for group in self.groups:
            group.manager.reset()
            group.owners.clear()
        self.tokens = dict.fromkeys(self.tokens, 0)
        self.batch = self.step_start = self.step_end = 0
        self._last_written = None

    def check_integrity(self) -> None:
        """Raise an AssertionError if blocks were lost or the layers disagree."""
        for group in self.groups:
            group.manager.check_integrity()
            assert group.manager.num_tokens in (self.step_end, 0), (
                f"the group of window {group.window} has {group.manager.num_tokens} tokens, the cache "
                f"{self.step_end}"
            )
        counts = set(self.tokens.values()) - {0}
        assert counts <= {self.step_end, self.step_start}, (
            f"layers hold {sorted(counts)} tokens, but the last step went from {self.step_start} to "
            f"{self.step_end}"
        )

    # --- inside ---------------------------------------------------------------------------------------------

    def _check_in_step(self, layer_idx: int, start: int) -> None:
        """A new step may only begin when every layer has finished the last one."""
        if start != self.step_end:
            held = self.step_end
            if self.is_next_in_step(layer_idx):
                self.abort_step()
            raise CacheMismatchError(
                f"layer {layer_idx} holds {start} tokens per row while the cache holds {held}: every layer "
                "must be updated in every forward, with the same number of tokens. `cache.reset()` starts "
                "anew"
            )
        if not start:
            return
        # Layers that a model never writes hold nothing; layers after the last one written were not reached.
        last = -1 if self._last_written is None else self._last_written
        behind = [
            index for index, count in self.tokens.items() if count != start and (count or index > last >= 0)
        ]
        if behind:
            first = behind[0]
            held = self.tokens[first]
            self.abort_step()
            raise CacheMismatchError(
                f"layer {layer_idx} is written again while layer {first} holds {held} tokens per row, not "
                f"{start}. Either a forward was interrupted: it is taken back now, so call the model again. "
                "Or self- and cross-attention write to one cache: an encoder-decoder model needs "
                "`EncoderDecoderCache(PagedCache(model), DynamicCache())`"
            )

    def _open_rows(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch, new_tokens = key_states.shape[0], key_states.shape[2]
        capacity = self._capacity_blocks(batch, new_tokens, key_states, value_states)
        if any(group.num_blocks < capacity[window] for window, group in self._groups.items()):
            for group in self.groups:
                group.grow(max(group.num_blocks, capacity[group.window]))
        if not self._groups:
            for window in capacity:
                specs = {index: spec for index, spec in self._specs.items() if spec.window == window}
                self._groups[window] = LayerGroup(
                    window,
                    specs,
                    num_blocks=capacity[window],
                    block_size=self.config.block_size,
                    row_blocks=-(-(self.config.max_tokens or self._max_positions) // self.config.block_size),
                )
        for group in self.groups:
            group.manager.start(batch)
            group.sync_tables()
        self.batch = batch

    def _capacity_blocks(
        self,
        batch: int,
        new_tokens: int,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
    ) -> dict[int | None, int]:
        """Blocks of each group: as asked for, or the model's length for every row, cut to the memory."""
        size = self.config.block_size
        full = self._full_blocks(batch)
        wanted = {
            window: full if window is None else min(full, batch * self._window_blocks(window, new_tokens))
            for window in dict.fromkeys(spec.window for spec in self._specs.values())
        }
        if self.config.max_tokens is not None:
            return wanted
        per_token = (
            key_states.shape[1] * (key_states.shape[3] + value_states.shape[3]) * key_states.element_size()
        )
        layers = {window: sum(spec.window == window for spec in self._specs.values()) for window in wanted}
        wanted_bytes = sum(blocks * layers[window] * size * per_token for window, blocks in wanted.items())
        budget = self.config.gpu_memory_utilization * free_memory_bytes(key_states.device)
        if wanted_bytes <= budget:
            return wanted
        return {window: max(1, int(blocks * budget / wanted_bytes)) for window, blocks in wanted.items()}

    def _full_blocks(self, batch: int) -> int:
        """Blocks that hold the capacity however its tokens are spread over the rows."""
        size = self.config.block_size
        if self.config.max_tokens is None:
            return batch * -(-self._max_positions // size)
        return (self.config.max_tokens + batch * (size - 1)) // size

    def _ceiling_blocks(self, group: LayerGroup) -> int:
        """Blocks that a group may have: what full rows take, cut to the memory.

        A pool is sized for the rows it starts with. Rows that were repeated, and windows that are kept for a
        roll-back, can want more than that, up to what was asked for.
        """
        full = self._full_blocks(self.batch)
        block_bytes = sum(pool.bytes_per_block for pool in group.pools)
        if self.config.max_tokens is not None or not block_bytes:
            return full
        budget = self.config.gpu_memory_utilization * free_memory_bytes(group.pools[0].shape.device)
        return min(full, int(budget / block_bytes))

    def _window_blocks(self, window: int, new_tokens: int) -> int:
        """Blocks a row of a window layer holds: the old window, the new one, the edges of both."""
        size = self.config.block_size
        kept = -(-window // size) + 1
        return 2 * kept + (-(-new_tokens // size) if self.record_past else 0)

    def _reserve(self, start: int, new_tokens: int) -> None:
        keep = self.record_past
        for group in self.groups:
            self._make_room(group, start, new_tokens)
        for group in self.groups:
            reservation = group.manager.reserve(new_tokens, keep_history=keep)
            assert reservation is not None, "room was checked for every group before any was reserved"
            group.apply(reservation)

    def _make_room(self, group: LayerGroup, start: int, new_tokens: int) -> None:
        """Raise unless the group can take the new tokens, growing it where its rows have become more."""
        pool = group.manager.pool
        needed = group.manager.blocks_needed(new_tokens, keep_history=self.record_past)
        if pool.can_allocate(needed):
            return
        free = pool.num_free + pool.num_pending
        missing = needed - free
        grown = min(max(2 * group.num_blocks, group.num_blocks + missing), self._ceiling_blocks(group))
        if grown - group.num_blocks >= missing:
            group.grow(grown)
            return
        raise PoolExhausted(
            f"{new_tokens} new tokens for {self.batch} rows need {needed} blocks of "
            f"{self.config.block_size} tokens, and {free} of {group.num_blocks} are free; nothing was "
            "written. Ways out: a larger `PagedCache(..., max_tokens=...)` (now "
            f"{group.num_blocks * self.config.block_size} tokens over all rows), `cache.crop(...)`, "
            "`cache.reset()`, or a smaller batch",
            needed_blocks=needed,
            free_blocks=free,
            block_size=self.config.block_size,
        )

    def _crop_to(self, num_tokens: int) -> None:
        if not num_tokens:
            self.reset()
            return
        self.check_crop(self.step_end - num_tokens)
        for group in self.groups:
            group.manager.crop(num_tokens)
        self.tokens = {index: min(count, num_tokens) for index, count in self.tokens.items()}
        self.step_start = self.step_end = num_tokens
        self._last_written = None
