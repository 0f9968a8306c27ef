"""Blocks of quantized layers that are kept in the model's own dtype, and their places in the pools."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .block import NULL_BLOCK

if TYPE_CHECKING:
    from .block_manager import BlockManager, Reservation
    from .block_table import BlockTable


class Moves(NamedTuple):
    """What a reservation changes in quantized layers, as pairs of (source, target)."""

    copied: list[tuple[int, int]]  # dense ids: a shared block that a row will write to
    unsealed: list[tuple[int, int]]  # id -> dense id: a record that a row will write to, its tail was cropped
    records: list[tuple[int, int]]  # id -> id: a shared block that a row will write to, and stays a record
    columns: list[int]  # of the tables, whose entries changed, besides those that the reservation tells of


class DenseBlocks:
    """The dense blocks of one layer group: the first `sink_blocks` of every row, and its newest ones.

    Each has a dense id beside its block id: its place among the dense blocks in the pools. Rows that begin
    later than others have their own first blocks as sinks. A block that was being filled is sealed by the
    first reservation after it is full, not before: what a rejected draft wrote never becomes bytes.

    A row's table lists which of its blocks are dense, so that a step looks at those and not at all there are.

    ```
    block_size 4, sink_blocks 1, residual_blocks 1        (D: dense, r: record)
    reserve 18:  DDDD rrrr rrrr rrrr DD                   full blocks of a prompt become records at once
    reserve 2:   DDDD rrrr rrrr rrrr DDDD                 full, but a draft may be cropped yet
    reserve 1:   DDDD rrrr rrrr rrrr rrrr D
    crop to 15:  DDDD rrrr rrrr rrr                       the bytes stay
    reserve 1:   DDDD rrrr rrrr DDDD                      a write decodes that one block
    ```

    Plain data, can be deep-copied.
    """

    def __init__(self, sink_blocks: int, residual_blocks: int) -> None:
        self.sink_blocks = sink_blocks  # at the beginning of every row
        self.residual_blocks = residual_blocks  # at its end, the open one included; 0: tokens go to bytes
        self.num_dense = 0  # dense blocks that pools must have room for
        self._dense_ids: dict[int, int] = {}  # by block id
        self._free: list[int] = []

    def __bool__(self) -> bool:
        """Whether any block is ever dense."""
        return self.sink_blocks + self.residual_blocks > 0

    @property
    def dense_per_row(self) -> int:
        """Dense blocks that a row can need at one time: one block may be full and not yet sealed."""
        return self.sink_blocks + self.residual_blocks + bool(self.residual_blocks)

    def dense_ids(self, manager: BlockManager) -> dict[int, int]:
        """Block id -> dense id, of all rows."""
        return {table.ids[c]: self._dense_ids[table.ids[c]] for table in manager.tables for c in table.dense}

    def columns_of(self, table: BlockTable) -> list[tuple[int, int]]:
        """The dense columns of a row, as (column, dense id)."""
        return [(column, self._dense_ids[table.ids[column]]) for column in table.dense]

    def renumber(self, moved: Mapping[int, int]) -> None:
        """Follow blocks that got other ids, which nobody held."""
        for block_id in moved.values():
            self._drop(block_id)
        self._dense_ids = {moved.get(old, old): dense_id for old, dense_id in self._dense_ids.items()}

    def adopt(self, manager: BlockManager, ids: Sequence[int]) -> list[int]:
        """Make blocks of rows that were adopted dense. Returns their dense ids."""
        wanted = set(ids)
        for table in manager.tables:
            table.dense = [column for column, block_id in enumerate(table.ids) if block_id in wanted]
        return [self._dense_id(manager, block_id) for block_id in ids]

    def full(self, manager: BlockManager, new_tokens: int) -> list[tuple[int, int]]:
        """Blocks to seal before new tokens are reserved, as (dense id, block id)."""
        ids = {table.ids[c]: None for table, c in self._full_columns(manager, new_tokens)}
        return [(self._dense_ids[block_id], block_id) for block_id in ids]

    def release_full(self, manager: BlockManager, new_tokens: int) -> list[int]:
        """Make what `full` says dense no more, and its dense ids free. Returns the columns of the tables."""
        full = self._full_columns(manager, new_tokens)
        for block_id in {table.ids[c] for table, c in full}:
            self._drop(block_id)
        for table in manager.tables if full else ():
            table.dense = [c for c in table.dense if table.ids[c] in self._dense_ids]
        return [column for _, column in full]

    def follow(self, manager: BlockManager, reservation: Reservation) -> Moves:
        """Give dense ids to what a reservation made dense."""
        size, moves = manager.block_size, Moves([], [], [], [])
        sources = {new: old for old, new in reservation.copies}
        for block_id in sources:
            self._drop(block_id)  # of an earlier life of that block
        # The tables name the copies by now, and the dense ids of what is copied have to last until then.
        left = set(sources.values())
        starts = [(table, table.token_at(reservation.start)) for table in manager.tables]
        grown = [(table, start) for table, start in starts if table.num_tokens > start]
        for table, start in grown:
            column = start // size
            if not start % size:
                continue
            block_id = table.ids[column]
            source = sources.get(block_id, block_id)
            if not self.residual_blocks and column >= self.sink_blocks:
                if source != block_id:
                    moves.records.append((source, block_id))
            elif source not in self._dense_ids:
                table.dense.append(column)
                moves.unsealed.append((source, self._dense_id(manager, block_id, left)))
                moves.columns.append(column)
            elif source != block_id:
                moves.copied.append((self._dense_ids[source], self._dense_id(manager, block_id, left)))
        for table, start in grown:
            last = (table.num_tokens - 1) // size
            for column in range(-(-start // size), last + 1):
                if column < self.sink_blocks or column > last - self.residual_blocks:
                    if table.ids[column] != NULL_BLOCK:
                        table.dense.append(column)
                        self._dense_id(manager, table.ids[column], left)
                else:
                    self._drop(table.ids[column])
        return moves

    def reset(self) -> None:
        """Forget everything."""
        self._dense_ids.clear()
        self._free = list(range(self.num_dense - 1, -1, -1))

    def save(self) -> Callable[[], None]:
        """Remember what there is. Returns what makes it so again."""
        num_dense, dense_ids, free = self.num_dense, self._dense_ids.copy(), self._free.copy()

        def restore() -> None:
            self.num_dense, self._dense_ids, self._free = num_dense, dense_ids.copy(), free.copy()

        return restore

    def provide(self, num_dense: int) -> None:
        """Have so many dense ids at least."""
        self._free[:0] = range(num_dense - 1, self.num_dense - 1, -1)
        self.num_dense = max(self.num_dense, num_dense)

    def check_integrity(self, manager: BlockManager) -> None:
        """Raise an AssertionError if a dense id is lost or used twice, or a table lists other blocks."""
        for row, table in enumerate(manager.tables):
            dense = [column for column, block_id in enumerate(table.ids) if block_id in self._dense_ids]
            if table.dense != dense:
                raise AssertionError(f"Row {row} lists {table.dense} as dense, and {dense} have dense ids.")
        used, free = list(self._dense_ids.values()), self._free
        if sorted([*used, *free]) != list(range(self.num_dense)):
            raise AssertionError(
                f"dense ids {used} and the free {free} are not the {self.num_dense} there are"
            )

    def _full_columns(self, manager: BlockManager, new_tokens: int) -> list[tuple[BlockTable, int]]:
        """Dense blocks that are full when so many columns come, as (row's table, column)."""
        if not self.residual_blocks:
            return []
        size, end = manager.block_size, manager.num_tokens + new_tokens
        found = []
        for table in manager.tables:
            last = (end - table.offset - 1) // size
            stop = min(last - self.residual_blocks + 1, table.num_tokens // size)
            found += [(table, c) for c in table.dense if self.sink_blocks <= c < stop]
        return found

    def _dense_id(self, manager: BlockManager, block_id: int, kept: Collection[int] = ()) -> int:
        if block_id not in self._dense_ids:
            if not self._free:
                held = {table.ids[c] for table in manager.tables for c in table.dense}.union(kept)
                for stale in self._dense_ids.keys() - held:
                    self._drop(stale)
            if not self._free:
                self.provide(self.num_dense + max(1, self.num_dense // 2))
            self._dense_ids[block_id] = self._free.pop()
        return self._dense_ids[block_id]

    def _drop(self, block_id: int) -> None:
        dense_id = self._dense_ids.pop(block_id, None)
        if dense_id is not None:
            self._free.append(dense_id)
