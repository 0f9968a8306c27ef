"""The sequences of one layer group over one pool of blocks."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import NamedTuple

from hf_paged_cache.errors import PagedCacheError

from .block import NULL_BLOCK, BlockState
from .block_pool import BlockPool
from .block_table import BlockTable


@dataclass(frozen=True)
class Reservation:
    """Room for the tokens of columns `start … end - 1`, of every row from where it begins."""

    start: int
    end: int  # the new length
    copies: list[tuple[int, int]]  # (source, destination) ids, to be copied before any new token is written
    changed_from: int  # first logical block whose entry changed in some row; their number where none did
    needed_blocks: int  # taken from the pool less those given back to it; may be negative


class RowPlan(NamedTuple):
    """What a reservation will do to one row."""

    table: BlockTable
    offset: int  # columns before it begins, from now on
    new_tokens: int
    dropped: list[int]  # logical blocks to release: they left the window
    num_nulls: int  # logical blocks that are added, but not stored
    num_taken: int  # logical blocks that are added after those, each with a block of the pool
    writes_to_last: bool  # the last block is partly filled, and new tokens go there


class BlockManager:
    """The rows (sequences) of one layer group: equally long, each with a table over one pool of blocks.

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

    Rows of a batch may begin with padding. It is not stored, and blocks are counted from a row's first own
    token, so rows differ in how many they have and in when one is full. All numbers of tokens that the
    manager is given, and its `num_tokens`, count columns of the batch, padding included.

    ```
    block_size 4, reserve(9, padding_tokens=(0, 3)):
    columns  0123 4567 8          0123 4567 8
    row 0    [ 0    1  2 ]        row 1 ... [ 3  4 ]: columns 3456 and 78
    ```

    Others may hold blocks of a `pool` that was given. A manager is plain data and can be deep-copied. What
    does not fit the rows raises a PagedCacheError, and nothing has changed.
    """

    def __init__(
        self, num_blocks: int, block_size: int, window: int | None = None, *, pool: BlockPool | None = None
    ) -> None:
        for name, value in (("block_size", block_size), ("window", 1 if window is None else window)):
            if value < 1:
                raise PagedCacheError(f"Expected {name} ≥ 1, got {value}.")
        self.pool = BlockPool(num_blocks) if pool is None else pool
        self.block_size = block_size
        self.window = window  # tokens that a query sees, its own included; None for all
        self.tables: list[BlockTable] = []  # one per row; only `DenseBlocks` writes there, what is dense
        self.first_held = 0  # first token that a forward stored; those before came from who had dropped them
        # Bumped by whatever takes content away from a row or gives it other content. Not by appending, nor
        # by copy-on-write: the content stays equal, and `Reservation.changed_from` tells of the new id.
        self.version = 0

    @property
    def batch(self) -> int:
        """Number of rows; 0 before `start` and after `reset`."""
        return len(self.tables)

    @property
    def num_tokens(self) -> int:
        """Columns of the batch: the length of every row, padding included."""
        return self.tables[0].end if self.tables else 0

    @property
    def offsets(self) -> tuple[int, ...]:
        """Of every row, columns before it begins; empty if all begin with the first."""
        offsets = tuple(table.offset for table in self.tables)
        return offsets if any(offsets) else ()

    def blocks_needed(
        self, num_new_tokens: int, *, keep_history: bool = False, padding_tokens: Sequence[int] = ()
    ) -> int:
        """Blocks that `reserve` would take from the pool less those it would give back; may be negative."""
        return self._plan(num_new_tokens, keep_history, padding_tokens)[1]

    def blocks_after_crop(self, num_tokens: int, num_new_tokens: int) -> int:
        """`blocks_needed` once rows without a window were cut down to so many tokens."""
        dropped: Counter[int] = Counter()
        wanted = copied = 0
        for table in self.tables:
            kept, offset = table.token_at(num_tokens), min(table.offset, num_tokens)
            first = -(-kept // self.block_size)
            dropped.update(block_id for block_id in table.ids[first:] if block_id != NULL_BLOCK)
            wanted += -(-(num_tokens + num_new_tokens - offset) // self.block_size) - first
            if kept % self.block_size:
                copied += self.pool.ref_count(table.ids[first - 1]) > 1
        released = sum(self.pool.ref_count(block_id) == count for block_id, count in dropped.items())
        return wanted + copied - released

    def has_gap(self, start: int) -> bool:
        """Whether a token from column `start` on is not stored though no padding: it left the window."""
        return any(NULL_BLOCK in t.ids[t.token_at(start) // self.block_size :] for t in self.tables)

    def start(self, batch: int) -> None:
        """Begin with `batch` empty rows, where there are none."""
        if self.tables:
            raise PagedCacheError(
                f"Cannot start {batch} rows: there are {self.batch} already. Call reset() first."
            )
        if batch < 1:
            raise PagedCacheError(f"Expected batch ≥ 1, got {batch}.")
        self.tables = [BlockTable(self.block_size) for _ in range(batch)]

    def reserve(
        self, num_new_tokens: int, *, keep_history: bool = False, padding_tokens: Sequence[int] = ()
    ) -> Reservation | None:
        """Make room for new tokens at the end of every row, in all rows or in none.

        Seals the blocks that are full, releases those that left the window, makes a partly filled last block
        that is shared writable by copy-on-write, and allocates row after row. `None` when there are too few
        blocks; then nothing has changed.

        With `keep_history` window layers release nothing and store every new token, so that the rows can be
        cropped again (assisted decoding). `padding_tokens` says for every row how many of its tokens from the
        first on are padding, the new ones included; a row that has begun has no more than it had. It is empty
        if no row has more.
        """
        plan, needed_blocks = self._plan(num_new_tokens, keep_history, padding_tokens)
        if not self.pool.can_allocate(needed_blocks):
            return None
        start = self.num_tokens
        changed = [len(row.table.ids) for row in plan if row.num_nulls + row.num_taken]
        changed += self._let_go(plan)
        copies = self._make_last_writable(plan, changed)
        self._append(plan)
        changed_from = min(changed, default=max(len(table.ids) for table in self.tables))
        return Reservation(start, start + num_new_tokens, copies, changed_from, needed_blocks)

    def let_go(self, num_new_tokens: int, *, keep_history: bool, padding_tokens: Sequence[int]) -> list[int]:
        """The part of a `reserve` that cannot be undone: give blocks back. Logical blocks that changed."""
        return self._let_go(self._plan(num_new_tokens, keep_history, padding_tokens)[0])

    def crop(self, num_tokens: int) -> None:
        """Cut every row down to its first `num_tokens` tokens, whose window must be stored still."""
        self.check_crop(num_tokens)
        if num_tokens == self.num_tokens:
            return
        dropped = [i for table in self.tables for i in table.crop(table.token_at(num_tokens))]
        for table in self.tables:
            table.offset = min(table.offset, num_tokens)
        self.pool.release(dropped)
        self.version += 1

    def check_crop(self, num_tokens: int) -> None:
        """Raise what `crop(num_tokens)` would raise; changes nothing."""
        if not 0 <= num_tokens <= self.num_tokens:
            raise PagedCacheError(
                f"Expected 0 ≤ num_tokens ≤ {self.num_tokens} (the rows' length), got {num_tokens}."
            )
        if num_tokens == self.num_tokens:
            return
        first_needed, size = self._first_needed(num_tokens), self.block_size
        has_gap = any(
            NULL_BLOCK in t.ids[t.token_at(first_needed) // size : -(-t.token_at(num_tokens) // size)]
            for t in self.tables
        )
        if has_gap or first_needed < self.first_held:
            raise PagedCacheError(
                f"Cannot crop to {num_tokens} tokens: history was released. The window of {self.window}"
                f" tokens needs {first_needed}…{num_tokens - 1}, and not all of them are stored any more."
                " Reserve with keep_history=True what may have to be cropped."
            )

    def release_outside_window(self) -> bool:
        """Release what `keep_history` kept and the next token cannot attend; whether there was any."""
        column = self._first_needed(self.num_tokens)
        return self._drop_before((table, table.token_at(column)) for table in self.tables)

    def reorder(self, row_indices: Sequence[int]) -> None:
        """Make row i a copy of what row `row_indices[i]` was, by sharing its blocks.

        The number of rows may change, a row may be used many times or never. Rows that stay where they are
        cost nothing; of the others only blocks that differ from the row's earlier ones are counted.
        """
        old, sources = self.tables, list(row_indices)
        if not sources or not all(0 <= source < len(old) for source in sources):
            raise PagedCacheError(f"Expected at least one row index, all of 0…{len(old) - 1}, got {sources}.")
        if sources == list(range(len(old))):
            return
        new = [old[source] if row == source else old[source].fork() for row, source in enumerate(sources)]
        changes = [
            change
            for before, after in zip_longest(old, new)
            if before is not after
            for change in zip_longest(*(t.ids if t else [] for t in (before, after)), fillvalue=NULL_BLOCK)
            if change[0] != change[1]
        ]
        # Shared first, so that no block is without an owner in between.
        self.pool.share([new_id for _, new_id in changes if new_id != NULL_BLOCK])
        self.pool.release([old_id for old_id, _ in changes if old_id != NULL_BLOCK])
        self.tables = new
        self.version += 1

    def fork(self, pool: BlockPool | None = None) -> BlockManager:
        """The same rows in another manager, by sharing their blocks or by the same ids in an empty pool."""
        fork = copy.copy(self)
        fork.tables = [table.fork() for table in self.tables]
        if pool is None:
            self.pool.share(self._stored_ids())
        else:
            fork.pool = pool
            pool.rebuild(pool.num_blocks, fork.holdings())
        return fork

    def adopt(
        self, tables: Sequence[Sequence[int]], num_tokens: int, padding_tokens: Sequence[int]
    ) -> dict[int, int] | None:
        """Begin with rows of so many tokens, padding included, whose tables name blocks by saved numbers.

        Number -> id of the block that was taken for it, by rising numbers; `None` when there are too few.
        """
        numbers = sorted({n for table in tables for n in table if n != NULL_BLOCK})
        taken = self.pool.allocate(len(numbers))
        if taken is None:
            return None
        ids = dict(zip(numbers, taken, strict=True))
        self.tables = [
            BlockTable(self.block_size, [ids.get(n, NULL_BLOCK) for n in table], num_tokens - offset, offset)
            for table, offset in zip(tables, padding_tokens, strict=True)
        ]
        further = Counter(self._stored_ids())
        further.subtract(taken)
        self.pool.share(list(further.elements()))
        self.version += 1
        return ids

    def renumber(self, moved: Mapping[int, int]) -> None:
        """Follow blocks that got other ids."""
        for table in self.tables:
            table.ids[:] = [moved.get(block_id, block_id) for block_id in table.ids]
        self.version += 1

    def reset(self, *, later: bool = False) -> None:
        """Release all rows and forget the batch; `later`: by the pool's pending list, in batches."""
        if self.tables:
            release = self.pool.release_later if later else self.pool.release
            release(self._stored_ids())
            self.forget()

    def save(self) -> Callable[[], None]:
        """Remember the rows. Returns what makes them so again; pools find their counts by `rebuild` then."""
        tables, first_held = [table.fork() for table in self.tables], self.first_held

        def restore() -> None:
            self.tables = [table.fork() for table in tables]
            self.first_held = first_held
            self.version += 1

        return restore

    def forget(self) -> None:
        """Have no rows. The pool is not told."""
        self.tables = []
        self.first_held = 0
        self.version += 1

    def holdings(self) -> list[tuple[list[int], int]]:
        """Of every row the ids of its blocks, and how many leading ones are full for sure."""
        return [(table.ids, table.num_sealed) for table in self.tables]

    def check_integrity(self, other_tables: Iterable[Iterable[int]] = ()) -> None:
        """Raise an AssertionError if pool, rows and the tables of others do not agree. O(pool)."""
        self.pool.check_integrity([*(table.ids for table in self.tables), *other_tables])
        for row, table in enumerate(self.tables):
            if table.end != self.num_tokens or table.blocks_needed(0) != 0:
                raise AssertionError(
                    f"Row {row} has {table.num_tokens} tokens after {table.offset} of padding, in"
                    f" {len(table.ids)} blocks of {self.block_size}, but row 0 ends at {self.num_tokens}."
                )
            for i, block_id in enumerate(table.ids):
                is_null = block_id == NULL_BLOCK
                if is_null and self.window is None:
                    raise AssertionError(
                        f"Logical block {i} of row {row} is not stored, but there is no window."
                    )
                if not is_null and i < table.num_sealed and self.pool.state(block_id) is BlockState.OPEN:
                    raise AssertionError(
                        f"Block {block_id} (row {row}, logical block {i}) is full but still open."
                    )

    def _stored_ids(self) -> list[int]:
        return [block_id for table in self.tables for block_id in table.ids if block_id != NULL_BLOCK]

    def _plan(
        self, num_new_tokens: int, keep_history: bool, padding_tokens: Sequence[int]
    ) -> tuple[list[RowPlan], int]:
        """What a reservation will do to each row, and the blocks that it needs."""
        if not self.tables:
            raise PagedCacheError("There are no rows to reserve tokens for. Call start(batch) first.")
        if num_new_tokens < 1:
            raise PagedCacheError(f"Expected num_new_tokens ≥ 1, got {num_new_tokens}.")
        end = self.num_tokens + num_new_tokens
        offsets = self._offsets(end, padding_tokens)
        # Columns before these are in no window now, and in none after the step.
        left, left_by_end = (
            0 if keep_history else self._first_needed(column) for column in (self.num_tokens, end)
        )
        rows = [
            self._plan_row(table, offset, end, left, left_by_end)
            for table, offset in zip(self.tables, offsets, strict=True)
        ]
        released = Counter(row.table.ids[i] for row in rows for i in row.dropped)
        freed = sum(self.pool.ref_count(block_id) == count for block_id, count in released.items())
        taken = sum(row.num_taken for row in rows) + self._num_copies(rows, released)
        return rows, taken - freed

    def _offsets(self, end: int, padding_tokens: Sequence[int]) -> Sequence[int]:
        """Where rows begin when the batch has so many columns."""
        if not padding_tokens:
            return [table.offset for table in self.tables]
        fits = len(padding_tokens) == self.batch and all(
            table.offset == tokens if table.num_tokens else table.offset <= tokens <= end
            for table, tokens in zip(self.tables, padding_tokens, strict=True)
        )
        if not fits:
            raise PagedCacheError(
                f"Expected padding of {self.batch} rows, each 0…{end} tokens, and as before where a row has "
                f"begun, got {list(padding_tokens)}."
            )
        return padding_tokens

    def _plan_row(self, table: BlockTable, offset: int, end: int, left: int, left_by_end: int) -> RowPlan:
        size, new_tokens = self.block_size, end - offset - table.num_tokens
        num_new = table.blocks_needed(new_tokens)
        num_nulls = min(max(0, (left_by_end - offset) // size - len(table.ids)), num_new)
        gone = range(table.num_dropped, table.token_at(left) // size)
        dropped = [i for i in gone if table.ids[i] != NULL_BLOCK]
        writes_to_last = new_tokens > 0 and table.num_tokens % size > 0
        return RowPlan(table, offset, new_tokens, dropped, num_nulls, num_new - num_nulls, writes_to_last)

    def _let_go(self, plan: list[RowPlan]) -> list[int]:
        """Release what left the window. Returns logical blocks from which on entries changed."""
        self._seal_full_blocks()
        gone = [(row.table, row.dropped) for row in plan if row.dropped]
        self._drop_before((table, (dropped[-1] + 1) * self.block_size) for table, dropped in gone)
        return [dropped[0] for _, dropped in gone]

    def _drop_before(self, tokens: Iterable[tuple[BlockTable, int]]) -> bool:
        """Release the blocks before a token of each row; whether there are any."""
        dropped = [block_id for table, token in tokens for block_id in table.drop_before(token)]
        self.pool.release(dropped)
        self.version += bool(dropped)
        return bool(dropped)

    def _first_needed(self, num_tokens: int) -> int:
        """The first column that a query at column `num_tokens` or later can attend."""
        return 0 if self.window is None else max(0, num_tokens - (self.window - 1))

    def _num_copies(self, rows: list[RowPlan], released: Counter[int]) -> int:
        """Blocks that making every row's partly filled last block writable will take."""
        holders = Counter(row.table.ids[-1] for row in rows if row.writes_to_last)
        left = {block_id: self.pool.ref_count(block_id) - released[block_id] for block_id in holders}
        # The last holder keeps the block, unless someone else holds it too.
        return sum(count - (left[block_id] == count) for block_id, count in holders.items())

    def _seal_full_blocks(self) -> None:
        for table in self.tables:
            num_full = table.num_tokens // self.block_size
            for block_id in table.ids[table.num_sealed : num_full]:
                if block_id != NULL_BLOCK and self.pool.state(block_id) is BlockState.OPEN:
                    self.pool.seal(block_id)
            table.num_sealed = num_full

    def _make_last_writable(self, plan: list[RowPlan], changed: list[int]) -> list[tuple[int, int]]:
        """Make every row's partly filled last block its own. Returns (source, destination) to be copied."""
        copies: list[tuple[int, int]] = []
        for ids in (row.table.ids for row in plan if row.writes_to_last):
            source, destination = ids[-1], self.pool.make_writable(ids[-1])
            if destination is None:
                raise AssertionError(f"Enough blocks were counted, but none is left to copy {source} to.")
            if destination != source:
                ids[-1] = destination
                copies.append((source, destination))
                changed.append(len(ids) - 1)
        return copies

    def _append(self, plan: list[RowPlan]) -> None:
        wanted = sum(row.num_taken for row in plan)
        block_ids = self.pool.allocate(wanted)
        if block_ids is None:
            raise AssertionError(f"No {wanted} blocks were left, though enough were counted.")
        rest = iter(block_ids)
        for row in plan:
            row.table.offset = row.offset
            row.table.append(row.new_tokens, [NULL_BLOCK] * row.num_nulls + [*islice(rest, row.num_taken)])
