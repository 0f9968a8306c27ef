"""All layer groups of one cache: opened, reserved, cut and moved together, all of them or none."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_paged_cache.config import LayerSpec, PagedCacheConfig
from hf_paged_cache.errors import PoolExhausted
from hf_paged_cache.forward.step import Step
from hf_paged_cache.kernels.call import LayerBlocks

from .capacity import Capacity
from .key_guard import KeyErrorGuard
from .layer_group import LayerGroup
from .pool import PoolShape
from .precision import Precision
from .saved import SavedCache
from .static_group import StaticGroup
from .store import Saved, Store


class LayerGroups:
    """The groups of a cache, by window. There are none before the first update.

    Args:
        config: Settings.
        specs: Layer index -> what the config of the model says of that layer.
        max_positions: Longest sequence the model was made for, if its config says.

    Attributes:
        store: Blocks and tensors, shared with the caches that were forked from this one.
        precision: How layers are stored; settled when rows begin.
        is_static: Whether every row has its blocks from the start.
        blocks: Layer index -> where its K and V lie; filled as layers get their first.
    """

    def __init__(
        self, config: PagedCacheConfig, specs: dict[int, LayerSpec], max_positions: int | None
    ) -> None:
        self.store = Store()
        self.precision = Precision.of(config, specs, 0)
        self.is_static = False
        self.blocks: dict[int, LayerBlocks] = {}
        self._config = config
        self._specs = specs
        self._capacity = Capacity(config, specs, max_positions)
        self._by_window: dict[int | None, LayerGroup] = {}
        guard = config.key_error_guard
        self._guard = None if guard == "off" else KeyErrorGuard(raises=guard == "error")

    @property
    def all(self) -> list[LayerGroup]:
        """The groups, in the order of their first layers."""
        return list(self._by_window.values())

    @property
    def specs(self) -> dict[int, LayerSpec]:
        """Layer index -> what the config of the model says of that layer."""
        return self._specs

    @property
    def static(self) -> list[StaticGroup]:
        """Those whose rows have all their blocks."""
        return [group for group in self.all if isinstance(group, StaticGroup)]

    @property
    def row_capacity_tokens(self) -> int:
        """Tokens that a static row can hold."""
        return min(group.capacity_tokens for group in self.static)

    def of(self, layer_idx: int) -> LayerGroup:
        """The group that a layer belongs to (only when there are groups)."""
        return self._by_window[self._specs[layer_idx].window]

    def layer_dtypes(self) -> dict[int, str]:
        """Layer index -> name of the format that it is stored in now."""
        formats = dict(self.precision.formats)
        for group in self.all:
            formats.update(group.formats)
        return {index: "auto" if form is None else form.name for index, form in formats.items()}

    def moved_layers(self) -> dict[int, str]:
        """Layer index -> name of the format it was to have, of layers that the guard gave another."""
        asked, now = self.precision.formats, self.layer_dtypes()
        names = {index: "auto" if form is None else form.name for index, form in asked.items()}
        return {index: name for index, name in names.items() if name != now[index]}

    def bytes_by_format(self) -> dict[str, int]:
        """Format -> bytes of K and V in blocks that hold tokens; `auto` is the model's dtype."""
        total: Counter[str] = Counter()
        for group in self.all:
            total.update(group.bytes_by_format())
        return dict(total)

    # --- rows -----------------------------------------------------------------------------------------------

    def open_rows(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *,
        keep_history: bool,
        would_be_static: Callable[[torch.device], bool],
    ) -> None:
        """Begin with empty rows for K and V of this shape, in groups that are made if there are none.

        Raises:
            PoolExhausted: Static rows cannot be that long.
        """
        batch, new_tokens = key_states.shape[0], key_states.shape[2]
        self.adapt(new_tokens)
        if not self._by_window:
            self.is_static = would_be_static(key_states.device)
        capacity = self._capacity.wanted_blocks(
            batch,
            new_tokens,
            PoolShape.of(key_states, value_states),
            self.precision,
            keep_history=keep_history,
            is_static=self.is_static,
        )
        if self.is_static:
            self._fit_static_rows(batch, new_tokens, capacity)
        elif any(group.num_blocks < capacity[window] for window, group in self._by_window.items()):
            for group in self.all:
                if group.can_grow:
                    group.grow(max(group.num_blocks, capacity[group.window]))
        for window in () if self._by_window else tuple(capacity):
            self._by_window[window] = self._new_group(window, capacity[window], batch)
        for group in self.all:
            group.start(batch)

    def adapt(self, prompt_tokens: int) -> None:
        """Without rows: settle how those are stored that begin with so many tokens. Other pools go."""
        precision = Precision.of(self._config, self._specs, prompt_tokens)
        if precision != self.precision:
            self.precision = precision
            self.clear()

    def clear(self) -> None:
        """Forget the groups with their rows; the next ones may be stored in other formats."""
        self.reset()
        self._by_window.clear()
        self.blocks = {}
        if self.store.num_caches <= 1:
            self.store = Store()

    def claim(self, layer_idx: int, key_states: torch.Tensor, value_states: torch.Tensor) -> LayerBlocks:
        """Give a layer its place in a pool."""
        blocks = self.of(layer_idx).claim(layer_idx, key_states, value_states)
        self.blocks[layer_idx] = blocks
        return blocks

    def reserve(
        self,
        batch: int,
        start: int,
        new_tokens: int,
        *,
        keep_history: bool,
        padding: Sequence[int] = (),
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        """Make room for new tokens of every row, in all groups.

        Args:
            batch: Rows.
            start: Tokens of every row.
            new_tokens: That come.
            keep_history: Windows keep what they would drop.
            padding: Of every row, leading tokens that need not be stored; empty if there are no more.
            let_go: Called when what is not needed any more was given back; only what follows can be undone.

        Raises:
            PoolExhausted: Too few blocks. Nothing was written, nothing changed.
            QuantizationError: The guard found K of a layer unfit for its format. Nothing changed.
            UnstorableValueError: An earlier step gave a quantized layer on a GPU what cannot be stored.
        """
        for group in self.all:
            group.check_faults()
            if new_tokens == 1 and not keep_history:
                self.give_back_chunk(group)
            self.make_room(group, batch, start, new_tokens, keep_history=keep_history, padding=padding)
        for group in self.all:
            group.check_full(new_tokens)
            group.seal_full(new_tokens)
        for group in self.all:
            group.let_go(new_tokens, keep_history=keep_history, padding=padding)
        let_go()
        for group in self.all:
            group.reserve(new_tokens, keep_history=keep_history, padding=padding)

    def make_room(
        self,
        group: LayerGroup,
        batch: int,
        start: int,
        new_tokens: int,
        *,
        keep_history: bool,
        padding: Sequence[int] = (),
    ) -> None:
        """Raise unless a group can take the new tokens, growing it where its rows have become more."""
        if isinstance(group, StaticGroup):
            if start + new_tokens > group.capacity_tokens:
                raise self.no_static_room(start + new_tokens, group.capacity_tokens, batch)
            return
        group.section.collect()  # first: a block that only a dropped cache shares need not be copied
        needed = group.manager.blocks_needed(new_tokens, keep_history=keep_history, padding_tokens=padding)
        if self.provide(group, needed):
            return
        pool = group.manager.pool
        free = pool.num_free + pool.num_pending
        raise self._no_room(group, batch, new_tokens, needed, free)

    def give_back_chunk(self, group: LayerGroup) -> None:
        """Have a window's pool as small again as decode steps need it, after a chunk made it grow."""
        if group.window is None or isinstance(group, StaticGroup):
            return
        num_blocks = group.manager.batch * self._capacity.window_blocks(group.window)
        if num_blocks >= group.num_blocks:
            return
        group.section.collect()
        # As the reservation of the next token would, which comes after this.
        group.release_outside_window()
        if group.manager.pool.num_referenced <= num_blocks:
            group.shrink(num_blocks)

    def check_room_for(self, start: int, new_tokens: int, batch: int) -> None:
        """Raise PoolExhausted unless rows that are cropped to `start` tokens can take so many after that."""
        for group in self.all:
            group.section.collect()
            needed = group.manager.blocks_after_crop(start, new_tokens)
            if not self.provide(group, needed):
                pool = group.manager.pool
                raise self._no_room(group, batch, new_tokens, needed, pool.num_free + pool.num_pending)

    def provide(self, group: LayerGroup, needed: int, at_least: int = 0) -> bool:
        """Have so many blocks free, growing a group up to the capacity for its rows; False if it cannot.

        Args:
            group: The group.
            needed: Blocks.
            at_least: Blocks that it may have in any case.
        """
        group.section.collect()
        pool = group.manager.pool
        missing = needed - pool.num_free - pool.num_pending
        if missing <= 0:
            return True
        rows = sum(member.manager.batch for member in group.section.members)
        grown = min(
            max(
                self._capacity.grown_blocks(group.num_blocks, group.window, rows, group.pools),
                group.num_blocks + missing,
            ),
            max(self._capacity.ceiling_blocks(group.window, group.pools, rows), at_least),
        )
        if grown - group.num_blocks < missing or not group.can_grow:
            return False
        group.grow(grown)
        return True

    def set_step(self, step: Step | None) -> None:
        """Note the step in progress: as long as its forward runs, tensors have to stay where they are."""
        for group in self.all:
            group.step = step

    def would_seal(self, new_tokens: int) -> bool:
        """Whether blocks are encoded, for all of their layers, when so many tokens come."""
        return any(
            group.dense is not None and group.dense.full(group.manager, new_tokens) for group in self.all
        )

    def crop(self, num_tokens: int) -> None:
        """Cut every row down to its first tokens."""
        for group in self.all:
            group.crop(num_tokens)

    def check_crop(self, num_tokens: int) -> None:
        """Raise a ValueError if rows cannot be cut to so many tokens; changes nothing."""
        for group in self.all if num_tokens > 0 else ():
            group.check_crop(num_tokens)

    def release_outside_window(self) -> None:
        """Give back what was only kept for a roll-back."""
        for group in self.all:
            group.release_outside_window()

    def reorder(self, row_indices: Sequence[int]) -> None:
        """Make the rows copies of the given old rows, by reference."""
        for group in self.all:
            group.reorder(row_indices)

    def reset(self) -> None:
        """Forget all rows and give their blocks back; pools stay."""
        for group in self.all:
            group.reset()
            group.step = None

    def pull_length(self) -> int:
        """Tokens of static rows, asked of the device."""
        return max(group.pull_length() for group in self.static)

    def check_integrity(self) -> None:
        """Raise an AssertionError if blocks were lost, over all caches of the store."""
        with self.store.lock:
            self.store.collect()
            for group in self.all:
                others = [
                    table.ids
                    for member in group.section.members
                    if member is not group
                    for table in member.manager.tables
                ]
                group.manager.check_integrity(others)
                if group.dense is not None:
                    group.dense.check_integrity(group.manager)

    def fork(self) -> LayerGroups:
        """The same rows for another cache, by sharing their blocks."""
        twin = self._copy(self.store, {window: group.fork() for window, group in self._by_window.items()})
        for group in twin.all:
            self._prepare_to_share(group)
        return twin

    def _prepare_to_share(self, group: LayerGroup) -> None:
        """Enlarge pools for one more cache, now that they may move: not while another thread is writing.

        On a GPU that is put off until it is needed, except for windows, whose pools are small.
        """
        is_cpu = all(pool.shape.device.type == "cpu" for pool in group.pools)
        if not group.can_grow or not group.pools or not (is_cpu or group.window is not None):
            return
        rows = sum(max(1, member.manager.batch) for member in group.section.members)
        wanted = self._capacity.shared_blocks(group.window, group.pools, rows)
        if wanted > group.num_blocks:
            ceiling = self._capacity.ceiling_blocks(group.window, group.pools, rows)
            group.grow(max(wanted, min(2 * group.num_blocks, ceiling)))

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerGroups:
        """The same rows in blocks of their own."""
        with self.store.lock:
            twin = self._copy(Store(), copy.deepcopy(self._by_window, memo))
        for window, group in twin._by_window.items():
            twin.store.put(window, group.section)
        memo[id(self)] = twin
        return twin

    def beside(self, saved: SavedCache | None = None, first_tokens: int = 0) -> LayerGroups:
        """Groups with saved contents, or none, beside these, which stay as they are. Part of a change.

        They take blocks of the same store if enough are free there, otherwise they have one of their own.

        Args:
            saved: Checked contents, with rows.
            first_tokens: Of the prompt by which formats were chosen.

        Raises:
            PoolExhausted: A pool for so many rows cannot hold them.
        """
        twin = copy.copy(self)
        twin._by_window, twin.blocks = {}, {}
        if saved is None:
            return twin
        needed = {group.window: group.num_blocks for group in saved.groups}
        for group in self.all:
            group.section.collect()
        if not all(group.manager.pool.can_allocate(needed[group.window]) for group in self.all):
            twin.store = Store()
        twin._fill(saved, first_tokens, needed, {group.window: group.num_blocks for group in self.all})
        return twin

    def _fill(
        self,
        saved: SavedCache,
        first_tokens: int,
        needed: dict[int | None, int],
        before: dict[int | None, int],
    ) -> None:
        layer = next(layer for group in saved.groups for layer in group.layers.values())
        keys, values = (
            side.new_empty(1).expand(saved.batch, side.shape[1], first_tokens, side.shape[3])
            for side in (layer.keys, layer.values)
        )
        self.open_rows(keys, values, keep_history=saved.record_past, would_be_static=lambda device: False)
        for part in saved.groups:
            group, count = self._by_window[part.window], needed[part.window]
            # With more history than its windows need, it may want more than they do. And what a pool of this
            # cache had room for, made for more rows maybe, another one takes as well.
            if not self.provide(group, count, before.get(part.window, 0)):
                free = group.manager.pool.num_free + group.manager.pool.num_pending
                raise PoolExhausted(
                    f"state_dict holds {count} blocks of {group.block_size} tokens, and the pool has {free} "
                    "free ones; make the cache with a larger `max_tokens`. The cache is as it was",
                    needed_blocks=count,
                    free_blocks=free,
                    block_size=group.block_size,
                )
            group.import_(part, saved.length)
            self.blocks.update({index: group.blocks_of(index) for index in group.claimed})

    def save(self) -> Saved:
        """Remember all that a change can change, but for what lies in blocks."""
        attributes = dict(vars(self))
        by_window, blocks = dict(self._by_window), dict(self.blocks)
        saved = [group.save() for group in self.all]

        def restore() -> None:
            vars(self).update(attributes | {"_by_window": dict(by_window), "blocks": dict(blocks)})
            for each in saved:
                each.restore()

        def follow() -> None:
            for each in saved:
                each.follow()

        return Saved(restore, follow)

    # --- inside ---------------------------------------------------------------------------------------------

    def _copy(self, store: Store, groups: dict[int | None, LayerGroup]) -> LayerGroups:
        twin = copy.copy(self)
        twin.store, twin._by_window = store, groups
        twin.blocks = {index: group.blocks_of(index) for group in groups.values() for index in group.claimed}
        return twin

    def _new_group(self, window: int | None, num_blocks: int, batch: int) -> LayerGroup:
        specs = {index: spec for index, spec in self._specs.items() if spec.window == window}
        grows = window is None and not self._capacity.is_asked_for and not self.is_static
        section = self.store.section(window, num_blocks, grows=grows)
        size = self._config.block_size_of(window)
        if self.is_static:
            return StaticGroup(window, specs, section, block_size=size, row_blocks=num_blocks // batch)
        return LayerGroup(
            window,
            specs,
            section,
            block_size=size,
            row_blocks=self._capacity.row_blocks(size),
            precision=self.precision,
            guard=self._guard,
        )

    def _fit_static_rows(self, batch: int, new_tokens: int, capacity: dict[int | None, int]) -> None:
        """Share the pools out evenly over the rows, in the groups that there are."""
        for group in self.all:  # what they have counts as free memory no more
            capacity[group.window] = max(capacity[group.window], group.num_blocks)
        sizes = {window: self._config.block_size_of(window) for window in capacity}
        row_tokens = min(blocks // batch * sizes[window] for window, blocks in capacity.items())
        if new_tokens > row_tokens:
            raise self.no_static_room(new_tokens, row_tokens, batch)
        row_blocks = {window: -(-row_tokens // size) for window, size in sizes.items()}
        capacity.update({window: batch * blocks for window, blocks in row_blocks.items()})
        for group in self.static:
            group.resize(row_blocks[group.window], capacity[group.window])

    def _no_room(
        self, group: LayerGroup, batch: int, new_tokens: int, needed: int, free: int
    ) -> PoolExhausted:
        size, caches = group.block_size, len(group.section.members)
        shared = f", which {caches} caches share" if caches > 1 else ""
        return PoolExhausted(
            f"{new_tokens} new tokens for {batch} rows need {needed} blocks of {size} tokens, and {free} of "
            f"{group.num_blocks} are free{shared}; nothing was written. Ways out: a larger "
            f"`PagedCache(..., max_tokens=...)` (now {group.num_blocks * size} tokens over all rows), "
            "`cache.crop(...)`, `cache.reset()`, or a smaller batch",
            needed_blocks=needed,
            free_blocks=free,
            block_size=size,
        )

    def no_static_room(self, tokens: int, capacity: int, rows: int) -> PoolExhausted:
        """What to raise when static rows cannot be that long."""
        size = self._config.block_size
        return PoolExhausted(
            f"{tokens} tokens in each of {rows} rows: with compile=True every row has the same share of the "
            f"pool, here {capacity} tokens; nothing was written. Ways out: `PagedCache(..., "
            f"max_tokens={tokens * rows})` or more, a smaller batch, `cache.crop(...)`, `cache.reset()`",
            needed_blocks=rows * -(-tokens // size),
            free_blocks=0,
            block_size=size,
        )
