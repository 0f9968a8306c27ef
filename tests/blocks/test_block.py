"""What a pool tells of itself: every count after every step, on tiny pools."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import astuple

import pytest

from hf_paged_cache.blocks import KINDS, BlockCounters, BlockPool, BlockRun, BlockState
from hf_paged_cache.errors import PagedCacheError


def counted(pool: BlockPool) -> dict[str, int]:
    """The counts that are not zero."""
    names = BlockCounters.__slots__
    return {name: count for name, count in zip(names, astuple(pool.counters), strict=True) if count}


def test_every_event_counts_once() -> None:
    pool = BlockPool(4)
    pool.allocate(2)  # o o . .
    assert counted(pool) == {"taken": 2}
    pool.share([0, 0])  # o3 o . .
    assert counted(pool) == {"taken": 2, "shared": 2}
    pool.release([0])  # o2 o . .: nobody lost a block
    assert counted(pool) == {"taken": 2, "shared": 2}
    assert pool.make_writable(1) == 1  # alone already
    assert pool.make_writable(0) == 2  # o o o .
    assert counted(pool) == {"taken": 3, "shared": 2, "copied": 1}
    pool.release_later([1])  # o p o .
    pool.release([2])  # o p . .
    pool.flush_pending()
    assert counted(pool) == {"taken": 3, "shared": 2, "copied": 1, "given_back": 2}


def test_cached_blocks_are_revived_or_evicted() -> None:
    pool = BlockPool(2)
    for block_id in pool.allocate(2) or []:
        pool.seal(block_id)
    pool.release([0, 1], keep=True)  # c c
    pool.share([0, 0])  # s2 c: one found again, and one more holder of it
    assert counted(pool) == {"taken": 2, "given_back": 2, "revived": 1, "shared": 1}
    pool.allocate(1)  # s2 o
    assert counted(pool) == {"taken": 3, "given_back": 2, "revived": 1, "shared": 1, "evicted": 1}


def _take_back_twice(pool: BlockPool) -> None:
    with pytest.raises(PagedCacheError):
        pool.release([0, 0, 0])


def _share_free(pool: BlockPool) -> None:
    with pytest.raises(PagedCacheError):
        pool.share([0, 1])


@pytest.mark.parametrize(
    "attempt",
    [
        lambda pool: pool.allocate(2),
        lambda pool: pool.allocate(0),
        lambda pool: pool.share([]),
        _take_back_twice,
        _share_free,
    ],
    ids=["too many", "none", "nothing shared", "released too often", "shared a free one"],
)
def test_what_did_not_happen_is_not_counted(attempt: Callable[[BlockPool], object]) -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    before = copy.copy(pool.counters)
    attempt(pool)
    assert pool.counters == before


def test_a_copy_that_found_no_block_is_not_counted() -> None:
    pool = BlockPool(1)
    pool.allocate(1)
    pool.share([0])
    assert pool.make_writable(0) is None
    assert counted(pool) == {"taken": 1, "shared": 1}


def test_counts_of_two_pools_add_up() -> None:
    assert BlockCounters(1, 2, 3, 4, 5, 6) + BlockCounters(10, 20, 30, 40, 50, 60) == BlockCounters(
        11, 22, 33, 44, 55, 66
    )


def test_runs_put_neighbours_together_that_are_alike() -> None:
    pool = BlockPool(8)
    pool.allocate(5)
    pool.seal(0)
    pool.seal(1)
    pool.share([1, 3])
    pool.release_later([4])  # s s2 o o2 p . . .
    runs = pool.runs()
    assert runs == [
        BlockRun(0, 1, BlockState.SEALED, 1),
        BlockRun(1, 1, BlockState.SEALED, 2),
        BlockRun(2, 1, BlockState.OPEN, 1),
        BlockRun(3, 1, BlockState.OPEN, 2),
        BlockRun(4, 1, BlockState.PENDING, 0),
        BlockRun(5, 3, BlockState.FREE, 0),
    ]
    assert [run.kind for run in runs] == ["sealed", "shared", "open", "shared", "pending", "free"]


def test_every_state_of_a_block_has_a_name_for_people() -> None:
    assert {state.name.lower() for state in BlockState} | {"shared"} == set(KINDS)
