"""Rows with a sliding window: exact ids after every step. N marks a block that is not stored."""

from __future__ import annotations

import copy

import pytest

from hf_paged_cache.blocks import NULL_BLOCK as N
from hf_paged_cache.blocks import BlockManager, Reservation
from hf_paged_cache.errors import PagedCacheError
from tests.blocks.rows import ids, slots, snapshot, started


def eight_tokens_in_a_window_of_five(num_blocks: int) -> BlockManager:
    """`[0 1]`, all eight tokens stored: the last step's query at 7 sees 3…7."""
    manager = started(num_blocks, window=5, tokens=7)
    assert manager.reserve(1) is not None
    return manager


def test_window_blocks_are_released_when_the_next_query_cannot_see_them():
    manager = eight_tokens_in_a_window_of_five(4)  # 0: 0123  1: 4567
    assert ids(manager) == [[0, 1]]
    # The query at 8 sees 4…8: block 0 goes, and comes back at once as the next one.
    assert manager.blocks_needed(1) == 0
    assert manager.reserve(1) == Reservation(8, 9, [], changed_from=0, needed_blocks=0)
    assert ids(manager) == [[N, 1, 0]]
    assert manager.version == 1
    assert manager.reserve(3) == Reservation(9, 12, [], 3, 0)  # 1 still holds 5…8
    assert manager.version == 1
    assert manager.reserve(1) == Reservation(12, 13, [], 1, 0)
    assert ids(manager) == [[N, N, 0, 1]]
    assert manager.version == 2


def test_a_window_layer_decodes_for_ever_in_a_fixed_number_of_blocks():
    manager = started(6, 2, window=8, tokens=7)
    for length in range(8, 60):
        assert manager.reserve(1) is not None
        needed = range(max(0, length - 7), length)
        for row in range(2):
            assert N not in [block_id for block_id, _ in slots(manager.tables[row], needed[0], length)]
    assert manager.pool.num_referenced <= 6
    manager.check_integrity()


def test_a_prefill_longer_than_the_window_stores_only_its_last_blocks():
    manager = started(6, 2, window=6)
    # The query at 21 sees 16…21, so 0123 4567 89ab cdef are never stored.
    assert manager.blocks_needed(21) == 4
    assert manager.reserve(21) == Reservation(0, 21, [], changed_from=0, needed_blocks=4)
    assert ids(manager) == [[N, N, N, N, 0, 1], [N, N, N, N, 2, 3]]
    assert slots(manager.tables[1], 15, 17) == [(N, 3), (2, 0)]
    assert manager.reserve(1) == Reservation(21, 22, [], 6, 0)
    assert manager.version == 0


def test_a_long_chunk_keeps_what_its_first_query_sees_until_the_next_step():
    manager = started(4, window=8, tokens=6)  # 0: 0123  1: 45
    assert manager.reserve(14) == Reservation(6, 20, [], changed_from=2, needed_blocks=2)
    assert ids(manager) == [[0, 1, N, 2, 3]]
    assert manager.version == 0
    assert manager.blocks_needed(1) == -1
    assert manager.reserve(1) == Reservation(20, 21, [], changed_from=0, needed_blocks=-1)
    assert ids(manager) == [[N, N, N, 2, 3, 0]]
    assert manager.version == 1


def test_a_window_of_one_token_stores_only_a_started_block():
    manager = started(2, window=1)
    assert manager.reserve(8) == Reservation(0, 8, [], 0, 0)
    assert ids(manager) == [[N, N]]
    assert manager.reserve(2) == Reservation(8, 10, [], 2, 1)
    assert ids(manager) == [[N, N, 0]]


def test_keep_history_stores_and_releases_nothing():
    manager = eight_tokens_in_a_window_of_five(6)
    assert manager.blocks_needed(12, keep_history=True) == 3
    assert manager.reserve(12, keep_history=True) == Reservation(8, 20, [], 2, 3)
    assert ids(manager) == [[0, 1, 2, 3, 4]]
    manager.crop(9)
    assert ids(manager) == [[0, 1, 2]]
    assert manager.reserve(1) == Reservation(9, 10, [], 0, -1)
    assert ids(manager) == [[N, 1, 2]]


@pytest.mark.parametrize(("tokens", "allowed"), [(9, True), (8, True), (7, False), (1, False), (0, True)])
def test_crop_refuses_a_length_whose_window_was_released(tokens, allowed):
    manager = eight_tokens_in_a_window_of_five(4)
    manager.reserve(2)  # N 1 0: tokens 0…3 are gone
    before = snapshot(manager)
    if allowed:
        manager.crop(tokens)
        assert manager.num_tokens == tokens
        return
    with pytest.raises(PagedCacheError, match=f"Cannot crop to {tokens} tokens: history was released"):
        manager.crop(tokens)
    assert snapshot(manager) == before


def test_shared_window_blocks_count_as_freed_only_when_their_last_holder_lets_go():
    manager = eight_tokens_in_a_window_of_five(3)
    manager.reorder([0, 0])  # both rows 0, 1
    assert manager.blocks_needed(1) == 1  # block 0 comes back once, two new ones are needed
    assert manager.reserve(1) == Reservation(8, 9, [], 0, 1)
    assert ids(manager) == [[N, 1, 0], [N, 1, 2]]
    held = eight_tokens_in_a_window_of_five(2)
    held.pool.share([0])
    assert held.blocks_needed(1) == 1
    before = snapshot(held)
    assert held.reserve(1) is None
    assert snapshot(held) == before


def test_taking_a_reservation_back_in_a_window_layer_keeps_what_the_next_query_sees():
    manager = eight_tokens_in_a_window_of_five(4)
    manager.crop(manager.reserve(9).start)
    assert ids(manager) == [[N, 1]]
    assert manager.num_tokens == 8
    assert manager.reserve(1) == Reservation(8, 9, [], 2, 1)


def test_rows_kept_with_history_give_up_what_left_the_window_when_told():
    manager = started(6, 2, window=5)
    manager.reserve(9, keep_history=True)  # [0 1 2] [3 4 5]: 0123 4567 8
    assert manager.release_outside_window()  # the next query sees 5…9
    assert ids(manager) == [[N, 1, 2], [N, 4, 5]]
    assert (manager.version, manager.pool.num_free) == (1, 2)
    assert not manager.release_outside_window()
    assert manager.version == 1


@pytest.mark.parametrize("window", [None, 9])
def test_nothing_is_outside_a_window_that_covers_the_rows(window):
    manager = started(3, window=window, tokens=9)
    assert not manager.release_outside_window()
    assert not BlockManager(3, 4, window).release_outside_window()
    assert ids(manager) == [[0, 1, 2]]
    assert manager.version == 0


@pytest.mark.parametrize("tokens", [10, 9, 8, 7, 1, 0, 11, -1])
def test_check_crop_raises_what_crop_would(tokens):
    manager = eight_tokens_in_a_window_of_five(4)
    manager.reserve(2)  # N 1 0
    before = snapshot(manager)
    errors = []
    for attempt in (manager.check_crop, copy.deepcopy(manager).crop):
        try:
            attempt(tokens)
            errors.append(None)
        except PagedCacheError as error:
            errors.append(str(error))
    assert errors[0] == errors[1]
    assert (errors[0] is None) == (tokens in (10, 9, 8, 0))
    assert snapshot(manager) == before
