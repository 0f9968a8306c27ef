"""The contents of a cache: its rows and the blocks that they lie in, changed together or not at all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import torch

from hf_paged_cache.errors import CacheMismatchError, PagedCacheError, PoolExhausted
from hf_paged_cache.kernels import dispatch
from hf_paged_cache.store import static_group
from hf_paged_cache.store.layer_groups import LayerGroups
from hf_paged_cache.store.pool_tensors import NewTokens
from hf_paged_cache.store.store import Saved

from .rows import Rows

if TYPE_CHECKING:
    from hf_paged_cache.config import PagedCacheConfig
    from hf_paged_cache.host.architectures import LayerSpec
    from hf_paged_cache.kernels.call import LayerBlocks
    from hf_paged_cache.store.layer_group import LayerGroup
    from hf_paged_cache.store.saved import SavedCache
    from hf_paged_cache.store.window_store import Restore

    from .left_padding import Padding

_T = TypeVar("_T")


class Outside(Protocol):
    """What a cache holds outside blocks, and moves with them."""

    def save(self) -> Restore:
        """Remember what they are. Returns what puts that back."""

    def select(self, rows: Sequence[int]) -> None:
        """Make the rows copies of the given old rows."""

    def clear(self) -> None:
        """Make them as they were at first."""


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What is known of a model for good."""

    is_encoder_decoder: bool = False  # so that this may be the cache of its cross-attention
    has_outside_state: bool = False  # a recurrent state in the model itself, where nobody can take it back
    chunk_fault: str | None = None  # why it cannot take several new tokens after a history; None if it can
    can_be_static: bool = False  # layers and settings allow compiled steps


