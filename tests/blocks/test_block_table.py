from __future__ import annotations

import pytest

from hf_paged_cache.blocks import NULL_BLOCK, BlockTable
from hf_paged_cache.errors import PagedCacheError
from tests.blocks.rows import slots


def table_of(ids: list[int], num_tokens: int, block_size: int = 4) -> BlockTable:
    return BlockTable(block_size, ids, num_tokens)


@pytest.mark.parametrize(
    ("num_tokens", "new_tokens", "needed"),
    [(0, 0, 0), (0, 1, 1), (0, 4, 1), (0, 5, 2), (3, 1, 0), (3, 2, 1), (4, 1, 1), (4, 0, 0), (6, 11, 3)],
)
def test_blocks_needed_counts_the_room_left_in_the_last_block(num_tokens, new_tokens, needed):
    assert table_of(list(range(-(-num_tokens // 4))), num_tokens).blocks_needed(new_tokens) == needed


def test_tokens_fill_the_last_block_before_a_new_one():
    table = BlockTable(4)
    table.append(6, [7, 2])  # 7: 0123  2: 45
    assert slots(table, 3, 6) == [(7, 3), (2, 0), (2, 1)]
    table.append(2, [])  # 2: 4567
    table.append(1, [5])  # 5: 8
    assert table.ids == [7, 2, 5]
    assert table.num_tokens == 9
    assert slots(table, 7, 9) == [(2, 3), (5, 0)]


@pytest.mark.parametrize(
    ("num_tokens", "dropped", "left"),
    [
        (10, [], [7, 2, 5]),
        (9, [], [7, 2, 5]),
        (8, [5], [7, 2]),
        (5, [5], [7, 2]),
        (4, [2, 5], [7]),
        (0, [7, 2, 5], []),
    ],
)
def test_crop_returns_the_blocks_without_tokens(num_tokens, dropped, left):
    table = table_of([7, 2, 5], 10)
    assert table.crop(num_tokens) == dropped
    assert (table.ids, table.num_tokens) == (left, num_tokens)


def test_drop_before_gives_up_whole_blocks_once():
    table = table_of([7, 2, 5], 10)
    assert table.drop_before(3) == []
    assert table.drop_before(7) == [7]  # token 4…6 keep block 2
    assert table.ids == [NULL_BLOCK, 2, 5]
    assert table.drop_before(7) == []
    assert table.drop_before(10) == [2]  # block 5 is not full
    assert table.ids == [NULL_BLOCK, NULL_BLOCK, 5]
    assert table.num_tokens == 10
    assert slots(table, 7, 9) == [(NULL_BLOCK, 3), (5, 0)]


def test_blocks_appended_where_dropped_ones_were_cropped_can_be_dropped():
    table = table_of([7, 2, 5], 12)
    assert table.drop_before(12) == [7, 2, 5]
    assert table.crop(0) == []
    table.append(4, [3])
    assert table.drop_before(4) == [3]


def test_crop_does_not_return_null_blocks():
    table = table_of([NULL_BLOCK, NULL_BLOCK, 5], 9)
    assert table.crop(4) == [5]
    assert table.ids == [NULL_BLOCK]


def test_a_fork_goes_its_own_way():
    table = table_of([NULL_BLOCK, 2], 6)
    fork = table.fork()
    fork.append(3, [9])
    table.drop_before(0)
    table.crop(3)
    assert (fork.ids, fork.num_tokens) == ([NULL_BLOCK, 2, 9], 9)
    assert (table.ids, table.num_tokens) == ([NULL_BLOCK], 3)


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda t: t.append(3, []), "Expected 1 block ids for 3 tokens after 6 in blocks of 4, got 0."),
        (lambda t: t.append(2, [9]), "Expected 0 block ids for 2 tokens after 6 in blocks of 4, got 1."),
        (lambda t: t.append(-1, []), "Expected num_tokens ≥ 0 new tokens, got -1."),
        (lambda t: t.crop(7), "Expected 0 ≤ num_tokens ≤ 6 tokens, got 7."),
        (lambda t: t.crop(-1), "Expected 0 ≤ num_tokens ≤ 6 tokens, got -1."),
        (lambda t: t.drop_before(7), "Expected 0 ≤ token ≤ 6 tokens, got 7."),
        (lambda t: BlockTable(0), "Expected block_size ≥ 1, got 0."),
    ],
)
def test_misuse_is_refused_with_numbers_and_changes_nothing(misuse, message):
    table = table_of([7, 2], 6)
    with pytest.raises(PagedCacheError) as error:
        misuse(table)
    assert str(error.value) == message
    assert (table.ids, table.num_tokens) == ([7, 2], 6)
