"""Exact ids after every step on tiny pools.

One letter per block: `o` open, `s` sealed, `c` cached, `p` pending, `.` free; `o2` has two references.
"""

from __future__ import annotations

import copy

import pytest

from hf_paged_cache.blocks import BlockPool
from hf_paged_cache.errors import PagedCacheError

LETTERS = {"FREE": ".", "OPEN": "o", "SEALED": "s", "CACHED": "c", "PENDING": "p"}


def drawn(pool: BlockPool) -> str:
    """One letter per block, a digit behind it where there are several references."""
    counts = [pool.ref_count(block_id) for block_id in range(pool.num_blocks)]
    return " ".join(
        LETTERS[pool.state(block_id).name] + (str(count) if count > 1 else "")
        for block_id, count in enumerate(counts)
    )


def sealed_pool(num_blocks: int, num_sealed: int) -> BlockPool:
    pool = BlockPool(num_blocks)
    for block_id in pool.allocate(num_sealed):
        pool.seal(block_id)
    return pool


def test_a_new_pool_hands_out_blocks_in_physical_order():
    pool = BlockPool(5)
    assert pool.allocate(2) == [0, 1]  # o o . . .
    assert pool.allocate(3) == [2, 3, 4]  # o o o o o
    assert drawn(pool) == "o o o o o"
    assert (pool.num_blocks, pool.num_free, pool.num_referenced) == (5, 0, 5)


def test_allocating_nothing_is_not_scarcity():
    pool = BlockPool(1)
    pool.allocate(1)
    assert pool.allocate(0) == []


def test_scarcity_is_none_and_changes_nothing():
    pool = sealed_pool(4, 3)
    pool.release([0], keep=True)
    pool.release_later([1])  # c p s .
    before = copy.deepcopy(vars(pool))
    assert not pool.can_allocate(4)
    assert pool.allocate(4) is None
    assert drawn(pool) == "c p s ."
    after = vars(pool)
    assert before["_pending"] == after["_pending"]
    assert before["_free"] == after["_free"]
    assert list(before["_cached"]) == list(after["_cached"])


def test_released_blocks_come_out_again_first_and_in_sequence_order():
    pool = BlockPool(6)
    pool.allocate(4)  # o o o o . .
    pool.release([1, 2, 3])  # o . . . . .
    assert pool.allocate(4) == [1, 2, 3, 4]


def test_pending_blocks_are_not_handed_out_while_free_ones_suffice():
    pool = BlockPool(4)
    pool.allocate(2)
    pool.release_later([0, 1])  # p p . .
    assert (pool.num_free, pool.num_pending) == (2, 2)
    assert pool.allocate(2) == [2, 3]
    assert drawn(pool) == "p p o o"


def test_allocate_takes_free_then_pending_then_the_oldest_cached():
    pool = sealed_pool(6, 5)
    pool.release([4], keep=True)
    pool.release([2], keep=True)
    pool.release_later([0, 1])  # p p c s c .
    assert pool.can_allocate(5)
    assert not pool.can_allocate(6)
    # 1 is the tail of what was released later, so it is returned first; 4 was cached before 2.
    assert pool.allocate(2) == [1, 5]  # p o c s c o
    assert drawn(pool) == "p o c s c o"
    assert pool.allocate(2) == [0, 4]  # o o c s o o
    assert drawn(pool) == "o o c s o o"
    assert pool.allocate(1) == [2]
    assert pool.allocate(1) is None


def test_the_tail_of_a_sequence_is_evicted_before_its_prefix():
    pool = sealed_pool(3, 3)
    pool.release([0, 1, 2], keep=True)  # c c c
    assert [pool.allocate(1) for _ in range(3)] == [[2], [1], [0]]


def test_sequences_are_evicted_in_the_order_of_their_release():
    pool = sealed_pool(4, 4)
    pool.release([2, 3], keep=True)
    pool.release([0, 1], keep=True)
    assert pool.allocate(4) == [3, 2, 1, 0]


