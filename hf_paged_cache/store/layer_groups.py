"""All layer groups of one cache: opened, reserved, cut and moved together, all of them or none."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from hf_paged_cache.errors import PoolExhausted
from hf_paged_cache.formats import format_name

from .capacity import Capacity
from .layer_group import LayerGroup
from .pool_tensors import NewTokens, PoolShape
from .precision import Precision
from .saved import SavedCache
from .store import Saved, Store
from .window_store import RunningStep, WindowStore

if TYPE_CHECKING:
    from hf_paged_cache.config import PagedCacheConfig
    from hf_paged_cache.host.architectures import LayerSpec
    from hf_paged_cache.kernels.call import LayerBlocks

    from .static_group import StaticGroup


class LayerGroups:
    """The groups of a cache, by window. There are none before the first update."""

    def __init__(
        self, config: PagedCacheConfig, specs: dict[int, LayerSpec], max_positions: int | None
    ) -> None:
        self.specs = specs  # by layer index
        self.store = Store()  # shared with the caches that were forked from this one
        self.precision = Precision.of(config, specs, 0)  # settled when rows begin
        self.is_static = False  # every row has its blocks from the start
        self.blocks: dict[int, LayerBlocks] = {}  # by layer index; filled as layers get their first K and V
        self._config = config
        self._capacity = Capacity(config, specs, max_positions)
        self._by_window: dict[int | None, LayerGroup] = {}

    @property
    def all(self) -> list[LayerGroup]:
        """The groups, in the order of their first layers."""
        return list(self._by_window.values())

    @property
    def static(self) -> list[StaticGroup]:
        """All of them where rows have all their blocks, otherwise none."""
        return cast("list[StaticGroup]", self.all) if self.is_static else []

    @property
    def row_capacity_tokens(self) -> int:
        """Tokens that a static row can hold."""
        return min(group.capacity_tokens for group in self.static)

    def of(self, layer_idx: int) -> LayerGroup:
        """The group that a layer belongs to (only when there are groups)."""
        return self._by_window[self.specs[layer_idx].window]

    def static_of(self, layer_idx: int) -> StaticGroup | None:
        """The same where rows have all their blocks; None if they have not, or there are none."""
        return cast("StaticGroup", self.of(layer_idx)) if self.is_static and self._by_window else None

    def layer_dtypes(self) -> dict[int, str]:
        """Layer index -> name of the format that it is stored in now."""
        now = {index: each for group in self.all for index, each in group.formats.items()}
        return {index: format_name(each) for index, each in (self.precision.formats | now).items()}

    def moved_layers(self) -> dict[int, str]:
        """Layer index -> name of the format it was to have, of layers that the guard gave another."""
        now, asked = self.layer_dtypes(), self.precision.formats
        return {index: format_name(each) for index, each in asked.items() if format_name(each) != now[index]}

    def bytes_by_format(self) -> dict[str, int]:
        """Format -> bytes of K and V in blocks that hold tokens; `auto` is the model's dtype."""
        total: Counter[str] = Counter()
        for group in self.all:
            total.update(group.bytes_by_format())
        return dict(total)

    # --- rows -----------------------------------------------------------------------------------------------

    def open_rows(self, new: NewTokens, *, keep_history: bool, would_be_static: bool) -> None:
        """Begin with empty rows for tokens like these; PoolExhausted if static ones cannot be that long."""
        self.adapt(new.count)
        if not self._by_window:
            self.is_static = would_be_static
        capacity = self._capacity.wanted_blocks(
            new, self.precision, keep_history=keep_history, is_static=self.is_static
        )
        if self.is_static:
            self._fit_static_rows(new, capacity)
        elif any(group.store.num_blocks < capacity[window] for window, group in self._by_window.items()):
            for group in self.all:
                group.grow(max(group.store.num_blocks, capacity[group.window]))
        for window in () if self._by_window else tuple(capacity):
            self._by_window[window] = self._new_group(window, capacity[window], new.batch)
        for group in self.all:
            group.start(new.batch)

    def adapt(self, prompt_tokens: int) -> None:
        """Without rows: settle how those are stored that begin with so many tokens. Other pools go."""
        precision = Precision.of(self._config, self.specs, prompt_tokens)
        if precision != self.precision:
            self.precision = precision
            self.reset()
            self._by_window.clear()
            self.blocks = {}
            if not self.store.is_shared:
                self.store = Store()

    def claim(self, layer_idx: int, shape: PoolShape) -> LayerBlocks:
        """Give a layer its place in a pool."""
        blocks = self.blocks[layer_idx] = self.of(layer_idx).claim(layer_idx, shape)
        return blocks

    def reserve(
        self,
        start: int,
        new_tokens: int,
        *,
        keep_history: bool,
        padding: Sequence[int] = (),
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        """Make room for new tokens of every row, which has `start` tokens, in all groups.

        With `keep_history` windows keep what they would drop. `padding` are the leading tokens of every row
        that need not be stored; empty if there are no more. `let_go` is called when what is not needed any
        more was given back; only what follows can be undone.

        Raises PoolExhausted, QuantizationError (the guard's), or UnstorableValueError, for what an earlier
        step gave a quantized layer on a GPU. Nothing has changed then.
        """
        if self.is_static:
            if start + new_tokens > self.row_capacity_tokens:
                rows = self.all[0].manager.batch
                raise self.no_static_room(start + new_tokens, self.row_capacity_tokens, rows)
            let_go()
            for group in self.all:  # its rows have their blocks, those of padding too
                group.tables.set_length(group.num_tokens + new_tokens)
            return
        for group in self.all:
            for faults in group.faults.values():
                faults.check()
            if new_tokens == 1 and not keep_history and group.window is not None:
                self._give_back_chunk(group, group.window)
            group.store.collect()  # first: a block that only a dropped cache shares need not be copied
            manager = group.manager
            needed = manager.blocks_needed(new_tokens, keep_history=keep_history, padding_tokens=padding)
            self._make_room(group, new_tokens, needed)
        for group in self.all:
            group.seal_full(new_tokens)
        changed = [group.let_go(new_tokens, keep_history=keep_history, padding=padding) for group in self.all]
        let_go()
        for group, columns in zip(self.all, changed, strict=True):
            group.reserve(new_tokens, columns, keep_history=keep_history, padding=padding)

    def check_room_for(self, start: int, new_tokens: int) -> None:
        """Raise PoolExhausted unless rows that are cropped to `start` tokens can take so many after that."""
        for group in self.all:
            group.store.collect()
            self._make_room(group, new_tokens, group.manager.blocks_after_crop(start, new_tokens))

    def _make_room(self, group: LayerGroup, new_tokens: int, needed: int) -> None:
        """Raise unless a group can take the new tokens, growing it where its rows have become more."""
        if self._provide(group, needed):
            return
        size, free, caches = group.block_size, group.store.num_available, len(group.store.holders)
        shared = f", which {caches} caches share" if caches > 1 else ""
        raise PoolExhausted(
            f"{new_tokens} new tokens for {group.manager.batch} rows need {needed} blocks of {size} tokens, "
            f"and {free} of {group.store.num_blocks} are free{shared}; nothing was written. Ways out: a "
            f"larger `PagedCache(..., max_tokens=...)` (now {group.store.num_blocks * size} tokens over all "
            "rows), `cache.crop(...)`, `cache.reset()`, or a smaller batch",
            needed_blocks=needed,
            free_blocks=free,
            block_size=size,
        )

    def _give_back_chunk(self, group: LayerGroup, window: int) -> None:
        """Have a window's pool as small again as decode steps need it, after a chunk made it grow."""
        num_blocks = group.manager.batch * self._capacity.window_blocks(window)
        if num_blocks < group.store.num_blocks:
            group.store.collect()
            group.release_outside_window()  # as the reservation of the next token would, which comes next
            if group.store.blocks.num_referenced <= num_blocks and not group.store.is_shared:
                group.shrink(num_blocks)

    def _provide(self, group: LayerGroup, needed: int, at_least: int = 0) -> bool:
        """Have so many blocks free, growing a group up to the capacity for its rows; False if it cannot."""
        group.store.collect()
        missing = needed - group.store.num_available
        if missing <= 0:
            return True
        grown = self._capacity.grown_blocks(group.store, missing, at_least)
        return grown - group.store.num_blocks >= missing and group.grow(grown)

    def set_step(self, step: RunningStep | None) -> None:
        """Note the step in progress: as long as its forward runs, tensors have to stay where they are."""
        for group in self.all:
            group.holder.step = step

    def would_seal(self, new_tokens: int) -> bool:
        """Whether blocks are encoded, for all of their layers, when so many tokens come."""
        return any(group.dense.full(group.manager, new_tokens) for group in self.all)

    def check_crop(self, num_tokens: int) -> None:
        """Raise a ValueError if rows cannot be cut to so many tokens; changes nothing."""
        for group in self.all if num_tokens > 0 and not self.is_static else ():
            group.manager.check_crop(num_tokens)

    def release_outside_window(self) -> None:
        """Give back what was only kept for a roll-back."""
        for group in () if self.is_static else self.all:
            group.release_outside_window()

    def reset(self) -> None:
        """Forget all rows and give their blocks back; pools stay."""
        for group in self.all:
            group.reset()

    def check_integrity(self) -> None:
        """Raise an AssertionError if blocks were lost, over all caches of the store."""
        with self.store.lock:
            self.store.collect()
            for group in self.all:
                others = [holder.manager for holder in group.store.holders if holder is not group.holder]
                group.manager.check_integrity(table.ids for other in others for table in other.tables)
                group.dense.check_integrity(group.manager)

    # --- copies and saved contents --------------------------------------------------------------------------

    def fork(self, store: Store | None = None) -> LayerGroups:
        """The same rows for another cache, by sharing their blocks, or by copying them to an empty store."""
        copied = copy.copy(self)
        copied._by_window, copied.blocks = {}, {}
        if store is not None:
            copied.store = store
        for window, group in self._by_window.items():
            own, size = None, group.store.num_blocks
            if store is not None:
                own = WindowStore(window, size, group.block_size, grows=group.store.grows)
                store.by_window[window] = own
            fork = copied._by_window[window] = group.fork(own)
            if own is None:
                self._prepare_to_share(fork)
            copied.blocks |= fork.blocks
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerGroups:
        """The same rows in blocks of their own."""
        with self.store.lock:
            copied = memo[id(self)] = self.fork(Store())
        return copied

    def _prepare_to_share(self, group: LayerGroup) -> None:
        """Enlarge pools for one more cache while they may move; on a GPU only the small ones of windows."""
        is_cpu = all(pool.shape.device.type == "cpu" for pool in group.pools)
        if group.pools and (is_cpu or group.window is not None):
            num_blocks = self._capacity.shared_blocks(group.store)
            if num_blocks > group.store.num_blocks:
                group.grow(num_blocks)

    def beside(self, saved: SavedCache | None = None, first_tokens: int = 0) -> LayerGroups:
        """Groups with saved contents, or none, beside these, which stay as they are. Part of a change.

        They take blocks of the same store if enough are free there, else of a new one; PoolExhausted if that
        is too small too. Contents were checked; formats are as for a prompt of `first_tokens`.
        """
        beside = copy.copy(self)
        beside._by_window, beside.blocks = {}, {}
        if saved is None:
            return beside
        needed = {group.window: group.num_blocks for group in saved.groups}
        for group in self.all:
            group.store.collect()
        if any(group.store.num_available < needed[group.window] for group in self.all):
            beside.store = Store()
        before = {group.window: group.store.num_blocks for group in self.all}
        layer = next(layer for group in saved.groups for layer in group.layers.values())
        new = NewTokens(saved.batch, first_tokens, PoolShape.of(layer.keys, layer.values))
        beside.open_rows(new, keep_history=saved.record_past, would_be_static=False)
        for saved_group in saved.groups:
            group, count = beside._by_window[saved_group.window], saved_group.num_blocks
            # With more history than its windows need, it may want more than they do. And what a pool of this
            # cache had room for, made for more rows maybe, another one takes as well.
            if not self._provide(group, count, before.get(group.window, 0)):
                free = group.store.num_available
                raise PoolExhausted(
                    f"state_dict holds {count} blocks of {group.block_size} tokens, and the pool has {free} "
                    "free ones; make the cache with a larger `max_tokens`. The cache is as it was",
                    needed_blocks=count,
                    free_blocks=free,
                    block_size=group.block_size,
                )
            group.import_(saved_group, saved.length)
            beside.blocks |= group.blocks
        return beside

    def save(self) -> Saved:
        """Remember all that a change can change, but for what lies in blocks."""
        attributes, by_window, blocks = dict(vars(self)), dict(self._by_window), dict(self.blocks)
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

    def _new_group(self, window: int | None, num_blocks: int, batch: int) -> LayerGroup:
        specs = {index: spec for index, spec in self.specs.items() if spec.window == window}
        size = self._config.block_size_of(window)
        if window not in self.store.by_window:
            grows = window is None and not self._capacity.is_asked_for and not self.is_static
            self.store.by_window[window] = WindowStore(window, num_blocks, size, grows=grows)
        store = self.store.by_window[window]
        if self.is_static:
            from .static_group import StaticGroup  # with all that only compiled steps need

            return StaticGroup(specs, store, self.precision, row_blocks=num_blocks // batch)
        row_blocks, guard = self._capacity.full_blocks(1, size), self._config.key_error_guard
        return LayerGroup(specs, store, self.precision, row_blocks=row_blocks, guard=guard)

    def _fit_static_rows(self, new: NewTokens, capacity: dict[int | None, int]) -> None:
        """Share the pools out evenly over the rows, in the groups that there are."""
        for group in self.all:  # what they have counts as free memory no more
            capacity[group.window] = max(capacity[group.window], group.store.num_blocks)
        sizes = {window: self._config.block_size_of(window) for window in capacity}
        row_tokens = min(blocks // new.batch * sizes[window] for window, blocks in capacity.items())
        if new.count > row_tokens:
            raise self.no_static_room(new.count, row_tokens, new.batch)
        for window, size in sizes.items():
            capacity[window] = new.batch * -(-row_tokens // size)
        for group in self.all:
            num_blocks = capacity[group.window]
            group.tables.row_blocks = num_blocks // new.batch
            if num_blocks > group.store.num_blocks:
                group.grow(num_blocks)

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
