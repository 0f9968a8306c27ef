"""Rows on tiny pools, blocks of 4 tokens, and what can be seen of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from hf_paged_cache.blocks import BlockManager, BlockTable


class Counted(list[int]):
    """Ids of a row, which count how often somebody looks at one."""

    looks = 0

    def __iter__(self) -> Iterator[int]:
        Counted.looks += len(self)
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        Counted.looks += len(found) if isinstance(index, slice) else 1
        return found


def started(num_blocks: int, batch: int = 1, *, window: int | None = None, tokens: int = 0) -> BlockManager:
    manager = BlockManager(num_blocks, 4, window)
    manager.start(batch)
    if tokens:
        assert manager.reserve(tokens) is not None
    return manager


def ids(manager: BlockManager) -> list[list[int]]:
    manager.check_integrity()
    return [table.ids for table in manager.tables]


def slots(table: BlockTable, start: int, end: int) -> list[tuple[int, int]]:
    """Where the tokens `start … end - 1` lie: (block id or NULL_BLOCK, slot in the block) each."""
    assert end <= table.num_tokens
    return [(table.ids[token // table.block_size], token % table.block_size) for token in range(start, end)]


def states(manager: BlockManager, *block_ids: int) -> str:
    return " ".join(manager.pool.state(block_id).name for block_id in block_ids)


def snapshot(manager: BlockManager) -> dict[str, object]:
    pool = manager.pool
    return {
        "tables": copy.deepcopy(manager.tables),
        "version": manager.version,
        "blocks": [(pool.state(i), pool.ref_count(i)) for i in range(pool.num_blocks)],
        "free": list(pool._free),
    }
