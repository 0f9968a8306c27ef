"""Which block belongs to whom. Plain ints: this package imports without torch."""

from __future__ import annotations

from hf_paged_cache.blocks.block import NULL_BLOCK, BlockState
from hf_paged_cache.blocks.dense import DenseBlocks, Moves, slots_per_row
from hf_paged_cache.blocks.free_queue import FreeQueue
from hf_paged_cache.blocks.manager import BlockManager
from hf_paged_cache.blocks.overview import KINDS, BlockCounters, BlockRun
from hf_paged_cache.blocks.pool import BlockPool
from hf_paged_cache.blocks.reservation import Reservation
from hf_paged_cache.blocks.table import BlockTable

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
