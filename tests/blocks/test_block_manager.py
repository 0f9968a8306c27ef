"""Exact ids after every step on tiny pools, blocks of 4 tokens. N marks a block that is not stored."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest

from hf_paged_cache.blocks import NULL_BLOCK as N
from hf_paged_cache.blocks import BlockManager, BlockState, Reservation
from hf_paged_cache.errors import PagedCacheError


def started(num_blocks: int, batch: int = 1, *, window: int | None = None, tokens: int = 0) -> BlockManager:
    manager = BlockManager(num_blocks, 4, window)
    manager.start(batch)
    if tokens:
        assert manager.reserve(tokens) is not None
    return manager


def eight_tokens_in_a_window_of_five(num_blocks: int) -> BlockManager:
    """`[0 1]`, all eight tokens stored: the last step's query at 7 sees 3…7."""
    manager = started(num_blocks, window=5, tokens=7)
    assert manager.reserve(1) is not None
    return manager


def ids(manager: BlockManager) -> list[list[int]]:
    manager.check_integrity()
    return [table.ids for table in manager.tables]


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
            assert N not in [block_id for block_id, _ in manager.tables[row].slots(needed[0], length)]
    assert manager.pool.num_referenced <= 6
    manager.check_integrity()


def test_a_prefill_longer_than_the_window_stores_only_its_last_blocks():
    manager = started(6, 2, window=6)
    # The query at 21 sees 16…21, so 0123 4567 89ab cdef are never stored.
    assert manager.blocks_needed(21) == 4
    assert manager.reserve(21) == Reservation(0, 21, [], changed_from=0, needed_blocks=4)
    assert ids(manager) == [[N, N, N, N, 0, 1], [N, N, N, N, 2, 3]]
    assert manager.tables[1].slots(15, 17) == [(N, 3), (2, 0)]
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


def test_cancel_takes_back_new_blocks_and_copies():
    manager = started(7, tokens=6)
    manager.reorder([0, 0, 0])
    before = snapshot(manager)
    reservation = manager.reserve(3)  # 2 copies and 3 new blocks
    assert ids(manager) == [[0, 2, 4], [0, 3, 5], [0, 1, 6]]
    manager.cancel(reservation)
    assert ids(manager) == [[0, 1], [0, 1], [0, 1]]
    assert snapshot(manager)["tables"] == before["tables"]
    assert manager.pool.num_free == 5
    assert manager.version == 2


def test_cancel_in_a_window_layer_keeps_what_the_next_query_sees():
    manager = eight_tokens_in_a_window_of_five(4)
    manager.cancel(manager.reserve(9))
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


def release_more(manager: BlockManager) -> None:
    manager.window = 1
    assert manager.release_outside_window()


@pytest.mark.parametrize(
    "meanwhile",
    [
        release_more,
        lambda manager: manager.reserve(1),
        lambda manager: manager.crop(6),
        lambda manager: manager.reorder([0, 0]),
        lambda manager: manager.reset(),
    ],
)
def test_only_the_latest_reservation_can_be_cancelled(meanwhile):
    manager = started(6, tokens=5)
    reservation = manager.reserve(2)
    meanwhile(manager)
    before = snapshot(manager)
    with pytest.raises(PagedCacheError, match="Only the latest reservation can be cancelled"):
        manager.cancel(reservation)
    assert snapshot(manager) == before


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
        (append_token, "Row 1 has 7 tokens in 2 blocks of 4, but row 0 has 6 tokens."),
        (forget_block, "Logical block 0 is stored in only one of the rows 0 and 1."),
        (forget_both, "Logical block 0 of row 0 is not stored, but there is no window."),
        (lambda m: m.pool.reopen(2), "Block 2 (row 1, logical block 0) is full but still open."),
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


def test_bookkeeping_imports_without_tensor_libraries():
    code = (
        "import sys, hf_paged_cache.blocks;"
        "print([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
