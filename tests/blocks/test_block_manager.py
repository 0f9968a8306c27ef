"""Exact ids after every step on tiny pools, blocks of 4 tokens. N marks a block that is not stored."""

from __future__ import annotations

import copy

import pytest

from hf_paged_cache.blocks import NULL_BLOCK as N
from hf_paged_cache.blocks import BlockManager, BlockPool, BlockState, Reservation
from hf_paged_cache.errors import PagedCacheError
from tests.blocks.rows import ids, snapshot, started, states


def test_prefill_gives_each_row_neighbouring_blocks():
    manager = started(6, 2)
    reservation = manager.reserve(9)  # row 0: 0123 4567 8   row 1: likewise
    assert reservation == Reservation(start=0, end=9, copies=[], changed_from=0, needed_blocks=6)
    assert ids(manager) == [[0, 1, 2], [3, 4, 5]]
    assert (manager.batch, manager.num_tokens, manager.pool.num_free, manager.version) == (2, 9, 0, 0)


def test_decode_takes_blocks_only_at_an_edge_and_seals_what_is_full():
    manager = started(6, 2, tokens=3)
    assert ids(manager) == [[0], [1]]
    assert manager.reserve(1) == Reservation(3, 4, [], 1, 0)  # 0123: full, but not sealed yet
    assert states(manager, 0, 1) == "OPEN OPEN"
    assert manager.reserve(1) == Reservation(4, 5, [], 1, 2)  # 0123 4
    assert ids(manager) == [[0, 2], [1, 3]]
    assert states(manager, 0, 1, 2, 3) == "SEALED SEALED OPEN OPEN"
    assert manager.version == 0


def test_a_long_step_seals_every_block_that_was_full_before_it():
    manager = started(5, tokens=9)
    assert manager.reserve(8) == Reservation(9, 17, [], 3, 2)
    assert ids(manager) == [[0, 1, 2, 3, 4]]
    assert states(manager, 0, 1, 2, 3, 4) == "SEALED SEALED OPEN OPEN OPEN"


def test_beams_share_full_blocks_and_copy_only_the_open_one():
    manager = started(6, tokens=6)  # 0: 0123  1: 45
    manager.reorder([0, 0, 0])
    assert ids(manager) == [[0, 1], [0, 1], [0, 1]]
    assert manager.version == 1
    assert manager.blocks_needed(1) == 2
    # Rows 0 and 1 get copies; row 2, the last holder, keeps block 1.
    assert manager.reserve(1) == Reservation(6, 7, [(1, 2), (1, 3)], changed_from=1, needed_blocks=2)
    assert ids(manager) == [[0, 2], [0, 3], [0, 1]]
    assert manager.version == 1
    assert manager.reserve(1) == Reservation(7, 8, [], 2, 0)
    assert manager.reserve(1) is None  # three blocks are needed, two are free
    manager.pool.grow(1)
    assert manager.reserve(1) == Reservation(8, 9, [], 2, 3)
    assert ids(manager) == [[0, 2, 4], [0, 3, 5], [0, 1, 6]]
    assert states(manager, 0, 1, 2, 3, 4) == "SEALED SEALED SEALED SEALED OPEN"


def test_a_fork_at_a_block_edge_copies_nothing():
    manager = started(4, tokens=4)
    manager.reorder([0, 0])
    assert manager.reserve(1) == Reservation(4, 5, [], 1, 2)
    assert ids(manager) == [[0, 1], [0, 2]]
    assert states(manager, 0) == "SEALED"


def test_a_fork_in_an_empty_pool_has_the_same_ids_and_states_and_shares_nothing():
    manager = started(5, 2, tokens=6)  # 0: 0123  1: 45   2, 3: likewise
    manager.reorder([0, 0])
    manager.reserve(1)
    fork = manager.fork(BlockPool(5))
    assert ids(fork) == ids(manager)
    assert states(fork, 0, 1, 2) == states(manager, 0, 1, 2) == "SEALED OPEN OPEN"
    assert [fork.pool.ref_count(block_id) for block_id in (0, 1, 2)] == [2, 1, 1]
    fork.check_integrity()
    fork.reset()
    manager.check_integrity()


def test_a_last_block_that_others_hold_is_copied_for_every_row():
    manager = started(4, tokens=2)
    manager.pool.share([0])
    assert manager.blocks_needed(1) == 1
    assert manager.reserve(1) == Reservation(2, 3, [(0, 1)], 0, 1)
    manager.check_integrity(other_tables=[[0]])
    assert [table.ids for table in manager.tables] == [[1]]


