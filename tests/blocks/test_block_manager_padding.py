"""Rows that begin with padding: exact ids, blocks of 4 tokens. N marks a block that is not stored."""

from __future__ import annotations

import pytest

from hf_paged_cache.blocks import NULL_BLOCK as N
from hf_paged_cache.blocks import BlockManager, DenseBlocks, Reservation
from hf_paged_cache.errors import PagedCacheError
from tests.blocks.rows import ids, snapshot, started


def test_blocks_are_counted_from_a_row_s_first_own_token():
    manager = started(20, 4)
    assert manager.blocks_needed(9, padding_tokens=(0, 3, 4, 9)) == 3 + 2 + 2 + 0
    assert manager.reserve(9, padding_tokens=(0, 3, 4, 9)) == Reservation(0, 9, [], 0, 7)
    assert ids(manager) == [[0, 1, 2], [3, 4], [5, 6], []]
    assert manager.reserve(4) == Reservation(9, 13, [], 0, 1 + 1 + 1 + 1)
    assert ids(manager) == [[0, 1, 2, 7], [3, 4, 8], [5, 6, 9], [10]]
    assert [table.num_tokens for table in manager.tables] == [13, 10, 9, 4]
    assert (manager.version, manager.num_tokens) == (0, 13)


def test_a_row_that_is_all_padding_goes_on_with_it_and_stores_nothing():
    manager = started(5, 2)
    assert manager.reserve(6, padding_tokens=(0, 6)) == Reservation(0, 6, [], 0, 2)
    assert manager.reserve(1, padding_tokens=(0, 7)) == Reservation(6, 7, [], 2, 0)
    assert ids(manager) == [[0, 1], []]
    assert manager.reserve(6, padding_tokens=(0, 9)) == Reservation(7, 13, [], 0, 2 + 1)
    assert ids(manager) == [[0, 1, 2, 3], [4]]


def test_a_row_cropped_into_its_padding_is_empty():
    manager = started(9, 3)
    manager.reserve(14, padding_tokens=(0, 8, 13))
    assert ids(manager) == [[0, 1, 2, 3], [4, 5], [6]]
    manager.crop(7)
    assert ids(manager) == [[0, 1], [], []]
    assert [table.offset for table in manager.tables] == [0, 7, 7]
    assert manager.reserve(2, padding_tokens=(0, 7, 9)) == Reservation(7, 9, [], 0, 2)
    assert [table.num_tokens for table in manager.tables] == [9, 2, 0]


def test_rows_are_sealed_when_their_own_blocks_are_full():
    manager = started(9, 2)
    manager.reserve(9, padding_tokens=(0, 2))
    manager.reserve(1)
    assert [manager.pool.state(i).name for row in ids(manager) for i in row] == [
        *("SEALED", "SEALED", "OPEN"),
        *("SEALED", "OPEN"),
    ]


def test_a_window_drops_by_columns_and_whole_own_blocks():
    manager = started(20, 3, window=6)
    manager.reserve(12, keep_history=True, padding_tokens=(0, 5, 9))
    assert ids(manager) == [[0, 1, 2], [3, 4], [5]]
    assert not manager.has_gap(0)
    manager.reserve(5)  # the first new query needs columns from 7 on: token 2 of row 1
    assert ids(manager) == [[N, 1, 2, 0, 6], [3, 4, 7], [5, 8]]
    assert manager.has_gap(0)
    assert not manager.has_gap(4)
    manager.reserve(12)  # longer than the window: columns from 24 on are needed then
    assert ids(manager)[0][:6] == [N, N, N, 0, 6, N]
    assert ids(manager)[1][:4] == [N, 4, 7, N]
    assert ids(manager)[2][:3] == [5, 8, N]
    assert manager.has_gap(16)
    assert not manager.has_gap(24)


def test_a_crop_asks_for_the_windows_of_all_rows():
    manager = started(20, 2, window=4)
    manager.reserve(12, keep_history=True, padding_tokens=(0, 11))
    manager.check_crop(5)
    manager.reorder([1])
    manager.crop(5)
    assert ids(manager) == [[]]
    manager.reserve(12, padding_tokens=(5,))
    with pytest.raises(PagedCacheError, match="history was released"):
        manager.check_crop(12)


@pytest.mark.parametrize("padding", [(1,), (1, 2, 3), (-1, 0), (0, 6)])
def test_padding_that_does_not_fit_changes_nothing(padding: tuple[int, ...]):
    manager = started(6, 2)
    before = snapshot(manager)
    with pytest.raises(PagedCacheError, match=r"Expected padding of 2 rows, each 0…5 tokens"):
        manager.reserve(5, padding_tokens=padding)
    assert snapshot(manager) == before


def test_a_row_that_has_begun_has_no_more_padding():
    manager = started(6, 2)
    manager.reserve(5, padding_tokens=(0, 4))
    with pytest.raises(PagedCacheError, match="as before where a row has begun"):
        manager.reserve(1, padding_tokens=(0, 5))


def test_too_few_blocks_change_nothing():
    manager = started(5, 2)
    manager.reserve(6, padding_tokens=(0, 6))
    before = snapshot(manager)
    assert manager.reserve(11, padding_tokens=(0, 8)) is None  # 3 more for row 0 and 3 for row 1
    assert snapshot(manager) == before


def test_copies_of_padded_rows_share_what_is_stored():
    manager = started(9, 3)
    manager.reserve(10, padding_tokens=(0, 4, 9))
    manager.reorder([2, 1, 1, 0])
    assert ids(manager) == [[5], [3, 4], [3, 4], [0, 1, 2]]
    assert manager.reserve(1).copies == [(4, 6)]
    manager.reset()
    assert manager.pool.num_free == 9


def test_rows_of_somebody_else_are_adopted_with_their_padding():
    manager = BlockManager(9, 4)
    manager.adopt([[0, 1], [2]], 6, (0, 3))
    assert [(table.offset, table.num_tokens) for table in manager.tables] == [(0, 6), (3, 3)]
    manager.check_integrity()


def test_sinks_and_open_blocks_are_those_of_each_row():
    manager, dense = started(20, 2), DenseBlocks(1, 1)
    dense.provide(2 * dense.dense_per_row)

    def reserve(tokens: int, padding: tuple[int, ...] = ()) -> list[list[int]]:
        full = dense.full(manager, tokens)
        dense.release_full(manager, tokens)
        reservation = manager.reserve(tokens, padding_tokens=padding)
        assert reservation is not None
        dense.follow(manager, reservation)
        dense.check_integrity(manager)
        sealed.append([block_id for _, block_id in full])
        return [table.dense.copy() for table in manager.tables]

    sealed: list[list[int]] = []
    assert reserve(15, (0, 4)) == [[0, 3], [0, 2]]  # 15 and 11 tokens
    assert reserve(1) == [[0, 3], [0, 2]]
    assert reserve(1) == [[0, 4], [0, 3]]  # both have filled a block
    assert sealed == [[], [], [3, 6]]
    manager, dense = started(20, 2), DenseBlocks(1, 1)
    dense.provide(2 * dense.dense_per_row)
    sealed.clear()
    assert reserve(12, (0, 5)) == [[0, 2], [0, 1]]  # 12 and 7 tokens
    assert reserve(1) == [[0, 3], [0, 1]]
    assert reserve(1) == [[0, 3], [0, 2]]
    assert sealed == [[], [2], [4]]
