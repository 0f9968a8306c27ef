from __future__ import annotations

import pytest

from hf_paged_cache.blocks import FreeQueue


def test_blocks_leave_in_the_order_they_came():
    queue = FreeQueue(4, [2, 0, 3])
    queue.append(1)
    assert [queue.popleft() for _ in range(4)] == [2, 0, 3, 1]
    assert len(queue) == 0
    assert list(queue) == []


@pytest.mark.parametrize(
    ("removed", "left"),
    [
        ([0], [1, 2, 3]),
        ([3], [0, 1, 2]),
        ([1], [0, 2, 3]),
        ([1, 2], [0, 3]),
        ([2, 1, 3], [0]),
        ([0, 1, 2, 3], []),
    ],
)
def test_a_block_leaves_from_anywhere_without_disturbing_the_others(removed, left):
    queue = FreeQueue(4, range(4))
    for block_id in removed:
        queue.remove(block_id)
    assert list(queue) == left
    assert len(queue) == len(left)
    assert [block_id for block_id in range(4) if block_id in queue] == left
    for block_id in removed:
        queue.append(block_id)
    assert list(queue) == left + removed


def test_an_empty_queue_fills_again():
    queue = FreeQueue(2, [1])
    assert queue.popleft() == 1
    queue.append(0)
    queue.append(1)
    assert list(queue) == [0, 1]


def test_growing_keeps_the_order_and_makes_new_ids_known():
    queue = FreeQueue(2, [1, 0])
    queue.grow(2)
    assert list(queue) == [1, 0]
    queue.append(3)
    queue.append(2)
    assert list(queue) == [1, 0, 3, 2]
    queue.remove(0)
    assert list(queue) == [1, 3, 2]


@pytest.mark.parametrize("foreign", [-2, -1, 2, 7, "0"])
def test_ids_out_of_range_are_not_in_the_queue(foreign):
    assert foreign not in FreeQueue(2, [0, 1])


@pytest.mark.parametrize(
    ("misuse", "sentence"),
    [
        (lambda queue: queue.append(0), "Block 0 cannot be queued: it is queued already."),
        (lambda queue: queue.append(3), "Block 3 cannot be queued: it is not one of the ids 0…2."),
        (lambda queue: queue.append(-1), "Block -1 cannot be queued: it is not one of the ids 0…2."),
        (lambda queue: queue.remove(2), "Block 2 cannot be taken out: it is not queued."),
        (lambda queue: queue.remove(-1), "Block -1 cannot be taken out: it is not one of the ids 0…2."),
        (lambda queue: [queue.popleft() for _ in range(3)], "A block was taken from an empty queue."),
    ],
)
def test_misuse_is_an_assertion_with_a_sentence(misuse, sentence):
    with pytest.raises(AssertionError) as error:
        misuse(FreeQueue(3, [0, 1]))
    assert str(error.value) == sentence


def test_misuse_changes_nothing():
    queue = FreeQueue(3, [0, 1])
    for misuse in (lambda: queue.append(1), lambda: queue.remove(2)):
        with pytest.raises(AssertionError):
            misuse()
        assert list(queue) == [0, 1]
        assert len(queue) == 2
