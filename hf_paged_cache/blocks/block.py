"""What a block can be, and the id that stands for no block."""

from __future__ import annotations

from enum import IntEnum

NULL_BLOCK = -1
"""Table entry of a block whose tokens are not stored: they left the sliding window."""


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
    stays as it is. OPEN and SEALED blocks have references, the others have none.
    """

    FREE = 0
    """Holds nothing worth keeping; the next one to be handed out."""
    OPEN = 1
    """Being filled by its owners."""
    SEALED = 2
    """Full and immutable; may be shared."""
    CACHED = 3
    """Sealed content that nobody refers to: reusable until it is evicted."""
    PENDING = 4
    """Given up, waiting to be returned to the free blocks in a batch."""
