"""Owners of blocks. Plain ints: this package imports without torch."""

from __future__ import annotations

from .block import KINDS, NULL_BLOCK, BlockCounters, BlockRun, BlockState
from .block_manager import BlockManager, Reservation
from .block_pool import BlockPool
from .block_table import BlockTable
from .dense_blocks import DenseBlocks, Moves

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
    "Moves",
    "Reservation",
]
