"""States of a block, the id that stands for no block, and what a pool tells people of its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

NULL_BLOCK = -1  # table entry of a block whose tokens are not stored: they left the sliding window


class BlockState(IntEnum):
    """The life of one block.

    ```
             allocate            seal                release(keep=True)
      FREE ────────────▶ OPEN ──────────▶ SEALED ──────────────────────▶ CACHED
       ▲ ▲                │ ▲               │ │  ▲                        │   │
       │ │     release    │ │    reopen     │ │  └──────── share ─────────┘   │
       │ └────────────────┤ └───────────────┘ │                               │
       │                  │                   │             allocate (evicts):
       │                  ▼                   │               OPEN, new owner ▼
       │               PENDING ◀──────────────┤ release_later
       │   flush_pending  │                   │
       ├──────────────────┘                   │
       └──────────────────────────────────────┘ release
    ```

    Every arrow downwards (release, release_later) is taken when the last reference goes; until then the block
    stays as it is. OPEN and SEALED blocks have references, the others have none. It is `make_writable` that
    reopens, after a tail was cropped.
    """

    FREE = 0  # holds nothing worth keeping; the next one to be handed out
    OPEN = 1  # being filled by its owners
    SEALED = 2  # full and immutable; may be shared
    CACHED = 3  # sealed content that nobody refers to: reusable until it is evicted
    PENDING = 4  # given up, waiting to be returned to the free blocks in a batch


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
        return BlockCounters(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Neighbouring blocks of a pool that are alike: id of the first, number, state, references of each."""

    first: int
    num_blocks: int
    state: BlockState
    holders: int

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        return SHARED if self.holders > 1 else self.state.name.lower()