def test_writing_after_a_crop_into_a_sealed_block_reopens_it():
    manager = started(3, tokens=9)
    manager.reserve(1)  # 0: 0123  1: 4567  2: 89
    manager.crop(6)  # 0: 0123  1: 45
    assert ids(manager) == [[0, 1]]
    assert (manager.num_tokens, manager.version, manager.pool.num_free) == (6, 1, 1)
    assert states(manager, 0, 1) == "SEALED SEALED"
    assert manager.reserve(3) == Reservation(6, 9, [], 2, 1)
    assert states(manager, 0, 1) == "SEALED OPEN"
    manager.reserve(1)
    assert ids(manager) == [[0, 1, 2]]
    assert states(manager, 0, 1) == "SEALED SEALED"


def test_writing_after_a_crop_into_a_shared_sealed_block_copies_it():
    manager = started(5, tokens=9)  # 0: 0123  1: 4567  2: 8
    manager.reserve(1)
    manager.reorder([0, 0])
    manager.crop(7)  # both 0, 1 with 1: 456
    assert ids(manager) == [[0, 1], [0, 1]]
    assert manager.reserve(1) == Reservation(7, 8, [(1, 2)], 1, 1)
    assert ids(manager) == [[0, 2], [0, 1]]
    assert states(manager, 0, 1, 2) == "SEALED OPEN OPEN"


@pytest.mark.parametrize(("tokens", "left"), [(8, [[0, 1], [3, 4]]), (1, [[0], [3]]), (0, [[], []])])
def test_crop_releases_the_blocks_behind(tokens, left):
    manager = started(6, 2, tokens=9)
    manager.crop(tokens)
    assert ids(manager) == left
    assert manager.pool.num_free == 6 - sum(map(len, left))


def test_crop_to_the_present_length_changes_nothing():
    manager = started(2, tokens=5)
    before = snapshot(manager)
    manager.crop(5)
    assert snapshot(manager) == before


@pytest.mark.parametrize(
    ("num_blocks", "batch", "tokens", "beams", "new_tokens"),
    [
        (2, 1, 8, [0], 1),  # a new block
        (3, 2, 4, [0, 1], 1),  # one block for two rows
        (2, 1, 6, [0, 0], 1),  # a copy
        (3, 1, 6, [0, 0], 3),  # a copy and two new blocks, one is free
        (3, 1, 9, [0], 9),
    ],
)
def test_exhaustion_is_none_and_changes_nothing(num_blocks, batch, tokens, beams, new_tokens):
    manager = started(num_blocks, batch, tokens=tokens)
    manager.reorder(beams)
    before = snapshot(manager)
    assert manager.blocks_needed(new_tokens) > manager.pool.num_free
    assert manager.reserve(new_tokens) is None
    assert snapshot(manager) == before


REORDERS = [
    # rows 0, 1, 2 begin as [0 1] [2 3] [4 5]
    ([0, 1, 2], [[0, 1], [2, 3], [4, 5]], 0),
    ([2, 0, 1], [[4, 5], [0, 1], [2, 3]], 0),
    ([1, 1, 2], [[2, 3], [2, 3], [4, 5]], 2),
    ([1, 1, 1], [[2, 3], [2, 3], [2, 3]], 4),
    ([2], [[4, 5]], 4),
    ([0, 2], [[0, 1], [4, 5]], 2),
    ([0, 0, 1, 1, 2, 2], [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]], 0),
]


@pytest.mark.parametrize(("row_indices", "expected", "freed"), REORDERS)
def test_reorder_selects_repeats_and_permutes_rows(row_indices, expected, freed):
    manager = started(7, 3, tokens=6)
    manager.reorder(row_indices)
    assert ids(manager) == expected
    assert manager.batch == len(row_indices)
    assert manager.pool.num_free == 1 + freed
    assert manager.version == (0 if row_indices == [0, 1, 2] else 1)


def test_rows_do_not_share_their_tables_after_a_reorder():
    manager = started(6, 2, tokens=4)
    manager.reorder([1, 1])
    manager.reserve(1)
    assert ids(manager) == [[1, 0], [1, 2]]


def test_reorder_leaves_the_tables_of_rows_that_stay_alone():
    manager = started(6, 3, tokens=4)
    first, last = manager.tables[0], manager.tables[2]
    manager.reorder([0, 2, 2])
    assert manager.tables[0] is first
    assert manager.tables[2] is last


def test_beams_that_swap_for_many_steps_lose_no_block():
    manager = started(11, tokens=5)
    manager.reorder([0, 0, 0])
    for step in range(8):
        manager.reorder([(row * step + step) % 3 for row in range(3)])
        assert manager.reserve(1) is not None
        manager.check_integrity()
    manager.reset()
    assert manager.pool.num_free == 11


def test_crop_takes_a_reservation_back_and_keeps_its_copies():
    manager = started(7, tokens=6)
    manager.reorder([0, 0, 0])
    reservation = manager.reserve(3)  # 2 copies and 3 new blocks
    assert ids(manager) == [[0, 2, 4], [0, 3, 5], [0, 1, 6]]
    manager.crop(reservation.start)
    assert ids(manager) == [[0, 2], [0, 3], [0, 1]]
    assert manager.pool.num_free == 3
    assert manager.version == 2


