"""The blocks of layers that keep the same tokens, the tensors they lie in, and who holds them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hf_paged_cache.blocks.block_pool import BlockPool

from .device.streams import Streams
from .pool_tensors import LayerPool, PoolShape, PoolTensors

if TYPE_CHECKING:
    from hf_paged_cache.blocks import BlockManager

Restore = Callable[[], None]  # puts something back as it was; is called again if it did not come to its end


class RunningStep(Protocol):
    """A forward that writes where layers were bound when it began."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended; False if nobody knows."""


@dataclass(eq=False)
class Holder:
    """A layer group of one cache, as the window store knows it whose blocks it holds."""

    manager: BlockManager  # which blocks, in which rows
    pools: list[LayerPool]  # the tensors that they are read from
    step: RunningStep | None = None  # what is writing to them; None between steps

    @property
    def is_writing(self) -> bool:
        """Whether tensors have to stay; not if an exception has ended the step, though nobody has seen."""
        return self.step is not None and not self.step.is_over


class WindowStore:
    """The part of a store for layers that keep the same tokens (all, or those of one window)."""

    def __init__(self, window: int | None, num_blocks: int, block_size: int, *, grows: bool = False) -> None:
        self.window = window  # tokens a query sees, or None for all
        self.block_size = block_size
        self.grows = grows  # it begins with less than it may need
        self.blocks = BlockPool(num_blocks)
        self.tensors: list[PoolTensors] = []  # where blocks lie, for each shape and format of layers
        self.version = 0  # bumped when tensors are replaced; holders then look where their layers lie
        self.streams = Streams()  # of a GPU, that its blocks are used on
        self._holders: weakref.WeakSet[Holder] = weakref.WeakSet()
        self.left: list[BlockManager] = []  # of holders that were dropped; their blocks are yet to be taken

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return self.blocks.num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that can be taken."""
        return self.blocks.num_free + self.blocks.num_pending

    @property
    def holders(self) -> list[Holder]:
        """All who hold blocks or may do so: one for each cache."""
        return list(self._holders)

    @property
    def is_shared(self) -> bool:
        """Whether several caches use it."""
        return len(self._holders) > 1

    @property
    def grows_in_place(self) -> bool:
        """Whether more blocks can come without a copy of those that there are."""
        return bool(self.tensors) and all(each.held[1] for each in self.tensors)

    def join(self, holder: Holder) -> None:
        """Count another holder, and take its blocks back when it is dropped."""
        self._holders.add(holder)
        # In the middle of anything, so its blocks are only remembered here.
        weakref.finalize(holder, self.left.append, holder.manager).atexit = False

    def can_move(self, asking: Holder) -> bool:
        """Whether tensors may be replaced by others: no holder but the asking one is writing to them."""
        return not any(holder.is_writing for holder in self._holders if holder is not asking)

    def collect(self) -> None:
        """Take back the blocks of holders that were dropped."""
        while self.left:
            self.left[0].reset()
            del self.left[0]

    def save(self) -> Restore:
        """Remember who uses it and where everything lies. Returns what makes it so again."""
        holders, held = self.holders, {each: each.held for each in self.tensors}
        num_blocks, version = self.num_blocks, self.version

        def restore() -> None:
            for holder in self.holders:
                if holder not in holders:
                    holder.manager.forget()
            while self.left:  # dropped since, or before: nobody counts their blocks below
                self.left.pop().forget()
            self._holders = weakref.WeakSet(holders)
            self.tensors = list(held)
            for each, before in held.items():
                each.held = before
            if self.version != version:
                self.version += 1  # the larger tensors may have been found already
            # The tables of all holders say who holds which block.
            self.blocks.rebuild(num_blocks, [rows for each in holders for rows in each.manager.holdings()])

        return restore

    def claim(self, layer_idx: int, shape: PoolShape, num_layers: int) -> PoolTensors:
        """Tensors where a layer has a place; if some have to be made, for so many layers."""
        for tensors in self.tensors:
            if tensors.shape == shape and tensors.claim(layer_idx):
                return tensors
        made = PoolTensors(shape, self.num_blocks, max(1, num_layers), self.block_size, grows=self.grows)
        self.tensors.append(made)
        made.claim(layer_idx)
        return made

    def drop(self, tensors: PoolTensors) -> None:
        """Forget tensors that no holder uses."""
        if not any(pool.tensors is tensors for holder in self._holders for pool in holder.pools):
            self.tensors.remove(tensors)

    def resize(self, num_blocks: int) -> dict[int, int]:
        """Have `num_blocks` in all tensors, enough for what is referenced; contents stay. All or none.

        Old -> new id of blocks that had higher ones: their contents have moved, and tables have to follow.
        """
        used, more = self.blocks.referenced(), num_blocks - self.num_blocks
        # What other streams have queued ends before tensors are copied, and before they are freed.
        for tensors in self.tensors:
            self.streams.enter(tensors.shape.device, takes_blocks=True)
            self.streams.retire(tensors.tensors)
        moved = {} if more >= 0 else self.blocks.moves_to_shrink(num_blocks)
        resized = [tensors.resized(num_blocks, used, moved) for tensors in self.tensors]
        if more >= 0:
            self.blocks.grow(more)
        else:
            self.blocks.shrink(num_blocks, moved)
        for tensors, held in zip(self.tensors, resized, strict=True):
            tensors.held = held
        self.version += 1
        return moved
