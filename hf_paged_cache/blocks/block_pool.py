"""References to the blocks of a pool, and which blocks can be had."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from hf_paged_cache.errors import PagedCacheError

from .block import NULL_BLOCK, BlockCounters, BlockRun, BlockState

# Plain ints beside the enum: its members cost an attribute look-up for every block of every call.
_FREE, _OPEN, _SEALED, _CACHED, _PENDING = (int(state) for state in BlockState)


class BlockPool:
    """Reference counts and states of the blocks `0 … num_blocks - 1`; holds no content.

    Blocks are handed out in this order: (1) free blocks, the latest returned first. At first that is 0, 1, 2,
    …: neighbours in memory are faster to read. Later it prefers memory that was touched before over pages the
    system has yet to supply. (2) pending blocks, as many as are missing. (3) cached blocks, the one cached
    longest ago first (their content is forgotten).

    `release`, `release_later` walk the ids they get from the **last to the first**. So the tail of a sequence
    is evicted before its prefix, which others are likelier to share; and free blocks come out again in the
    order of the sequence: after `release([0, 1, 2])`, `allocate(3)` gives `[0, 1, 2]`.

    Every method either does all of its work, or returns `None` with nothing changed where blocks are scarce,
    or raises a PagedCacheError with nothing changed: for a number that is too low, an unknown id, or a block
    whose state or references do not allow it. An id that is listed twice counts twice.
    """

    def __init__(self, num_blocks: int) -> None:
        _require_at_least(1, num_blocks, "num_blocks")
        self.counters = BlockCounters()  # what happened so far
        self._ref_counts = [0] * num_blocks
        self._states = bytearray(num_blocks)
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the last one is handed out next
        self._cached: OrderedDict[int, None] = OrderedDict()  # leaves from its middle in O(1) when revived
        self._pending: deque[int] = deque()

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now: free and cached ones. Pending ones come on top of these."""
        return len(self._free) + len(self._cached)

    @property
    def num_pending(self) -> int:
        """Blocks given up with `release_later` and not returned yet."""
        return len(self._pending)

    @property
    def num_referenced(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - self.num_free - self.num_pending

    def state(self, block_id: int) -> BlockState:
        """The state of a block."""
        return BlockState(self._states[self._known(block_id)])

    def ref_count(self, block_id: int) -> int:
        """How many references a block has."""
        return self._ref_counts[self._known(block_id)]

    def runs(self) -> list[BlockRun]:
        """All blocks in the order of their ids, those that are alike put together. Walks the pool."""
        found, first = [], 0
        for (state, holders), alike in groupby(zip(self._states, self._ref_counts, strict=True)):
            count = sum(1 for _ in alike)
            found.append(BlockRun(first, count, BlockState(state), holders))
            first += count
        return found

    def can_allocate(self, num_blocks: int) -> bool:
        """Whether `allocate(num_blocks)` would succeed: free, cached and pending blocks suffice."""
        return num_blocks <= self.num_free + self.num_pending

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Hand out blocks, open, with one reference each, in the order described on the class.

        Flushes as many pending blocks as free ones are missing, then evicts cached ones. `None` when there
        are too few of all.
        """
        _require_at_least(0, num_blocks, "num_blocks")
        if not self.can_allocate(num_blocks):
            return None
        if num_blocks > len(self._free):
            self.flush_pending(num_blocks - len(self._free))
        from_stack = min(num_blocks, len(self._free))
        split = len(self._free) - from_stack
        block_ids = self._free[split:][::-1]
        del self._free[split:]
        block_ids += [self._cached.popitem(last=False)[0] for _ in range(num_blocks - from_stack)]
        self.counters.taken += num_blocks
        self.counters.evicted += num_blocks - from_stack
        states, counts = self._states, self._ref_counts
        for block_id in block_ids:
            states[block_id] = _OPEN
            counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Sequence[int]) -> None:
        """Add one reference to each block, which has content. Cached blocks are revived as sealed."""
        states, counts, num_blocks = self._states, self._ref_counts, len(self._ref_counts)
        for block_id in block_ids:
            if not 0 <= block_id < num_blocks or states[block_id] in (_FREE, _PENDING):
                raise self._misuse("share", block_id, "free and pending blocks have no content to share")
        revived = 0
        for block_id in block_ids:
            if states[block_id] == _CACHED:
                del self._cached[block_id]
                states[block_id] = _SEALED
                revived += 1
            counts[block_id] += 1
        self.counters.revived += revived
        self.counters.shared += len(block_ids) - revived

    def release(self, block_ids: Sequence[int], *, keep: bool = False) -> None:
        """Drop one reference to each block, from the last listed to the first.

        One without references becomes free or, if it is sealed and `keep` is set, the last to be evicted.
        """
        states, free = self._states, self._free
        for block_id in self._drop_references(block_ids):
            if keep and states[block_id] == _SEALED:
                states[block_id] = _CACHED
                self._cached[block_id] = None
            else:
                states[block_id] = _FREE
                free.append(block_id)

    def release_later(self, block_ids: Sequence[int]) -> None:
        """The same, but blocks without references become pending until `flush_pending` or `allocate`."""
        for block_id in self._drop_references(block_ids):
            self._states[block_id] = _PENDING
            self._pending.append(block_id)

    def flush_pending(self, max_blocks: int | None = None) -> int:
        """Make all pending blocks free, or the `max_blocks` released first. Returns how many."""
        count = self.num_pending
        if max_blocks is not None:
            _require_at_least(0, max_blocks, "max_blocks")
            count = min(max_blocks, count)
        for _ in range(count):
            block_id = self._pending.popleft()
            self._states[block_id] = _FREE
            self._free.append(block_id)
        return count

    def grow(self, num_blocks: int) -> None:
        """Add `num_blocks` free blocks at the end of the pool; the free ones of now are handed out first."""
        _require_at_least(0, num_blocks, "num_blocks")
        old, new = self.num_blocks, self.num_blocks + num_blocks
        self._ref_counts.extend([0] * num_blocks)
        self._states.extend(bytes(num_blocks))
        self._free[:0] = range(new - 1, old - 1, -1)

    def moves_to_shrink(self, num_blocks: int) -> dict[int, int]:
        """Old -> new id of the referenced blocks that `shrink(num_blocks, ...)` moves. Changes nothing."""
        _require_at_least(max(1, self.num_referenced), num_blocks, "num_blocks")
        high = [block_id for block_id in range(num_blocks, self.num_blocks) if self._ref_counts[block_id]]
        low = (block_id for block_id in range(num_blocks) if not self._ref_counts[block_id])
        return dict(zip(high, low, strict=False))

    def shrink(self, num_blocks: int, moved: Mapping[int, int]) -> None:
        """Keep the ids below `num_blocks`; holders of `moved` blocks follow. Cached content is forgotten."""
        new_ids = {block_id: moved.get(block_id, block_id) for block_id in self.referenced()}
        references = {new: self._ref_counts[old] for old, new in new_ids.items()}
        self._hold(num_blocks, references, {new: self._states[old] for old, new in new_ids.items()})

    def seal(self, block_id: int) -> None:
        """Declare an open block full: it is immutable from now on."""
        if not self._is_known(block_id) or self._states[block_id] != _OPEN:
            raise self._misuse("seal", block_id, "only an open block can be sealed")
        self._states[block_id] = _SEALED

    def make_writable(self, block_id: int) -> int | None:
        """Give the holder of one reference a block that nobody else can see (copy-on-write).

        The same one where there is one reference (reopened if it was sealed). Else a new open one, `None` if
        there is none: the caller's reference has moved to it, and the caller has to copy the content.
        """
        if not self._is_known(block_id) or not self._ref_counts[block_id]:
            raise self._misuse("make writable", block_id, "only an open or a sealed block can be written to")
        if self._ref_counts[block_id] == 1:
            self._states[block_id] = _OPEN
            return block_id
        fresh = self.allocate(1)
        if fresh is None:
            return None
        self.counters.copied += 1
        self._ref_counts[block_id] -= 1
        return fresh[0]

    def referenced(self) -> list[int]:
        """The blocks with at least one reference, in order."""
        return [block_id for block_id, count in enumerate(self._ref_counts) if count]

    def rebuild(self, num_blocks: int, holdings: Iterable[tuple[Sequence[int], int]]) -> None:
        """Be a pool of so many blocks, with the counts and states that its holders tell.

        `holdings` are all tables that hold blocks: their ids, and how many leading ones are full.
        """
        held: Counter[int] = Counter()
        sealed: set[int] = set()
        for block_ids, num_sealed in holdings:
            held.update(block_ids)
            sealed.update(block_ids[:num_sealed])
        del held[NULL_BLOCK]
        states = {block_id: _SEALED if block_id in sealed else _OPEN for block_id in held}
        self._hold(num_blocks, held, states)

    def check_integrity(self, tables: Iterable[Iterable[int]] | None = None) -> None:
        """Raise an AssertionError unless free + pending + referenced + cached = total. O(pool).

        Counts are checked against the ids in `tables` too, if given: those of **every** holder of references.
        """
        free, pending, cached = set(self._free), set(self._pending), set(self._cached)
        referenced = set(self.referenced())
        sizes = (len(self._free), len(self._pending), len(referenced), len(self._cached))
        union = free | pending | referenced | cached
        if sum(sizes) != self.num_blocks or len(union) != self.num_blocks:
            raise AssertionError(
                f"Blocks were lost or counted twice: free {sizes[0]} + pending {sizes[1]} + referenced"
                f" {sizes[2]} + cached {sizes[3]} = {sum(sizes)} ({len(union)} different), but the pool has a"
                f" total of {self.num_blocks}."
            )
        homes = {_FREE: free, _PENDING: pending, _CACHED: cached, _OPEN: referenced, _SEALED: referenced}
        for block_id, state in enumerate(self._states):
            if block_id not in homes[state]:
                raise AssertionError(
                    f"Block {block_id} is marked {BlockState(state).name} with {self._ref_counts[block_id]}"
                    " references, but is kept among blocks of another state."
                )
        if tables is None:
            return
        held = Counter(block_id for table in tables for block_id in table if block_id != NULL_BLOCK)
        for block_id in held:
            if not self._is_known(block_id):
                raise AssertionError(f"A table holds block {block_id} of a pool of {self.num_blocks}.")
        for block_id, count in enumerate(self._ref_counts):
            if count != held[block_id]:
                raise AssertionError(
                    f"Block {block_id} ({self.state(block_id).name}) counts {count} references, but the"
                    f" tables hold {held[block_id]}."
                )

    def _hold(self, num_blocks: int, references: Mapping[int, int], states: Mapping[int, int]) -> None:
        """Be a pool where these blocks have so many references, and all others are free."""
        fresh = BlockPool(num_blocks)
        for block_id, count in references.items():
            fresh._ref_counts[block_id], fresh._states[block_id] = count, states[block_id]
        fresh._free = [block_id for block_id in fresh._free if block_id not in references]
        fresh.counters = self.counters
        vars(self).update(vars(fresh))  # in one step, which an interrupt cannot divide

    def _drop_references(self, block_ids: Sequence[int]) -> list[int]:
        """Drop one reference each, last listed first; all or nothing. Returns those that have none left."""
        counts, num_blocks = self._ref_counts, len(self._ref_counts)
        unreferenced = []
        for done, block_id in enumerate(reversed(block_ids)):
            if not 0 <= block_id < num_blocks or counts[block_id] == 0:
                for undone in block_ids[len(block_ids) - done :]:
                    counts[undone] += 1
                raise self._misuse("release", block_id, "it was released more often than it was taken")
            counts[block_id] -= 1
            if not counts[block_id]:
                unreferenced.append(block_id)
        self.counters.given_back += len(unreferenced)
        return unreferenced

    def _is_known(self, block_id: int) -> bool:
        return 0 <= block_id < len(self._ref_counts)

    def _known(self, block_id: int) -> int:
        if not self._is_known(block_id):
            raise self._misuse("look at", block_id, "")
        return block_id

    def _misuse(self, action: str, block_id: int, why: str) -> PagedCacheError:
        fault = f"unknown id, expected one of 0…{self.num_blocks - 1}"
        if self._is_known(block_id):
            fault = f"it is {self.state(block_id).name}, references: {self._ref_counts[block_id]}; {why}"
        return PagedCacheError(f"Cannot {action} block {block_id}: {fault}.")


def _require_at_least(lowest: int, value: int, name: str) -> None:
    if value < lowest:
        raise PagedCacheError(f"Expected {name} ≥ {lowest}, got {value}.")
