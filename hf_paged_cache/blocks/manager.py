"""The sequences of one layer group over one pool of blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hf_paged_cache.blocks.block import NULL_BLOCK, BlockState
from hf_paged_cache.blocks.pool import BlockPool
from hf_paged_cache.blocks.table import BlockTable
from hf_paged_cache.errors import PagedCacheError


@dataclass(frozen=True)
class Reservation:
    """Room for the tokens `start … end - 1` of every row.

    Attributes:
        start: First reserved token.
        end: One past the last reserved token: the new length.
        copies: (source, destination) block ids whose content must be copied before any new token is written.
        changed_from: First logical block whose entry changed in some row's table, the new ones included; the
            number of logical blocks where none changed.
        needed_blocks: Blocks taken from the pool less those given back to it; may be negative.
    """

    start: int
    end: int
    copies: list[tuple[int, int]]
    changed_from: int
    needed_blocks: int


class _Plan(NamedTuple):
    """What a reservation will do, the same logical blocks in every row."""

    dropped: list[int]  # logical blocks to release: they left the window
    first_new: int  # logical blocks that get an entry: NULL up to first_stored, then a block each
    first_stored: int
    end_blocks: int
    needed_blocks: int


class BlockManager:
    """The rows (sequences) of one layer group: equally long, each with a table over one shared pool.

    With a sliding window a query at position p attends the positions after p - window. So before tokens are
    added at length L, blocks wholly before token L - (window - 1) are released; and of many new tokens only
    the blocks that hold the last window - 1 are stored, the tokens before attend each other while they are
    fresh.

    ```
    window 8, block_size 4, rows of 6 tokens; reserve(14):
    tokens   0123 4567 89ab cdef ghij
    before   [ 0    1]
    after    [ 0    1  NULL   2    3]      0 and 1 are still needed by the first new query (token 6)
    then     reserve(1) releases both and takes 0 again: [NULL NULL NULL 2 3 0]
    ```

    The class is plain data and can be deep-copied.

    Args:
        num_blocks: Size of the pool.
        block_size: Tokens per block.
        window: Sliding window in tokens, the query's own included; `None` keeps everything.
        pool: A pool of others to take blocks from, instead of one with `num_blocks`.

    Attributes:
        pool: The blocks. Others may share blocks of it, then `check_integrity` wants their ids.
        version: Bumped by whatever takes content away from a row or gives it other content: `crop`,
            `reorder`, `reset`, and a `reserve` or `release_outside_window` that releases blocks. Not by
            appending, nor by copy-on-write (the content stays equal; `Reservation.changed_from` tells of the
            new id).

    Raises:
        PagedCacheError: A size is below 1.
    """

    def __init__(
        self, num_blocks: int, block_size: int, window: int | None = None, *, pool: BlockPool | None = None
    ) -> None:
        for name, value in (("block_size", block_size), ("window", 1 if window is None else window)):
            if value < 1:
                raise PagedCacheError(f"Expected {name} ≥ 1, got {value}.")
        self.pool = BlockPool(num_blocks) if pool is None else pool
        self.block_size = block_size
        self.window = window
        self.version = 0
        self._tables: list[BlockTable] = []
        self._num_sealed = 0  # leading logical blocks that need no look when full blocks are sealed

    # --- questions ----------------------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        """Number of rows; 0 before `start` and after `reset`."""
        return len(self._tables)

    @property
    def num_tokens(self) -> int:
        """Length of every row."""
        return self._tables[0].num_tokens if self._tables else 0

    @property
    def tables(self) -> list[BlockTable]:
        """One table per row. To be read, not changed."""
        return self._tables

    def blocks_needed(self, num_new_tokens: int, *, keep_history: bool = False) -> int:
        """Blocks that `reserve` would take from the pool less those it would give back; may be negative."""
        return self._plan(num_new_tokens, keep_history).needed_blocks

    # --- life of the rows ---------------------------------------------------------------------------------

    def start(self, batch: int) -> None:
        """Begin with `batch` empty rows.

        Raises:
            PagedCacheError: There are rows already, or `batch` is below 1.
        """
        if self._tables:
            raise PagedCacheError(
                f"Cannot start {batch} rows: there are {self.batch} already. Call reset() first."
            )
        if batch < 1:
            raise PagedCacheError(f"Expected batch ≥ 1, got {batch}.")
        self._tables = [BlockTable(self.block_size) for _ in range(batch)]

    def reserve(self, num_new_tokens: int, *, keep_history: bool = False) -> Reservation | None:
        """Make room for new tokens at the end of every row, in all rows or in none.

        Seals the blocks that are full, releases those that left the window, makes a partly filled last block
        that is shared writable by copy-on-write, and allocates row after row.

        Args:
            num_new_tokens: Per row, at least 1.
            keep_history: Window layers only: release nothing and store every new token, so that the rows can
                be cropped again (assisted decoding).

        Returns:
            What the caller has to copy and what changed; `None` when there are too few blocks, then nothing
            has changed.

        Raises:
            PagedCacheError: There are no rows, or `num_new_tokens` is below 1.
        """
        plan = self._plan(num_new_tokens, keep_history)
        if not self.pool.can_allocate(plan.needed_blocks):
            return None
        start = self.num_tokens
        self._seal_full_blocks()
        self._release_dropped(plan.dropped)
        copies = self._make_last_writable()
        self._append(num_new_tokens, plan)
        changes = [*plan.dropped[:1], *([start // self.block_size] if copies else []), plan.first_new]
        return Reservation(start, start + num_new_tokens, copies, min(changes), plan.needed_blocks)

    def crop(self, num_tokens: int) -> None:
        """Cut every row down to its first `num_tokens` tokens; does nothing if they are that long.

        Raises:
            PagedCacheError: The rows are shorter, or the window at that length reaches into released blocks;
                nothing has changed.
        """
        self.check_crop(num_tokens)
        if num_tokens == self.num_tokens:
            return
        dropped = [block_id for table in self._tables for block_id in table.crop(num_tokens)]
        self.pool.release(dropped)
        self._num_sealed = min(self._num_sealed, num_tokens // self.block_size)
        self.version += 1

    def check_crop(self, num_tokens: int) -> None:
        """Raise what `crop(num_tokens)` would raise; changes nothing."""
        if not 0 <= num_tokens <= self.num_tokens:
            raise PagedCacheError(
                f"Expected 0 ≤ num_tokens ≤ {self.num_tokens} (the rows' length), got {num_tokens}."
            )
        if num_tokens != self.num_tokens:
            self._require_history(num_tokens)

    def release_outside_window(self) -> bool:
        """Release what the next token cannot attend, as the next `reserve` would.

        Meant for rows that were reserved with `keep_history`, once nothing will be cropped any more.

        Returns:
            Whether any table entry changed.
        """
        dropped = self._outside_window() if self._tables else []
        self._release_dropped(dropped)
        return bool(dropped)

    def reorder(self, row_indices: Sequence[int]) -> None:
        """Make row i a copy of what row `row_indices[i]` was, by sharing its blocks.

        Beam search, selecting rows and repeating rows are all this: the number of rows may change, a row may
        be used many times or never. Rows that stay where they are cost nothing; of the others only blocks
        that differ from the row's earlier ones are counted up and down.

        Raises:
            PagedCacheError: No row is listed, or an index is not one of the rows; nothing has changed.
        """
        old, sources = self._tables, list(row_indices)
        if not sources or not all(0 <= source < len(old) for source in sources):
            raise PagedCacheError(f"Expected at least one row index, all of 0…{len(old) - 1}, got {sources}.")
        if sources == list(range(len(old))):
            return
        new = [old[source] if row == source else old[source].fork() for row, source in enumerate(sources)]
        gained: list[int] = []
        lost: list[int] = []
        for row in range(max(len(old), len(new))):
            before, after = (tables[row] if row < len(tables) else None for tables in (old, new))
            if before is not after:
                _count_changes(before, after, gained, lost)
        self.pool.share(gained)  # first, so that no block is without an owner in between
        self.pool.release(lost)
        self._tables = new
        self.version += 1

    def fork(self) -> BlockManager:
        """Another manager with the same rows, by sharing their blocks."""
        twin = BlockManager(self.pool.num_blocks, self.block_size, self.window, pool=self.pool)
        twin._tables = [table.fork() for table in self._tables]
        twin._num_sealed = self._num_sealed
        self.pool.share([block_id for table in twin._tables for block_id in table.stored_ids()])
        return twin

    def adopt(self, tables: Sequence[Sequence[int]], num_tokens: int) -> dict[int, int] | None:
        """Begin with rows of so many tokens, whose tables name blocks by numbers of somebody else.

        Returns:
            Number -> id of the block that was taken for it, by rising numbers; `None` when there are too few,
            then nothing has changed.
        """
        numbers = sorted({n for table in tables for n in table if n != NULL_BLOCK})
        taken = self.pool.allocate(len(numbers))
        if taken is None:
            return None
        ids = dict(zip(numbers, taken, strict=True))
        self._tables = [
            BlockTable(self.block_size, [ids.get(n, NULL_BLOCK) for n in table], num_tokens)
            for table in tables
        ]
        held = Counter(block_id for table in self._tables for block_id in table.stored_ids())
        self.pool.share([block_id for block_id, rows in held.items() for _ in range(rows - 1)])
        self._num_sealed = 0
        self.version += 1
        return ids

    def apart(self) -> BlockManager:
        """The same rows and ids over a pool of their own, in which nobody else holds a block."""
        twin = BlockManager(self.pool.num_blocks, self.block_size, self.window)
        twin.version = self.version
        twin._tables = [table.fork() for table in self._tables]
        twin._num_sealed = self._num_sealed
        twin.pool = self.pool.restricted_to(table.ids for table in self._tables)
        return twin

    def reset(self, *, later: bool = False) -> None:
        """Release all rows and forget the batch.

        Args:
            later: Put the blocks on the pool's pending list instead, to be returned in batches.
        """
        if not self._tables:
            return
        block_ids = [block_id for table in self._tables for block_id in table.stored_ids()]
        release = self.pool.release_later if later else self.pool.release
        release(block_ids)
        self._tables = []
        self._num_sealed = 0
        self.version += 1

    def check_integrity(self, other_tables: Iterable[Iterable[int]] = ()) -> None:
        """Check the pool against the rows, and the rows against each other. O(pool).

        Args:
            other_tables: Block ids that others than the rows hold references to.

        Raises:
            AssertionError: Something is wrong; the message says what.
        """
        self.pool.check_integrity([*(table.ids for table in self._tables), *other_tables])
        for row, table in enumerate(self._tables):
            if table.num_tokens != self.num_tokens or table.blocks_needed(0) != 0:
                raise AssertionError(
                    f"Row {row} has {table.num_tokens} tokens in {len(table.ids)} blocks of"
                    f" {self.block_size}, but row 0 has {self.num_tokens} tokens."
                )
            for i, block_id in enumerate(table.ids):
                self._check_entry(row, i, block_id)

    # --- helpers ------------------------------------------------------------------------------------------

    def _plan(self, num_new_tokens: int, keep_history: bool) -> _Plan:
        if not self._tables:
            raise PagedCacheError("There are no rows to reserve tokens for. Call start(batch) first.")
        if num_new_tokens < 1:
            raise PagedCacheError(f"Expected num_new_tokens ≥ 1, got {num_new_tokens}.")
        first = self._tables[0]
        first_new, end_blocks = len(first.ids), len(first.ids) + first.blocks_needed(num_new_tokens)
        dropped: list[int] = []
        first_stored = first_new
        if self.window is not None and not keep_history:
            dropped = self._outside_window()
            left_by_end = self._first_needed(self.num_tokens + num_new_tokens) // self.block_size
            first_stored = max(first_new, left_by_end)
        taken = self.batch * (end_blocks - first_stored) + self._num_copies()
        return _Plan(dropped, first_new, first_stored, end_blocks, taken - self._num_freed(dropped))

    def _outside_window(self) -> list[int]:
        """Logical blocks that are stored and that no token from now on can attend."""
        first = self._tables[0]
        left = self._first_needed(self.num_tokens) // self.block_size
        return [i for i in range(first.num_dropped, left) if first.ids[i] != NULL_BLOCK]

    def _first_needed(self, num_tokens: int) -> int:
        """The first token that a query at position `num_tokens` or later can attend."""
        return 0 if self.window is None else max(0, num_tokens - (self.window - 1))

    def _num_copies(self) -> int:
        """Blocks that making every row's partly filled last block writable will take."""
        if self.num_tokens % self.block_size == 0:
            return 0
        holders = Counter(table.ids[-1] for table in self._tables)
        # The last holder keeps the block, unless someone besides the rows holds it too.
        return sum(rows - (self.pool.ref_count(block_id) == rows) for block_id, rows in holders.items())

    def _num_freed(self, dropped: list[int]) -> int:
        holders = Counter(table.ids[i] for table in self._tables for i in dropped)
        return sum(self.pool.ref_count(block_id) == rows for block_id, rows in holders.items())

    def _seal_full_blocks(self) -> None:
        num_full = self.num_tokens // self.block_size
        for i in range(self._num_sealed, num_full):
            for table in self._tables:
                if table.ids[i] != NULL_BLOCK and self.pool.state(table.ids[i]) is BlockState.OPEN:
                    self.pool.seal(table.ids[i])
        self._num_sealed = num_full

    def _release_dropped(self, dropped: list[int]) -> None:
        if not dropped:
            return
        token = self._first_needed(self.num_tokens)
        self.pool.release([block_id for table in self._tables for block_id in table.drop_before(token)])
        self.version += 1

    def _make_last_writable(self) -> list[tuple[int, int]]:
        """Make every row's partly filled last block its own. Returns (source, destination) to be copied."""
        if self.num_tokens % self.block_size == 0:
            return []
        copies = []
        for table in self._tables:
            source = table.ids[-1]
            destination = self.pool.make_writable(source)
            if destination is None:
                raise AssertionError(f"Enough blocks were counted, but none is left to copy {source} to.")
            if destination != source:
                table.ids[-1] = destination
                copies.append((source, destination))
        return copies

    def _append(self, num_new_tokens: int, plan: _Plan) -> None:
        nulls = [NULL_BLOCK] * (plan.first_stored - plan.first_new)
        per_row = plan.end_blocks - plan.first_stored
        block_ids = self.pool.allocate(self.batch * per_row)
        if block_ids is None:
            raise AssertionError(f"No {per_row} blocks were left for each row, though enough were counted.")
        for row, table in enumerate(self._tables):
            table.append(num_new_tokens, nulls + block_ids[row * per_row : (row + 1) * per_row])

    def _require_history(self, num_tokens: int) -> None:
        first_needed = self._first_needed(num_tokens)
        end = -(-num_tokens // self.block_size)
        if NULL_BLOCK in self._tables[0].ids[first_needed // self.block_size : end]:
            raise PagedCacheError(
                f"Cannot crop to {num_tokens} tokens: history was released. The window of {self.window}"
                f" tokens needs {first_needed}…{num_tokens - 1}, and not all of them are stored any more."
                " Reserve with keep_history=True what may have to be cropped."
            )

    def _check_entry(self, row: int, i: int, block_id: int) -> None:
        if (block_id == NULL_BLOCK) != (self._tables[0].ids[i] == NULL_BLOCK):
            raise AssertionError(f"Logical block {i} is stored in only one of the rows 0 and {row}.")
        if block_id == NULL_BLOCK and self.window is None:
            raise AssertionError(f"Logical block {i} of row {row} is not stored, but there is no window.")
        if block_id != NULL_BLOCK and i < self._num_sealed and self.pool.state(block_id) is BlockState.OPEN:
            raise AssertionError(f"Block {block_id} (row {row}, logical block {i}) is full but still open.")


def _count_changes(
    before: BlockTable | None, after: BlockTable | None, gained: list[int], lost: list[int]
) -> None:
    """Note the ids that a row gains and loses when its table is replaced."""
    if before is None or after is None:
        gained.extend(after.stored_ids() if after else [])
        lost.extend(before.stored_ids() if before else [])
        return
    for old_id, new_id in zip(before.ids, after.ids, strict=True):
        if old_id != new_id:
            gained.append(new_id)
            lost.append(old_id)
