"""What several caches can share: blocks, the tensors they lie in, and the lock for both.

A cache has a store of its own unless it was forked from another. Every cache keeps its rows to itself: block
ids in tables. Caches of one store may run in different threads: whoever takes blocks, gives them back or
replaces tensors holds the lock; kernels run without it, since no two caches ever write to one block.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from .blocks import BlockManager, BlockPool
from .kv_pool import PoolShape, Storage
from .streams import Streams

if TYPE_CHECKING:
    from .group import LayerGroup


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
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(storage.nbytes for storage in self.storages)

    def join(self, group: LayerGroup) -> None:
        """Count a group among the members, and take its blocks back when it is dropped."""
        self._members.add(group)
        # In the middle of anything, so blocks are only noted here.
        weakref.finalize(group, self._left.append, group.manager).atexit = False

    def collect(self) -> None:
        """Take back the blocks of groups that were dropped."""
        while self._left:
            self._left.popleft().reset()

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

    def __deepcopy__(self, memo: dict[int, Any]) -> Store:
        """An empty store: the copy of a cache brings its own blocks."""
        twin = memo[id(self)] = Store()
        return twin

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
