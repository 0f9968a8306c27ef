"""What a pool tells people of itself: what happened to its blocks so far, and which are alike now."""

from __future__ import annotations

from dataclasses import dataclass

from .block import BlockState

SHARED = "shared"
KINDS = ("free", "open", "sealed", SHARED, "cached", "pending")
"""What a block is to people: its state, or `shared` if it has more than one reference, open or sealed."""


@dataclass(slots=True)
class BlockCounters:
    """What happened since a pool was made.

    Attributes:
        taken: Blocks that were handed out.
        given_back: Blocks that lost their last reference.
        shared: References that were added to blocks in use, where a copy would have taken a block.
        copied: Shared blocks that were copied because a holder was about to write to one.
        revived: Cached blocks that were taken up again with their content.
        evicted: Cached blocks whose content was forgotten for a new owner.
    """

    taken: int = 0
    given_back: int = 0
    shared: int = 0
    copied: int = 0
    revived: int = 0
    evicted: int = 0

    def __add__(self, other: BlockCounters) -> BlockCounters:
        """The counts of two pools together."""
        return BlockCounters(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Neighbouring blocks of a pool that are alike.

    Attributes:
        first: Id of the first one.
        num_blocks: How many they are.
        state: Of each.
        holders: References of each.
    """

    first: int
    num_blocks: int
    state: BlockState
    holders: int

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        return SHARED if self.holders > 1 else self.state.name.lower()
