"""What several caches can share: blocks, the tensors they lie in, and the lock for both.

A cache has a store of its own unless it was forked from another. Every cache keeps its rows to itself: block
ids in tables. Caches of one store may run in different threads: whoever takes blocks, gives them back or
replaces tensors holds the lock; kernels run without it, since no two caches ever write to one block.

Whatever is done under the lock is done whole or not at all, also when an interrupt arrives between any two
lines of it: see `Store.change`.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from hf_paged_cache.blocks import BlockManager, BlockPool
from hf_paged_cache.errors import PagedCacheError
from hf_paged_cache.host.frames import Place

from .device.streams import Streams
from .pool import PoolShape, Storage

if TYPE_CHECKING:
    from .layer_group import LayerGroup


_T = TypeVar("_T")
Restore = Callable[[], None]
"""Puts something back as it was. Can be called again if it did not come to its end."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What something outside a store was, before a change of both.

    Attributes:
        restore: Puts integers and references back.
        follow: Brings what is made from them up to date (tables on devices, pointers), when counts are right.
    """

    restore: Restore
    follow: Restore


def nothing() -> Saved:
    """For changes of a store alone."""
    return Saved(lambda: None, lambda: None)


class Section:
    """The part of a store for layers that keep the same tokens (all, or those of one window).

    Attributes:
        blocks: Who refers to which block.
        grows: It began with less than it may need.
        storages: The tensors, one for each shape and format of layers.
        version: Bumped when tensors were replaced by others; caches then look where their layers lie.
        streams: Of a GPU, that its blocks are used on.
    """

    def __init__(self, num_blocks: int, *, grows: bool = False) -> None:
        self.blocks = BlockPool(num_blocks)
        self.grows = grows
        self.storages: list[Storage] = []
        self.version = 0
        self.streams = Streams()
        self._members: weakref.WeakSet[LayerGroup] = weakref.WeakSet()
        self._left: deque[BlockManager] = deque()

    def __deepcopy__(self, memo: dict[int, Any]) -> Section:
        raise AssertionError("a layer group says which blocks of its section a copy of it needs")

    @property
    def members(self) -> list[LayerGroup]:
        """The layer groups of all caches that use it."""
        return list(self._members)

    @property
    def is_shared(self) -> bool:
        """Whether several caches use it."""
        return len(self._members) > 1

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(storage.nbytes for storage in self.storages)

    def join(self, group: LayerGroup) -> None:
        """Count a group among the members, and take its blocks back when it is dropped."""
        self._members.add(group)
        # In the middle of anything, so blocks are only noted here.
        weakref.finalize(group, self._left.append, group.manager).atexit = False

    @property
    def has_left(self) -> bool:
        """Whether groups were dropped whose blocks have yet to be taken back."""
        return bool(self._left)

    def collect(self) -> None:
        """Take back the blocks of groups that were dropped."""
        while self._left:
            self._left[0].reset()
            self._left.popleft()

    def save(self) -> Restore:
        """Remember who uses it and where everything lies."""
        members, storages = self.members, list(self.storages)
        tensors = [storage.held for storage in storages]
        num_blocks, version = self.blocks.num_blocks, self.version

        def restore() -> None:
            for group in self.members:
                if group not in members:
                    group.manager.forget()
            while self._left:  # dropped since, or before: nobody counts their blocks below
                self._left.pop().forget()
            self._members = weakref.WeakSet(members)
            self.storages = list(storages)
            for storage, held in zip(storages, tensors, strict=True):
                storage.held = held
            if self.version != version:
                self.version += 1  # somebody may have found the larger tensors already
            self.rebuild(num_blocks)

        return restore

    def rebuild(self, num_blocks: int | None = None) -> None:
        """Count anew who holds which block. The tables of all members say it."""
        holdings = [held for group in self.members for held in group.manager.holdings()]
        self.blocks.rebuild(num_blocks or self.blocks.num_blocks, holdings)

    def claim(self, layer_idx: int, shape: PoolShape, block_size: int, room: int) -> tuple[Storage, int]:
        """The storage of a layer and its place there.

        Args:
            layer_idx: Index of the layer.
            shape: Of its K and V, and how they are stored.
            block_size: Tokens per block.
            room: Layers of that shape that are expected, if a storage has to be made.
        """
        for storage in self.storages:
            place = storage.claim(layer_idx) if storage.shape == shape else None
            if place is not None:
                return storage, place
        storage = Storage(
            shape,
            num_blocks=self.blocks.num_blocks,
            num_layers=max(1, room),
            block_size=block_size,
            grows=self.grows,
        )
        self.storages.append(storage)
        place = storage.claim(layer_idx)
        assert place is not None, "a new storage has room for a layer"
        return storage, place

    def drop(self, storage: Storage) -> None:
        """Forget a storage that no member uses."""
        if not any(pool.storage is storage for group in self._members for pool in group.pools):
            self.storages.remove(storage)

    def grow(self, num_blocks: int) -> None:
        """Enlarge every storage to `num_blocks`; ids and contents stay. All of them or none."""
        used = self.blocks.referenced()
        self._order_streams()
        larger = [storage.extended(num_blocks) or storage.copy(num_blocks, used) for storage in self.storages]
        self.blocks.grow(num_blocks - self.blocks.num_blocks)
        for storage, copied in zip(self.storages, larger, strict=True):
            storage.become(copied)
        self.version += 1

    def _order_streams(self) -> None:
        """Let what other streams have queued end before tensors are copied, and before they are freed."""
        for storage in self.storages:
            self.streams.enter(storage.shape.device, takes_blocks=True)
            self.streams.retire(storage.tensors)

    def shrink(self, num_blocks: int) -> dict[int, int]:
        """Make every storage as small as `num_blocks`, which is enough for what is referenced.

        Returns:
            Old -> new id of blocks that had higher ones; contents have moved, and tables have to follow.
        """
        used = self.blocks.referenced()
        self._order_streams()
        moved = self.blocks.moves_to_shrink(num_blocks)
        smaller = [storage.copy(num_blocks, used, moved) for storage in self.storages]
        for storage, copied in zip(self.storages, smaller, strict=True):
            storage.become(copied)
        self.blocks.shrink(num_blocks, moved)
        self.version += 1
        return moved


class Store:
    """The sections of one or more caches.

    Attributes:
        lock: Held by whoever changes what belongs to whom.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._sections: dict[int | None, Section] = {}
        self._undo: tuple[Place, Restore] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Store:
        """An empty store: the copy of a cache brings its own blocks."""
        twin = memo[id(self)] = Store()
        return twin

    @property
    def is_torn(self) -> bool:
        """Whether a change is in progress, or was interrupted and has yet to be taken back."""
        return self._undo is not None

    def change(self, save: Callable[[], Saved], make: Callable[[], _T]) -> _T:
        """Make a change, all of it or none.

        It is good from one assignment on, the last line here. If it raises, or is interrupted at any line,
        everything is put back; if that is interrupted as well, whoever comes next does it first.

        Args:
            save: Remembers what the change will touch, outside the store as well.
            make: The change. What it overwrites in tensors must lie in blocks that were free when it began,
                or `keep` has to be called first.

        Returns:
            What `make` returns.

        Raises:
            PagedCacheError: A change is in progress in this very thread: a signal's handler asks, say.
        """
        with self.lock:
            if not self.recover():
                raise PagedCacheError("the cache is in the middle of a change; call this after it")
            self._undo = Place.here(), self._saver(save)
            try:
                result = make()
            except BaseException:
                self._take_back()
                raise
            self._undo = None
            return result

    def keep(self, save: Callable[[], Saved]) -> None:
        """Inside a change: what has been done so far stays, also if the rest is taken back."""
        if self._undo is not None:
            self._undo = self._undo[0], self._saver(save)

    def recover(self) -> bool:
        """Take back a change that was interrupted. Returns whether none is in progress in this thread."""
        if self._undo is not None:
            with self.lock:
                if self._undo is not None and self._undo[0].is_running():
                    return False
                self._take_back()
        return True

    def _take_back(self) -> None:
        if self._undo is not None:
            self._undo[1]()
            self._undo = None

    def _saver(self, save: Callable[[], Saved]) -> Restore:
        sections = dict(self._sections)
        restores = [section.save() for section in sections.values()]
        saved = save()

        def restore() -> None:
            self._sections = dict(sections)
            saved.restore()
            for each in restores:
                each()
            saved.follow()

        return restore

    def collect(self) -> None:
        """Take back the blocks of caches that were dropped."""
        if any(section.has_left for section in self._sections.values()):
            self.change(nothing, self._collect)

    def _collect(self) -> None:
        for section in self._sections.values():
            section.collect()

    def section(self, window: int | None, num_blocks: int, *, grows: bool = False) -> Section:
        """The section of a window, made with so many blocks if there is none."""
        if window not in self._sections:
            self._sections[window] = Section(num_blocks, grows=grows)
        return self._sections[window]

    def put(self, window: int | None, section: Section) -> None:
        """Take in a section that was made elsewhere."""
        self._sections[window] = section

    @property
    def num_caches(self) -> int:
        """Caches that share it."""
        return max((len(section.members) for section in self._sections.values()), default=1)
