"""Which block belongs to whom. Plain ints: this package imports without torch."""

from __future__ import annotations

from .block import NULL_BLOCK, BlockState
from .dense import DenseBlocks, Moves, slots_per_row
from .free_queue import FreeQueue
from .manager import BlockManager
from .overview import KINDS, BlockCounters, BlockRun
from .pool import BlockPool
from .reservation import Reservation
from .table import BlockTable

__all__ = [
    "KINDS",
    "NULL_BLOCK",
    "BlockCounters",
    "BlockManager",
    "BlockPool",
    "BlockRun",
    "BlockState",
    "BlockTable",
    "DenseBlocks",
    "FreeQueue",
    "Moves",
    "Reservation",
    "slots_per_row",
]