def test_keep_forgets_open_blocks():
    pool = sealed_pool(3, 2)
    assert pool.allocate(1) == [2]  # s s o
    pool.release([0, 1, 2], keep=True)
    assert drawn(pool) == "c c ."


def test_a_shared_block_stays_until_its_last_reference_goes():
    pool = sealed_pool(2, 1)
    pool.share([0, 0])
    assert drawn(pool) == "s3 ."
    pool.release([0, 0])
    assert drawn(pool) == "s ."
    pool.release([0])
    assert drawn(pool) == ". ."


def test_sharing_a_cached_block_revives_it():
    pool = sealed_pool(3, 3)
    pool.release([0, 1, 2], keep=True)  # c c c, evicted in the order 2 1 0
    pool.share([1])  # c s c
    assert drawn(pool) == "c s c"
    assert pool.allocate(2) == [2, 0]
    assert pool.allocate(1) is None


def test_a_cached_block_listed_twice_is_revived_with_two_references():
    pool = sealed_pool(1, 1)
    pool.release([0], keep=True)
    pool.share([0, 0])
    assert drawn(pool) == "s2"


def test_pending_blocks_return_in_batches():
    pool = BlockPool(5)
    pool.allocate(5)
    pool.share([0])
    pool.release_later([0, 1, 2, 3])  # o p p p o: block 0 has an owner left
    assert drawn(pool) == "o p p p o"
    assert (pool.num_free, pool.num_pending, pool.num_referenced) == (0, 3, 2)
    assert pool.flush_pending(2) == 2  # the tail first
    assert drawn(pool) == "o p . . o"
    assert pool.flush_pending() == 1
    assert pool.flush_pending() == 0
    assert pool.allocate(3) == [1, 2, 3]


def test_make_writable_keeps_a_block_with_one_owner_and_reopens_it():
    pool = sealed_pool(2, 1)
    assert pool.make_writable(0) == 0
    assert drawn(pool) == "o ."
    assert pool.make_writable(0) == 0


@pytest.mark.parametrize("state", ["o", "s"])
def test_make_writable_gives_a_fresh_block_where_others_see_the_old_one(state):
    pool = BlockPool(3)
    pool.allocate(1)
    if state == "s":
        pool.seal(0)
    pool.share([0])
    assert pool.make_writable(0) == 1
    assert drawn(pool) == f"{state} o ."


def test_make_writable_without_a_free_block_is_none_and_changes_nothing():
    pool = sealed_pool(1, 1)
    pool.share([0])
    assert pool.make_writable(0) is None
    assert drawn(pool) == "s2"


@pytest.mark.parametrize("revived", [0, 1, 2])
def test_a_revived_block_leaves_the_order_of_the_others_as_it_is(revived):
    pool = sealed_pool(3, 3)
    pool.release([2, 1, 0], keep=True)
    pool.share([revived])
    pool.release([revived], keep=True)  # the last again
    assert pool.allocate(3) == [i for i in range(3) if i != revived] + [revived]


def test_growing_adds_blocks_behind_the_free_ones_and_before_the_cached_ones():
    pool = sealed_pool(3, 2)
    pool.release([0], keep=True)  # c s .
    pool.grow(2)  # c s . . .
    assert drawn(pool) == "c s . . ."
    assert pool.allocate(4) == [2, 3, 4, 0]
    pool.seal(4)
    pool.release([4], keep=True)
    assert drawn(pool) == "o s o o c"


def unhappy_pool() -> BlockPool:
    """`.` 4; `o2` 0; `s2` 1; `c` 2; `p` 3: one block of each kind."""
    pool = sealed_pool(5, 3)
    pool.allocate(1)
    pool.make_writable(0)
    pool.share([0, 1])
    pool.release([2], keep=True)
    pool.release_later([3])
    return pool


