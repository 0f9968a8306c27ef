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

from collections.abc import Callable, Sequence

import torch

from . import calls, static
from .capacity import Capacity
from .config import PagedCacheConfig
from .errors import (
    CacheMismatchError,
    PagedCacheError,
    PoolExhausted,
    QuantisationError,
    UnstorableValueError,
)
from .group import LayerGroup
from .guard import KeyErrorGuard
from .kernels.problem import LayerBlocks
from .kv_pool import PoolShape
from .padding import NO_PADDING, Forward, Padding
from .precision import Precision
from .spec import LayerSpec
from .static import StaticGroup


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
        is_attended: Tells whether attention of this package reads the cache now.
        can_be_static: Whether the model's layers and the settings allow compiled steps.
        is_static: Whether steps can be compiled: every row has its blocks from the start. Then `tokens`,
            `step_start` and `step_end` are what they were at the last `pull`.
        has_open_step: Some layer of static rows has yet to join the step in progress.
        blocks: Layer index -> where its K and V lie; filled as layers get their first.
        precision: How layers are stored; settled when rows begin.
        padding: What is remembered of rows that begin with padding.
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
        self.is_attended: Callable[[], bool] = lambda: False
        self.can_be_static = False
        self.is_static = False
        self.has_open_step = False
        self.padding = NO_PADDING
        self._noted: tuple[int, int, torch.Tensor | None] | None = None
        self._specs = specs
        self._capacity = Capacity(config, specs, max_positions)
        self._last_written: int | None = None
        self._groups: dict[int | None, LayerGroup] = {}
        # After the groups, so that a deep copy finds the copies that they have made.
        self.blocks: dict[int, LayerBlocks] = {}
        self.precision = Precision.of(config, specs, 0)
        guard = config.key_error_guard
        self._guard = None if guard == "off" else KeyErrorGuard(raises=guard == "error")

    @property
    def groups(self) -> list[LayerGroup]:
        """The groups, in the order of their first layers; empty before the first update."""
        return list(self._groups.values())

    def group_of(self, layer_idx: int) -> LayerGroup:
        """The group that a layer belongs to (only after the first update)."""
        return self._groups[self._specs[layer_idx].window]

    def layer_dtypes(self) -> dict[int, str]:
        """Layer index -> name of the format that it is stored in now."""
        formats = dict(self.precision.formats)
        for group in self.groups:
            formats.update(group.formats)
        return {index: "auto" if form is None else form.name for index, form in formats.items()}

    # --- the step -------------------------------------------------------------------------------------------

    def begin_step(self, layer_idx: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Reserve room for the new tokens in every group, all or nothing.

        Raises:
            CacheMismatchError: The layers do not advance together, or the mask or the positions of rows that
                begin with padding do not go on as they began.
            PoolExhausted: Too few blocks. Nothing was written, nothing changed.
            QuantisationError: The guard found K of a layer unfit for its format. Nothing changed.
            UnstorableValueError: An earlier step gave a quantised layer on a GPU what cannot be stored.
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
            padding = self._padding_after(start, key_states)
            more = padding.tokens if padding.is_left_out and padding.tokens != self.padding.tokens else ()
            self._reserve(start, new_tokens, more)
        except (CacheMismatchError, PoolExhausted, QuantisationError, UnstorableValueError):
            self.broken = self.has_host_states
            if not start:
                self.reset()
            raise
        self.padding = padding
        self.step_start, self.step_end = start, start + new_tokens
        self.has_open_step = self.is_static

    def note_mask(self, start: int, new_tokens: int, mask: torch.Tensor | None) -> None:
        """Hear of the mask of a forward before any layer runs.

        Args:
            start: Tokens per row before it.
            new_tokens: That it brings.
            mask: `[batch, tokens]`, nonzero where a token is real; None if all are.

        Raises:
            CacheMismatchError: It shows padding that is not stored.
        """
        self._noted = start, new_tokens, mask
        if start and self.padding.tokens:
            device = torch.device("cpu") if mask is None else mask.device
            self.padding.check_mask(
                Forward(start, start + new_tokens, self.batch, mask, device, calls.current())
            )

    def check_static_room(self, tokens: int) -> None:
        """Raise PoolExhausted if static rows cannot have so many tokens."""
        if tokens > self.row_capacity_tokens:
            raise self._no_room(tokens, self.row_capacity_tokens, self.batch)

    def check_room(self, new_tokens: int) -> None:
        """Raise PoolExhausted if a forward of so many tokens would, before any layer has run."""
        for group in self.groups if self.batch else ():
            self._make_room(group, self.step_end, new_tokens)

    def pull(self) -> None:
        """Learn how far compiled steps have come; waits for the device. Nothing to do without static rows.

        Raises:
            PoolExhausted: They went on when rows were full, so their last results are no numbers.
        """
        if not (self.is_static and self.batch):
            return
        length = max(group.pull_length() for group in self.groups if isinstance(group, StaticGroup))
        if length != self.step_end:
            self.tokens = {
                index: length if count == self.step_end else count for index, count in self.tokens.items()
            }
            self.step_start = self.step_end = length
        capacity = self.row_capacity_tokens
        if length > capacity:
            raise PoolExhausted(
                f"compiled steps have fed {length} tokens per row, and a row holds {capacity}; what they "
                "returned since is NaN. `cache.reset()`, and make the cache with a larger `max_tokens` "
                "(over all rows)",
                needed_blocks=-(-length // self.config.block_size),
                free_blocks=0,
                block_size=self.config.block_size,
            )

    def would_be_static(self, device: torch.device) -> bool:
        """Whether rows on a device are, or will be, static."""
        return self.is_static or (
            not self._groups and self.can_be_static and device.type in static.DEVICES and self.is_attended()
        )

    @property
    def row_capacity_tokens(self) -> int:
        """Tokens that a static row can hold."""
        return min(group.capacity_tokens for group in self.groups if isinstance(group, StaticGroup))

    def written(self, layer_idx: int) -> None:
        """Note that a layer holds the tokens of this step."""
        self.tokens[layer_idx] = self.step_end
        self._last_written = layer_idx
        if self.is_static:
            self.has_open_step = any(
                self.tokens[index] != self.step_end
                for group in self.groups
                if isinstance(group, StaticGroup)
                for index in group.static_blocks
            )

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
        blocks = self.group_of(layer_idx).claim(layer_idx, key_states, value_states)
        self.blocks[layer_idx] = blocks
        return blocks

    # --- what a user does between forwards ------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens of every row; more than there are forgets all."""
        if tokens_to_remove and self.step_end:
            self._crop_to(max(0, self.step_end - tokens_to_remove))
        if self.record_past:
            # What a rejected draft could have needed is settled now.
            for group in self.groups:
                group.release_outside_window()

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise what `crop` would raise; changes nothing."""
        num_tokens = self.step_end - tokens_to_remove
        try:
            for group in self.groups if num_tokens > 0 else ():
                group.check_crop(num_tokens)
        except ValueError as error:
            raise PagedCacheError(
                f"cannot crop to {num_tokens} tokens: {error}. Call `cache.activate_past_recording()` before "
                "the forwards that may be rolled back"
            ) from error

    def reorder(self, row_indices: Sequence[int]) -> None:
        """Make the rows copies of the given old rows, by reference; their number may change."""
        if not self.batch:
            return
        self.pull()
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
        self.padding = self.padding.reorder(rows)

    def reset(self) -> None:
        """Forget all rows and give their blocks back; pools stay."""
        for group in self.groups:
            group.reset()
        self.tokens = dict.fromkeys(self.tokens, 0)
        self.batch = self.step_start = self.step_end = 0
        self.has_open_step = False
        self._last_written = None
        self.padding, self._noted = NO_PADDING, None

    def check_integrity(self) -> None:
        """Raise an AssertionError if blocks were lost or the layers disagree."""
        for group in self.groups:
            group.manager.check_integrity()
            if group.dense is not None:
                group.dense.check_integrity(table.ids for table in group.manager.tables)
            assert group.num_tokens in (self.step_end, 0), (
                f"the group of window {group.window} has {group.num_tokens} tokens, the cache {self.step_end}"
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
        precision = Precision.of(self.config, self._specs, new_tokens)
        if precision != self.precision:
            # Pools of another format are of no use any more.
            self.precision = precision
            self._groups.clear()
            self.blocks.clear()
        if not self._groups:
            self.is_static = self.would_be_static(key_states.device)
        capacity = self._capacity.wanted_blocks(
            batch,
            new_tokens,
            PoolShape.of(key_states, value_states),
            precision,
            keep_history=self.record_past,
            is_static=self.is_static,
        )
        if self.is_static:
            self._fit_static_rows(batch, new_tokens, capacity)
        elif any(group.num_blocks < capacity[window] for window, group in self._groups.items()):
            for group in self.groups:
                group.grow(max(group.num_blocks, capacity[group.window]))
        for window in () if self._groups else tuple(capacity):
            specs = {index: spec for index, spec in self._specs.items() if spec.window == window}
            size, num_blocks = self.config.block_size, capacity[window]
            self._groups[window] = (
                StaticGroup(
                    window, specs, num_blocks=num_blocks, block_size=size, row_blocks=num_blocks // batch
                )
                if self.is_static
                else LayerGroup(
                    window,
                    specs,
                    num_blocks=num_blocks,
                    block_size=size,
                    row_blocks=self._capacity.row_blocks,
                    precision=precision,
                    guard=self._guard,
                )
            )
        for group in self.groups:
            group.start(batch)
        self.batch = batch

    def _fit_static_rows(self, batch: int, new_tokens: int, capacity: dict[int | None, int]) -> None:
        """Share the pools out evenly over the rows, in the groups that there are."""
        for group in self.groups:  # what they have counts as free memory no more
            capacity[group.window] = max(capacity[group.window], group.num_blocks)
        row_blocks = min(capacity.values()) // batch
        if new_tokens > row_blocks * self.config.block_size:
            raise self._no_room(new_tokens, row_blocks * self.config.block_size, batch)
        capacity.update(dict.fromkeys(capacity, row_blocks * batch))
        for group in self.groups:
            assert isinstance(group, StaticGroup), "a cache is static from its first update on, or never"
            group.resize(row_blocks, row_blocks * batch)

    def _padding_after(self, start: int, key_states: torch.Tensor) -> Padding:
        """What is to be remembered of padding when the new tokens are stored."""
        batch, _, new_tokens, _ = key_states.shape
        noted, self._noted = self._noted, None
        if torch.compiler.is_compiling() or (start and not self.padding.tokens):
            return self.padding
        is_noted = noted is not None and noted[:2] == (start, new_tokens)
        mask = noted[2] if is_noted and noted is not None else None
        if is_noted and mask is None and not start:
            return NO_PADDING
        call = calls.current()
        if not is_noted and call.attention_mask is not None and call.attention_mask.dim() == 2:
            mask = call.attention_mask
        if mask is not None and (mask.shape[0] != batch or mask.shape[1] < start + new_tokens):
            mask = None
        forward = Forward(start, start + new_tokens, batch, mask, key_states.device, call)
        if start and not is_noted:
            self.padding.check_call(forward)
        return self.padding.after(
            forward, self.config.block_size, is_left_out=is_noted and not self.is_static
        )

    def _reserve(self, start: int, new_tokens: int, padding: Sequence[int]) -> None:
        keep = self.record_past
        for group in self.groups:
            group.check_faults()
            self._make_room(group, start, new_tokens, padding)
        for group in self.groups:
            group.check_full(new_tokens)
            group.seal_full(new_tokens)
        for group in self.groups:
            group.reserve(new_tokens, keep_history=keep, padding=padding)

    def _make_room(self, group: LayerGroup, start: int, new_tokens: int, padding: Sequence[int] = ()) -> None:
        """Raise unless the group can take the new tokens, growing it where its rows have become more."""
        if isinstance(group, StaticGroup):
            if start + new_tokens > group.capacity_tokens:
                raise self._no_room(start + new_tokens, group.capacity_tokens, self.batch)
            return
        pool = group.manager.pool
        keep = self.record_past
        needed = group.manager.blocks_needed(new_tokens, keep_history=keep, padding=padding)
        if pool.can_allocate(needed):
            return
        free = pool.num_free + pool.num_pending
        missing = needed - free
        grown = min(
            max(2 * group.num_blocks, group.num_blocks + missing),
            self._capacity.ceiling_blocks(group.pools, self.batch),
        )
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

    def _no_room(self, tokens: int, capacity: int, rows: int) -> PoolExhausted:
        """What to raise when static rows cannot be that long."""
        size = self.config.block_size
        return PoolExhausted(
            f"{tokens} tokens in each of {rows} rows: with compile=True every row has the same share of the "
            f"pool, here {capacity} tokens; nothing was written. Ways out: `PagedCache(..., "
            f"max_tokens={tokens * rows})` or more, a smaller batch, `cache.crop(...)`, `cache.reset()`",
            needed_blocks=rows * -(-tokens // size),
            free_blocks=0,
            block_size=size,
        )

    def _crop_to(self, num_tokens: int) -> None:
        if not num_tokens:
            self.reset()
            return
        self.check_crop(self.step_end - num_tokens)
        for group in self.groups:
            group.crop(num_tokens)
        self.tokens = {index: min(count, num_tokens) for index, count in self.tokens.items()}
        self.step_start = self.step_end = num_tokens
        self.has_open_step = False
        self._last_written = None
        self.padding, self._noted = self.padding.crop(num_tokens), None
