"""The sequences of one layer group over one pool of blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from hf_paged_cache.blocks.block import NULL_BLOCK, BlockState
from hf_paged_cache.blocks.pool import BlockPool
from hf_paged_cache.blocks.reservation import Plan, Reservation
from hf_paged_cache.blocks.table import BlockTable
from hf_paged_cache.errors import PagedCacheError


class SavedRows(NamedTuple):
    """What a manager was at one time, see `BlockManager.save`."""

    tables: list[BlockTable]
    num_sealed: int
    fullest: int
    first_held: int


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

    Rows of a batch may begin with padding. Blocks that hold nothing else are not stored either, so rows
    differ at their beginnings; from the first block on that both store, two rows agree in which are NULL.

    The class is plain data and can be deep-copied.

    Args:
        num_blocks: Size of the pool.
        block_size: Tokens per block.
        window: Sliding window in tokens, the query's own included; `None` keeps everything.
        pool: A pool of others to take blocks from, instead of one with `num_blocks`.

    Attributes:
        pool: The blocks. Others may share blocks of it, then `check_integrity` wants their ids.
        first_held: First token that is what a forward stored. Those before it in its block are not: they came
            from somebody who had dropped them.
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
        self.version = self.first_held = 0
        self._tables: list[BlockTable] = []
        self._num_sealed = 0  # leading logical blocks that need no look when full blocks are sealed
        self._fullest = 0  # the row with the least padding: what it does not store left the window

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

    def blocks_needed(
        self, num_new_tokens: int, *, keep_history: bool = False, padding: Sequence[int] = ()
    ) -> int:
        """Blocks that `reserve` would take from the pool less those it would give back; may be negative."""
        return self._plan(num_new_tokens, keep_history, padding).needed_blocks

    def blocks_after_crop(self, num_tokens: int, num_new_tokens: int) -> int:
        """Blocks that rows cut down to so many tokens would take for new ones, less those they would release.

        Without a window.
        """
        first = -(-num_tokens // self.block_size)
        dropped = Counter(i for table in self._tables for i in table.ids[first:] if i != NULL_BLOCK)
        released = sum(self.pool.ref_count(block_id) == count for block_id, count in dropped.items())
        wanted = -(-(num_tokens + num_new_tokens) // self.block_size) - first
        partial = [table.ids[first - 1] for table in self._tables] if num_tokens % self.block_size else []
        copied = sum(i == NULL_BLOCK or self.pool.ref_count(i) > 1 for i in partial)
        return wanted * self.batch + copied - released

    def has_gap(self, start: int) -> bool:
        """Whether a token from `start` on is not stored though it is no padding (it left the window)."""
        if not self._tables:
            return False
        table = self._tables[self._fullest]
        return NULL_BLOCK in table.ids[max(start // self.block_size, table.num_padding) :]

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
        self._fullest = 0

    def reserve(
        self, num_new_tokens: int, *, keep_history: bool = False, padding: Sequence[int] = ()
    ) -> Reservation | None:
        """Make room for new tokens at the end of every row, in all rows or in none.

        Seals the blocks that are full, releases those that left the window, makes a partly filled last block
        that is shared writable by copy-on-write, and allocates row after row.

        Args:
            num_new_tokens: Per row, at least 1.
            keep_history: Window layers only: release nothing and store every new token, so that the rows can
                be cropped again (assisted decoding).
            padding: For every row, how many of its tokens from the first on are padding, the new ones
                included: blocks that hold nothing else are not stored. What earlier reservations have left
                out stays out; empty if there is no more.

        Returns:
            What the caller has to copy and what changed; `None` when there are too few blocks, then nothing
            has changed.

        Raises:
            PagedCacheError: There are no rows, `num_new_tokens` is below 1, or `padding` does not fit.
        """
        plan = self._plan(num_new_tokens, keep_history, padding)
        if not self.pool.can_allocate(plan.needed_blocks):
            return None
        start = self.num_tokens
        changes = [*self._let_go(plan), plan.first_new]
        copies, blanks = self._make_last_writable(plan.padded)
        if copies or blanks:
            changes.append(start // self.block_size)
        self._append(num_new_tokens, plan)
        if padding or blanks:
            self._find_fullest()
        return Reservation(start, start + num_new_tokens, copies, min(changes), plan.needed_blocks, blanks)

    def let_go(self, num_new_tokens: int, *, keep_history: bool, padding: Sequence[int]) -> list[int]:
        """The part of a `reserve` that gives blocks back, after which the rest can still be undone.

        Returns:
            Table columns from which on entries changed.
        """
        return self._let_go(self._plan(num_new_tokens, keep_history, padding))

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
        self._find_fullest()
        self.version += 1

    def fork(self) -> BlockManager:
        """Another manager with the same rows, by sharing their blocks."""
        twin = BlockManager(self.pool.num_blocks, self.block_size, self.window, pool=self.pool)
        twin._tables = [table.fork() for table in self._tables]
        twin._num_sealed, twin._fullest = self._num_sealed, self._fullest
        twin.first_held = self.first_held
        self.pool.share([block_id for table in twin._tables for block_id in table.stored_ids()])
        return twin

    def adopt(
        self, tables: Sequence[Sequence[int]], num_tokens: int, padding: Sequence[int]
    ) -> dict[int, int] | None:
        """Begin with rows of so many tokens, whose tables name blocks by numbers of somebody else.

        Args:
            tables: The numbers of every row, or NULL_BLOCK.
            num_tokens: Of every row.
            padding: Of every row, how many leading blocks are NULL because their tokens were padding.

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
            BlockTable(self.block_size, [ids.get(n, NULL_BLOCK) for n in table], num_tokens, 0, blocks)
            for table, blocks in zip(tables, padding, strict=True)
        ]
        self._find_fullest()
        held = Counter(block_id for table in self._tables for block_id in table.stored_ids())
        self.pool.share([block_id for block_id, rows in held.items() for _ in range(rows - 1)])
        self._num_sealed = 0
        self.version += 1
        return ids

    def apart(self) -> BlockManager:
        """The same rows and ids over a pool of their own, in which nobody else holds a block."""
        twin = BlockManager(self.pool.num_blocks, self.block_size, self.window)
        twin.version, twin.first_held = self.version, self.first_held
        twin._tables = [table.fork() for table in self._tables]
        twin._num_sealed, twin._fullest = self._num_sealed, self._fullest
        twin.pool = self.pool.restricted_to(table.ids for table in self._tables)
        return twin

    def renumber(self, moved: Mapping[int, int]) -> None:
        """Follow blocks that got other ids."""
        for table in self._tables:
            table.ids[:] = [moved.get(block_id, block_id) for block_id in table.ids]
        self.version += 1

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
        self.forget()

    # --- going back ---------------------------------------------------------------------------------------

    def save(self) -> SavedRows:
        """What the rows are now. Blocks that are given back later must not be filled before a `restore`."""
        tables = [table.fork() for table in self._tables]
        return SavedRows(tables, self._num_sealed, self._fullest, self.first_held)

    def restore(self, saved: SavedRows) -> None:
        """Be again what was saved. The pool is not told: see `BlockPool.rebuild`."""
        self._tables = [table.fork() for table in saved.tables]
        self._num_sealed, self._fullest, self.first_held = saved.num_sealed, saved.fullest, saved.first_held
        self.version += 1

    def forget(self) -> None:
        """Have no rows. The pool is not told."""
        self._tables = []
        self._num_sealed = self.first_held = 0
        self.version += 1

    def holdings(self) -> list[tuple[list[int], int]]:
        """Of every row the ids of its blocks, and how many leading ones are full for sure."""
        return [(table.ids, self._num_sealed) for table in self._tables]

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

    def _plan(self, num_new_tokens: int, keep_history: bool, padding: Sequence[int]) -> Plan:
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
        padded = self._padded_blocks(num_new_tokens, padding)
        released = self._released(dropped, padded)
        freed = sum(self.pool.ref_count(block_id) == rows for block_id, rows in released.items())
        taken = sum(max(0, end_blocks - max(first_stored, blocks)) for blocks in padded)
        taken += self._num_copies(padded, released)
        return Plan(dropped, padded, first_new, first_stored, end_blocks, taken - freed)

    def _let_go(self, plan: Plan) -> list[int]:
        self._seal_full_blocks()
        changes = [*plan.dropped[:1], *self._release_padding(plan.padded)]
        self._release_dropped(plan.dropped)
        return changes

    def _padded_blocks(self, num_new_tokens: int, padding: Sequence[int]) -> list[int]:
        # A crop may have ended in the middle of a block that is not stored.
        full = self.num_tokens // self.block_size
        known = [min(table.num_padding, full) for table in self._tables]
        if not padding:
            return known
        end = self.num_tokens + num_new_tokens
        if len(padding) != self.batch or not all(0 <= tokens <= end for tokens in padding):
            raise PagedCacheError(
                f"Expected padding of {self.batch} rows, each 0…{end} tokens, got {list(padding)}."
            )
        return [max(blocks, tokens // self.block_size) for blocks, tokens in zip(known, padding, strict=True)]

    def _outside_window(self) -> list[int]:
        """Logical blocks that are stored and that no token from now on can attend."""
        first = self._tables[self._fullest]
        left = self._first_needed(self.num_tokens) // self.block_size
        return [i for i in range(first.num_dropped, left) if first.ids[i] != NULL_BLOCK]

    def _first_needed(self, num_tokens: int) -> int:
        """The first token that a query at position `num_tokens` or later can attend."""
        return 0 if self.window is None else max(0, num_tokens - (self.window - 1))

    def _num_copies(self, padded: list[int], released: Counter[int]) -> int:
        """Blocks that making every row's partly filled last block writable will take."""
        if self.num_tokens % self.block_size == 0:
            return 0
        tables = zip(self._tables, padded, strict=True)
        holders = Counter(table.ids[-1] for table, blocks in tables if blocks < len(table.ids))
        blanks = holders.pop(NULL_BLOCK, 0)
        # The last holder keeps the block, unless someone besides the rows holds it too.
        return blanks + sum(
            rows - (self.pool.ref_count(block_id) - released[block_id] == rows)
            for block_id, rows in holders.items()
        )

    def _released(self, dropped: list[int], padded: list[int]) -> Counter[int]:
        """How many rows will release a block."""
        released: Counter[int] = Counter()
        for table, blocks in zip(self._tables, padded, strict=True):
            released.update(table.ids[i] for i in dropped if table.ids[i] != NULL_BLOCK)
            if blocks > table.num_padding:
                gone = range(table.num_padding, min(blocks, len(table.ids)))
                released.update(table.ids[i] for i in gone if table.ids[i] != NULL_BLOCK and i not in dropped)
        return released

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

    def _release_padding(self, padded: list[int]) -> list[int]:
        """Stop storing blocks that turned out to be padding. Returns the first of them in each row."""
        first: list[int] = []
        dropped: list[int] = []
        for table, blocks in zip(self._tables, padded, strict=True):
            if blocks > table.num_padding:
                gone = range(table.num_padding, min(blocks, len(table.ids)))
                first += [i for i in gone if table.ids[i] != NULL_BLOCK][:1]
                dropped += table.drop_padding(blocks)
        if dropped:
            self.pool.release(dropped)
            self.version += 1
        return first

    def _make_last_writable(self, padded: list[int]) -> tuple[list[tuple[int, int]], list[int]]:
        """Make every row's partly filled last block its own, where it is not padding.

        Returns:
            (source, destination) to be copied, and blocks to be zeroed, whose rows had stored none.
        """
        if self.num_tokens % self.block_size == 0:
            return [], []
        copies: list[tuple[int, int]] = []
        blanks: list[int] = []
        for table, blocks in zip(self._tables, padded, strict=True):
            source = table.ids[-1]
            if blocks >= len(table.ids):
                continue
            if source == NULL_BLOCK:
                blanks += self.pool.allocate(1) or []
                table.store_last(blanks[-1])
                continue
            destination = self.pool.make_writable(source)
            if destination is None:
                raise AssertionError(f"Enough blocks were counted, but none is left to copy {source} to.")
            if destination != source:
                table.ids[-1] = destination
                copies.append((source, destination))
        return copies, blanks

    def _append(self, num_new_tokens: int, plan: Plan) -> None:
        firsts = [min(max(plan.first_stored, blocks), plan.end_blocks) for blocks in plan.padded]
        wanted = sum(plan.end_blocks - first for first in firsts)
        block_ids = self.pool.allocate(wanted)
        if block_ids is None:
            raise AssertionError(f"No {wanted} blocks were left, though enough were counted.")
        used = 0
        for table, first in zip(self._tables, firsts, strict=True):
            per_row = plan.end_blocks - first
            nulls = [NULL_BLOCK] * (first - plan.first_new)
            table.append(num_new_tokens, nulls + block_ids[used : used + per_row])
            used += per_row

    def _find_fullest(self) -> None:
        self._fullest = min(range(self.batch), key=lambda row: self._tables[row].num_padding, default=0)

    def _require_history(self, num_tokens: int) -> None:
        first_needed = self._first_needed(num_tokens)
        table, end = self._tables[self._fullest], -(-num_tokens // self.block_size)
        stored = table.ids[max(first_needed // self.block_size, table.num_padding) : end]
        if NULL_BLOCK in stored or first_needed < self.first_held:
            raise PagedCacheError(
                f"Cannot crop to {num_tokens} tokens: history was released. The window of {self.window}"
                f" tokens needs {first_needed}…{num_tokens - 1}, and not all of them are stored any more."
                " Reserve with keep_history=True what may have to be cropped."
            )

    def _check_entry(self, row: int, i: int, block_id: int) -> None:
        table, fullest = self._tables[row], self._tables[self._fullest]
        is_padding = i < table.num_padding
        if (block_id == NULL_BLOCK) != (is_padding or fullest.ids[i] == NULL_BLOCK):
            raise AssertionError(
                f"Logical block {i} is stored in only one of the rows {self._fullest} and {row}."
            )
        if block_id == NULL_BLOCK and self.window is None and not is_padding:
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
            gained += [new_id] if new_id != NULL_BLOCK else []
            lost += [old_id] if old_id != NULL_BLOCK else []
