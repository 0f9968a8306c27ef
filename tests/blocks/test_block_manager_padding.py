"""Rows that begin with padding: exact ids, blocks of 4 tokens. N marks a block that is not stored."""

from __future__ import annotations

import pytest

from hf_paged_cache.blocks import NULL_BLOCK as N
from hf_paged_cache.blocks import DenseBlocks, Reservation
from hf_paged_cache.errors import PagedCacheError
from tests.blocks.rows import ids, snapshot, started


def test_blocks_of_padding_alone_are_not_stored():
    manager = started(20, 4)
    assert manager.blocks_needed(9, padding=(0, 3, 4, 9)) == 3 + 3 + 2 + 1
    assert manager.reserve(9, padding=(0, 3, 4, 9)) == Reservation(0, 9, [], 0, 9)
    assert ids(manager) == [[0, 1, 2], [3, 4, 5], [N, 6, 7], [N, N, 8]]
    assert manager.reserve(4) == Reservation(9, 13, [], 3, 4)  # what was left out stays out
    assert ids(manager) == [[0, 1, 2, 9], [3, 4, 5, 10], [N, 6, 7, 11], [N, N, 8, 12]]
    assert manager.version == 0


def test_a_row_that_is_padding_to_a_blocks_edge_stores_nothing():
    manager = started(4, 2)
    manager.reserve(8, padding=(0, 8))
    assert ids(manager) == [[0, 1], [N, N]]
    assert manager.reserve(1) == Reservation(8, 9, [], 2, 2)
    assert ids(manager) == [[0, 1, 2], [N, N, 3]]


def test_a_block_that_turns_out_to_be_padding_is_given_back():
    manager = started(8, 2)
    manager.reserve(6, padding=(0, 6))
    assert ids(manager) == [[0, 1], [N, 2]]
    assert manager.blocks_needed(7, padding=(0, 9)) == 4 - 1 - 0
    reservation = manager.reserve(7, padding=(0, 9))
    assert ids(manager) == [[0, 1, 2, 3], [N, N, 4, 5]]
    assert (reservation.changed_from, reservation.needed_blocks, reservation.blanks) == (1, 3, [])
    assert manager.pool.num_free == 2  # block 2 among them
    assert manager.version == 1


def test_a_shared_block_that_is_padding_in_one_row_only_stays_with_the_other():
    manager = started(8, 1)
    manager.reserve(3, padding=(3,))
    manager.reorder([0, 0])
    reservation = manager.reserve(3, padding=(3, 5))
    # Row 1 gives block 0 up, so that row 0 is its last holder and nothing has to be copied.
    assert (reservation.copies, reservation.needed_blocks) == ([], 2)
    assert ids(manager) == [[0, 1], [N, 2]]


def test_a_row_cropped_into_its_padding_gets_a_blank_block():
    manager = started(9, 3)
    manager.reserve(14, padding=(0, 8, 13))
    assert ids(manager) == [[0, 1, 2, 3], [N, N, 4, 5], [N, N, N, 6]]
    manager.crop(7)
    assert ids(manager) == [[0, 1], [N, N], [N, N]]
    # Row 2 goes on with padding, so its second block is none that has to be there.
    assert manager.blocks_needed(2, padding=(0, 7, 9)) == 1 + 2 + 1
    reservation = manager.reserve(2, padding=(0, 7, 9))
    assert reservation.blanks == [ids(manager)[1][1]]
    assert [[i == N for i in row] for row in ids(manager)] == [[0, 0, 0], [1, 0, 0], [1, 1, 0]]
    assert reservation.changed_from == 1
    manager.crop(6)
    assert manager.reserve(1).blanks == [ids(manager)[2][1]]
    manager.crop(5)
    assert manager.reserve(2).blanks == []


def test_a_window_drops_what_padding_left():
    manager = started(20, 3, window=6)
    manager.reserve(12, keep_history=True, padding=(0, 5, 9))
    assert ids(manager) == [[0, 1, 2], [N, 3, 4], [N, N, 5]]
    assert not manager.has_gap(0)
    reservation = manager.reserve(4)  # needs the tokens from 7 on
    assert ids(manager) == [[N, 1, 2, 0], [N, 3, 4, 6], [N, N, 5, 7]]
    assert reservation.needed_blocks == 3 - 1
    assert manager.has_gap(0)
    assert not manager.has_gap(4)
    manager.reserve(12)  # longer than the window
    assert [row[:5] for row in ids(manager)] == [[N, N, 2, 0, N], [N, N, 4, 6, N], [N, N, 5, 7, N]]
    assert manager.has_gap(16)
    assert not manager.has_gap(20)


def test_a_crop_asks_for_the_window_of_the_fullest_row_only():
    manager = started(20, 2, window=4)
    manager.reserve(12, keep_history=True, padding=(0, 11))
    manager.check_crop(5)
    manager.reorder([1])
    manager.crop(5)
    assert ids(manager) == [[N, N]]
    manager.reserve(12)
    with pytest.raises(PagedCacheError, match="history was released"):
        manager.check_crop(12)


@pytest.mark.parametrize("padding", [(1,), (1, 2, 3), (-1, 0), (0, 6)])
def test_padding_that_does_not_fit_changes_nothing(padding):
    manager = started(6, 2)
    before = snapshot(manager)
    with pytest.raises(PagedCacheError, match=r"Expected padding of 2 rows, each 0…5 tokens"):
        manager.reserve(5, padding=padding)
    assert snapshot(manager) == before


def test_too_few_blocks_change_nothing():
    manager = started(5, 2)
    manager.reserve(6, padding=(0, 6))
    before = snapshot(manager)
    assert (
        manager.reserve(11, padding=(0, 8)) is None
    )  # 5 more for row 0 and 2 for row 1, but 1 is given back
    assert snapshot(manager) == before


def test_copies_of_padded_rows_share_what_is_stored():
    manager = started(9, 3)
    manager.reserve(10, padding=(0, 4, 9))
    manager.reorder([2, 1, 1, 0])
    assert ids(manager) == [[N, N, 5], [N, 3, 4], [N, 3, 4], [0, 1, 2]]
    assert manager.reserve(1).copies == [(4, 6)]
    manager.reset()
    assert manager.pool.num_free == 9


def test_dense_columns_are_those_of_rows_that_store_them():
    manager, dense = started(20, 2), DenseBlocks(1, 1)
    dense.provide_rows(2)

    def reserve(tokens: int, padding: tuple[int, ...] = ()) -> Reservation:
        dense.release_full(manager, tokens)
        reservation = manager.reserve(tokens, padding=padding)
        assert reservation is not None
        moves.append(dense.follow(manager, reservation))
        dense.check_integrity(table.ids for table in manager.tables)
        return reservation

    moves: list = []
    reserve(14, (4, 13))
    assert ids(manager) == [[N, 0, 1, 2], [N, N, N, 3]]
    assert dense.columns == [3]  # nobody stores the sinks
    manager.reorder([0, 1])
    manager.crop(11)
    dense.crop(3)
    reservation = reserve(1)
    (blank,) = reservation.blanks
    assert ids(manager) == [[N, 0, 1], [N, N, blank]]
    # Both had no slot: the record of the one, and the zeros of the other, become dense.
    assert [source for source, _ in moves[-1].unsealed] == [1, blank]
    assert dense.columns == [2]