@pytest.mark.parametrize(("later", "free", "pending"), [(False, 6, 0), (True, 3, 3)])
def test_reset_forgets_the_batch(later, free, pending):
    manager = started(6, tokens=6)
    manager.reorder([0, 0])
    manager.reserve(3)  # [0 2 3] [0 1 4]
    manager.crop(8)  # [0 2] [0 1]
    manager.reset(later=later)
    assert (manager.batch, manager.num_tokens, manager.tables) == (0, 0, [])
    assert (manager.pool.num_free, manager.pool.num_pending) == (free, pending)
    manager.check_integrity()
    manager.start(1)
    assert manager.reserve(24) is not None
    assert manager.version == 3


def test_reset_makes_the_same_blocks_come_out_again_in_the_same_order():
    manager = started(9, 2, tokens=9)
    before = copy.deepcopy(ids(manager))
    manager.reset()
    manager.start(2)
    manager.reserve(9)
    assert ids(manager) == before


def test_reset_of_no_rows_changes_nothing():
    manager = BlockManager(2, 4)
    manager.reset()
    assert manager.version == 0


def test_a_deep_copy_goes_its_own_way():
    manager = started(4, window=5, tokens=6)
    twin = copy.deepcopy(manager)
    before = snapshot(manager)
    twin.reserve(3)
    twin.reset()
    twin.check_integrity()
    assert snapshot(manager) == before


MISUSES = [
    (lambda m: m.start(1), "Cannot start 1 rows: there are 2 already. Call reset() first."),
    (lambda m: m.reserve(0), "Expected num_new_tokens ≥ 1, got 0."),
    (lambda m: m.blocks_needed(-1), "Expected num_new_tokens ≥ 1, got -1."),
    (lambda m: m.crop(6), "Expected 0 ≤ num_tokens ≤ 5 (the rows' length), got 6."),
    (lambda m: m.crop(-1), "Expected 0 ≤ num_tokens ≤ 5 (the rows' length), got -1."),
    (lambda m: m.reorder([]), "Expected at least one row index, all of 0…1, got []."),
    (lambda m: m.reorder([0, 2]), "Expected at least one row index, all of 0…1, got [0, 2]."),
    (lambda m: m.reorder([-1, 0]), "Expected at least one row index, all of 0…1, got [-1, 0]."),
    (lambda m: BlockManager(0, 4), "Expected num_blocks ≥ 1, got 0."),
    (lambda m: BlockManager(4, 0), "Expected block_size ≥ 1, got 0."),
    (lambda m: BlockManager(4, 4, 0), "Expected window ≥ 1, got 0."),
    (lambda m: BlockManager(4, 4).start(0), "Expected batch ≥ 1, got 0."),
    (lambda m: BlockManager(4, 4).reserve(1), "There are no rows to reserve tokens for. Call start(batch)"),
]


@pytest.mark.parametrize(("misuse", "message"), MISUSES)
def test_misuse_is_refused_with_numbers_and_changes_nothing(misuse, message):
    manager = started(5, 2, tokens=5)
    before = snapshot(manager)
    with pytest.raises(PagedCacheError) as error:
        misuse(manager)
    assert str(error.value).startswith(message)
    assert snapshot(manager) == before


def append_token(manager: BlockManager) -> None:
    manager.tables[1].num_tokens += 1


def forget_block(manager: BlockManager) -> None:
    manager.pool.release([manager.tables[1].ids[0]])
    manager.tables[1].ids[0] = N


def forget_both(manager: BlockManager) -> None:
    forget_block(manager)
    manager.pool.release([manager.tables[0].ids[0]])
    manager.tables[0].ids[0] = N


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (append_token, "Row 1 has 7 tokens after 0 of padding, in 2 blocks of 4, but row 0 ends at 6."),
        (forget_block, "Logical block 0 of row 1 is not stored, but there is no window."),
        (forget_both, "Logical block 0 of row 0 is not stored, but there is no window."),
        (lambda m: m.pool.make_writable(2), "Block 2 (row 1, logical block 0) is full but still open."),
        (lambda m: m.pool.share([3]), "Block 3 (OPEN) counts 2 references, but the tables hold 1."),
    ],
)
def test_integrity_says_what_is_wrong(damage, message):
    manager = started(5, 2, tokens=5)
    manager.reserve(1)  # [0 1] [2 3]
    manager.check_integrity()
    damage(manager)
    with pytest.raises(AssertionError) as error:
        manager.check_integrity()
    assert str(error.value) == message


def test_states_survive_sharing_between_rows():
    manager = started(4, tokens=8)
    manager.reorder([0, 0])
    manager.reserve(1)
    assert manager.pool.state(0) is BlockState.SEALED
    manager.reorder([1])
    assert states(manager, 0, 1) == "SEALED SEALED"
    assert manager.pool.num_free == 1