MISUSES = [
    (lambda pool: pool.release([4]), "Cannot release block 4: it is FREE, references: 0;"),
    (lambda pool: pool.release([2]), "Cannot release block 2: it is CACHED, references: 0;"),
    (lambda pool: pool.release_later([3]), "Cannot release block 3: it is PENDING, references: 0;"),
    (lambda pool: pool.release([1, 1, 1]), "Cannot release block 1: it is SEALED, references: 2;"),
    (lambda pool: pool.release([7, 0, 1]), "Cannot release block 7: unknown id, expected one of 0…4."),
    (lambda pool: pool.release([-1, 0]), "Cannot release block -1: unknown id"),
    (lambda pool: pool.share([2, 4]), "Cannot share block 4: it is FREE, references: 0;"),
    (lambda pool: pool.share([0, 3]), "Cannot share block 3: it is PENDING, references: 0;"),
    (lambda pool: pool.share([2, -1]), "Cannot share block -1: unknown id"),
    (lambda pool: pool.seal(1), "Cannot seal block 1: it is SEALED, references: 2;"),
    (lambda pool: pool.seal(4), "Cannot seal block 4: it is FREE, references: 0;"),
    (lambda pool: pool.make_writable(2), "Cannot make writable block 2: it is CACHED, references: 0;"),
    (lambda pool: pool.make_writable(-5), "Cannot make writable block -5: unknown id"),
    (lambda pool: pool.allocate(-1), "Expected num_blocks ≥ 0, got -1."),
    (lambda pool: pool.flush_pending(-1), "Expected max_blocks ≥ 0, got -1."),
    (lambda pool: pool.grow(-1), "Expected num_blocks ≥ 0, got -1."),
    (lambda pool: pool.state(5), "Cannot look at block 5: unknown id"),
    (lambda pool: pool.ref_count(-1), "Cannot look at block -1: unknown id"),
    (lambda pool: BlockPool(0), "Expected num_blocks ≥ 1, got 0."),
]


@pytest.mark.parametrize(("misuse", "message"), MISUSES)
def test_misuse_names_block_and_state_and_changes_nothing(misuse, message):
    pool = unhappy_pool()
    assert drawn(pool) == "o2 s2 c p ."
    with pytest.raises(PagedCacheError) as error:
        misuse(pool)
    assert str(error.value).startswith(message)
    assert drawn(pool) == "o2 s2 c p ."
    pool.check_integrity([[0, 1], [0, 1]])


def test_integrity_accepts_the_tables_that_hold_the_references():
    pool = unhappy_pool()
    pool.check_integrity()
    pool.check_integrity([[0, -1, 1], [-1, 1, 0]])


def lose_free_block(pool: BlockPool) -> None:
    pool._free.pop()


def count_twice(pool: BlockPool) -> None:
    pool._pending.append(4)


def swap(pool: BlockPool) -> None:
    pool._cached.clear()
    pool._cached[4] = None
    pool._free[-1] = 2


@pytest.mark.parametrize(
    ("damage", "tables", "message"),
    [
        (
            lose_free_block,
            None,
            "Blocks were lost or counted twice: free 0 + pending 1 + referenced 2 + cached 1 = 4"
            " (4 different), but the pool has a total of 5.",
        ),
        (
            count_twice,
            None,
            "Blocks were lost or counted twice: free 1 + pending 2 + referenced 2 + cached 1 = 6"
            " (5 different), but the pool has a total of 5.",
        ),
        (
            swap,
            None,
            "Block 2 is marked CACHED with 0 references, but is kept among blocks of another state.",
        ),
        (lambda pool: None, [[0, 1], [0]], "Block 1 (SEALED) counts 2 references, but the tables hold 1."),
        (
            lambda pool: None,
            [[0, 1], [0, 1, 4]],
            "Block 4 (FREE) counts 0 references, but the tables hold 1.",
        ),
        (lambda pool: None, [[5]], "A table holds block 5 of a pool of 5."),
    ],
)
def test_integrity_says_every_term(damage, tables, message):
    pool = unhappy_pool()
    damage(pool)
    with pytest.raises(AssertionError) as error:
        pool.check_integrity(tables)
    assert str(error.value) == message
