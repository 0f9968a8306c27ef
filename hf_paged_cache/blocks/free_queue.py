"""A queue of block ids from whose middle a block can be taken in O(1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

# The links' end mark doubles as an index: element -1 of both lists is the sentinel that closes the ring, so
# neither an empty queue nor either end is a special case, and the lists can grow in front of the sentinel. A
# block that is not queued is marked in `_next` only.
_END = -1
_ABSENT = -2


class FreeQueue:
    """Block ids in eviction order: the head goes first.

    A doubly linked list whose links live in two preallocated lists of ints, indexed by block id. `append`,
    `popleft` and `remove` are O(1) and create no objects. The idea is vLLM's free block queue.

    Args:
        num_blocks: Ids `0 … num_blocks - 1` can be queued.
        block_ids: The ids queued at first, head first.
    """

    def __init__(self, num_blocks: int, block_ids: Iterable[int] = ()) -> None:
        self._next = [_ABSENT] * num_blocks + [_END]
        self._previous = [_ABSENT] * num_blocks + [_END]
        self._length = 0
        for block_id in block_ids:
            self.append(block_id)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        """Ids from head to tail. The queue must not change meanwhile."""
        block_id = self._next[_END]
        while block_id != _END:
            yield block_id
            block_id = self._next[block_id]

    def __contains__(self, block_id: object) -> bool:
        return isinstance(block_id, int) and self._knows(block_id) and self._next[block_id] != _ABSENT

    def append(self, block_id: int) -> None:
        """Queue a block at the tail: it goes last.

        Raises:
            AssertionError: The id is unknown or queued already.
        """
        after, before = self._next, self._previous
        if not 0 <= block_id < len(after) - 1 or after[block_id] != _ABSENT:
            raise AssertionError(f"Block {block_id} cannot be queued: it is {self._describe(block_id)}.")
        tail = before[_END]
        after[tail] = block_id
        before[block_id] = tail
        after[block_id] = _END
        before[_END] = block_id
        self._length += 1

    def popleft(self) -> int:
        """Take the head.

        Raises:
            AssertionError: The queue is empty.
        """
        after = self._next
        head = after[_END]
        if head == _END:
            raise AssertionError("A block was taken from an empty queue.")
        second = after[head]
        after[_END] = second
        self._previous[second] = _END
        after[head] = _ABSENT
        self._length -= 1
        return head

    def remove(self, block_id: int) -> None:
        """Take a block out, wherever it stands.

        Raises:
            AssertionError: The id is unknown or not queued.
        """
        after, before = self._next, self._previous
        if not 0 <= block_id < len(after) - 1 or after[block_id] == _ABSENT:
            raise AssertionError(f"Block {block_id} cannot be taken out: it is {self._describe(block_id)}.")
        left, right = before[block_id], after[block_id]
        after[left] = right
        before[right] = left
        after[block_id] = _ABSENT
        self._length -= 1

    def grow(self, num_blocks: int) -> None:
        """Know `num_blocks` more ids. None of them is queued."""
        self._next[_END:_END] = [_ABSENT] * num_blocks
        self._previous[_END:_END] = [_ABSENT] * num_blocks

    def _knows(self, block_id: int) -> bool:
        return 0 <= block_id < len(self._next) - 1

    def _describe(self, block_id: int) -> str:
        if not self._knows(block_id):
            return f"not one of the ids 0…{len(self._next) - 2}"
        return "not queued" if self._next[block_id] == _ABSENT else "queued already"