class Contents:
    """Rows and blocks of one cache."""

    def __init__(
        self,
        config: PagedCacheConfig,
        specs: dict[int, LayerSpec],
        max_positions: int | None,
        traits: ModelTraits,
        is_attended: Callable[[], bool],
    ) -> None:
        self.config = config
        self.traits = traits
        self.rows = Rows(specs)  # with static rows, what layers held at the last `pull`
        self.layer_groups = LayerGroups(config, specs, max_positions)
        self.is_attended = is_attended  # tells whether attention of this package reads the cache now
        self.has_masks = False  # somebody has asked how long they have to be: it is not for cross-attention
        self.has_open_step = False  # some layer of static rows has yet to join the step in progress
        self.forget_user()

    @property
    def groups(self) -> list[LayerGroup]:
        """The groups, in the order of their first layers; empty before the first update."""
        return self.layer_groups.all

    @property
    def blocks(self) -> dict[int, LayerBlocks]:
        """Layer index -> where its K and V lie; filled as layers get their first."""
        return self.layer_groups.blocks

    @property
    def is_static(self) -> bool:
        """Whether steps can be compiled: every row has its blocks from the start."""
        return self.layer_groups.is_static

    def change(self, make: Callable[[], _T], outside: Outside | None = None) -> _T:
        """Make a change to rows and blocks, and outside, all of it or none; see `Store.change`."""
        return self.layer_groups.store.change(partial(self._save, outside), make)

    def _save(self, outside: Outside | None = None) -> Saved:
        attributes, groups = dict(vars(self)), self.layer_groups.save()
        parts = [self.rows.save(), groups.restore, *([] if outside is None else [outside.save()])]

        def restore() -> None:
            vars(self).update(attributes)
            for restore_part in parts:
                restore_part()

        return Saved(restore, groups.follow)

    def claim(self, layer_idx: int, new: NewTokens) -> LayerBlocks:
        """Give a layer its place in a pool."""

        def make() -> LayerBlocks:
            if not self.groups:
                self.open_rows(new, keep_history=self.rows.record_past)
            return self.layer_groups.claim(layer_idx, new.shape)

        return self.change(make)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens of every row; more than there are forgets all. Part of a change."""
        if tokens_to_remove and self.rows.end:
            self.crop_to(max(0, self.rows.end - tokens_to_remove))
        if self.rows.record_past:
            # What a rejected draft could have needed is settled now.
            self.layer_groups.release_outside_window()

    def check_crop(self, num_tokens: int) -> None:
        """Raise what cutting every row to its first tokens would raise; changes nothing."""
        try:
            self.layer_groups.check_crop(num_tokens)
        except ValueError as error:
            raise PagedCacheError(
                f"cannot crop to {num_tokens} tokens: a window layer has given back what that length needs. "
                "Call `cache.activate_past_recording()` before the forwards that may be rolled back"
            ) from error

    def crop_to(self, num_tokens: int) -> None:
        """Keep the first tokens of every row. Part of a change."""
        if not num_tokens:
            self.clear()
            return
        self.check_crop(num_tokens)
        for group in self.groups:
            group.crop(num_tokens)
        self.rows.crop(num_tokens)

    def reset(self, outside: Outside) -> None:
        """Forget all rows and give their blocks back; pools stay."""

        def make() -> None:
            self.clear()
            self.rows.record_past = False
            outside.clear()

        self.change(make, outside)

    def clear(self) -> None:
        """Forget all rows. Part of a change."""
        self.layer_groups.reset()
        self.rows.clear()

    def reorder(self, row_indices: Sequence[int], outside: Outside | None = None) -> None:
        """Make the rows copies of the given old rows, by reference; their number may change."""
        self.pull()
        rows, batch = self.rows, self.rows.batch
        indices = rows.checked(row_indices, batch) if batch else list(row_indices)

        def make() -> None:
            if batch:
                for group in self.groups:
                    group.reorder(indices)
                rows.reorder(indices)
            if outside is not None:
                outside.select(indices)

        for group in self.layer_groups.static:
            group.check_rows(len(indices))
        # Rows that own their blocks are copied over each other, which cannot be taken back.
        was_lost, rows.is_lost = rows.is_lost, rows.is_lost or self.is_static
        self.change(make, outside)
        rows.is_lost = was_lost

    def replace_tail(
        self, start: int, behind: Sequence[tuple[int, torch.Tensor, torch.Tensor]], padding: Padding
    ) -> None:
        """Cut every row down to its first `start` tokens, and put others behind them. Part of a change.

        `behind` has the index of every layer that holds tokens, and K and V of those that come. Where that
        fails after the cut, the first tokens are what is left.
        """
        _, keys, values = behind[0]
        rows, end = self.rows, start + keys.shape[2]
        self.layer_groups.check_room_for(start, keys.shape[2])
        self.crop_to(start)
        # What is written now may lie where the tail did.
        self.layer_groups.store.keep(self._save)
        if not start:
            self.open_rows(NewTokens.of(keys, values), keep_history=rows.record_past)
        self.layer_groups.reserve(start, end - start, keep_history=rows.record_past, padding=padding.unstored)
        for index, keys, values in behind:
            dispatch.write(self.blocks[index], keys, values, start)
            rows.tokens[index] = end
        rows.begin(end, end, padding)

    def open_rows(self, new: NewTokens, *, keep_history: bool) -> None:
        """Begin with empty rows for tokens like these. Part of a change."""
        would_be_static = self.would_be_static(new.shape.device)
        self.layer_groups.open_rows(new, keep_history=keep_history, would_be_static=would_be_static)
        self.rows.batch = new.batch

    def fork(self) -> Self:
        """The same rows for another cache, by sharing their blocks."""
        copied = copy.copy(self)
        copied.rows = self.rows.copy()
        copied.layer_groups = self.change(self.layer_groups.fork)
        copied.forget_user()
        return copied

    def forget_user(self) -> None:
        """Belong to no thread and no forward, as a new cache and a copy do."""
        self.rows.equal_rows = 0

    def with_contents(
        self, groups: LayerGroups, saved: SavedCache, tokens: dict[int, int], padding: Padding
    ) -> dict[str, Any]:
        """The attributes of this object with saved contents, which these groups hold."""
        copied = copy.copy(self)
        rows = copied.rows = Rows(tokens)
        copied.layer_groups = groups
        copied.forget_user()
        rows.batch, rows.tokens, rows.equal_rows = saved.batch, tokens, self.rows.equal_rows
        rows.begin(saved.length, saved.length, padding)
        rows.record_past, rows.owner = saved.record_past, saved.owner
        if saved.input_ids.shape[1]:
            rows.ids.commit(saved.input_ids, saved.input_ids.shape[1])
        return dict(vars(copied))

    def pull(self) -> None:
        """Learn how far compiled steps have come; waits for the device. Nothing to do without static rows.

        PoolExhausted if they went on when rows were full, so that their last results are no numbers.
        """
        if not (self.is_static and self.rows.batch):
            return
        length = max(group.tables.pull_length() for group in self.layer_groups.static)
        if length != self.rows.end:
            self.rows.lengthen(length)
        capacity = self.layer_groups.row_capacity_tokens
        if length > capacity:
            raise PoolExhausted(
                f"compiled steps have fed {length} tokens per row, and a row holds {capacity}; what they "
                "returned since is NaN. `cache.reset()`, and make the cache with a larger `max_tokens` "
                "(over all rows)",
                needed_blocks=-(-length // self.config.block_size),
                free_blocks=0,
                block_size=self.config.block_size,
            )

    def check_chunk(self, new_tokens: int, *, is_warm: bool) -> None:
        """Raise CacheMismatchError if the model goes wrong with so many new tokens after a history."""
        fault = self.traits.chunk_fault
        if fault is not None and new_tokens > 1 and is_warm:
            raise CacheMismatchError(
                f"{new_tokens} new tokens came, and the cache holds a history: {fault}. Feed the "
                "new tokens one at a time, or call `cache.reset()` and feed everything from the start; "
                "nothing was written"
            )

    def check_static_room(self, tokens: int) -> None:
        """Raise PoolExhausted if static rows cannot have so many tokens."""
        capacity = self.layer_groups.row_capacity_tokens
        if tokens > capacity:
            raise self.layer_groups.no_static_room(tokens, capacity, self.rows.batch)

    def would_be_static(self, device: torch.device) -> bool:
        """Whether rows on a device are, or will be, static."""
        return self.is_static or (
            not self.groups
            and self.traits.can_be_static
            and device.type in static_group.DEVICES
            and self.is_attended()
        )

    def check_integrity(self) -> None:
        """Raise an AssertionError if blocks were lost or the layers disagree."""
        self.layer_groups.check_integrity()
        for group in self.groups:
            assert group.num_tokens in (self.rows.end, 0), (
                f"the group of window {group.window} has {group.num_tokens} tokens, the cache {self.rows.end}"
            )
        self.rows.check_integrity()
