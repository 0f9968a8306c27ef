"""Which blocks of quantised layers are kept in the model's own dtype, and in which slots of the pools."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from hf_paged_cache.blocks.block import NULL_BLOCK
from hf_paged_cache.blocks.manager import BlockManager
from hf_paged_cache.blocks.reservation import Reservation


def slots_per_row(sink_blocks: int, residual_blocks: int) -> int:
    """Slots that a row can need at one time: one block may be full and not yet sealed."""
    return sink_blocks + residual_blocks + (1 if residual_blocks else 0)


class Moves(NamedTuple):
    """What a reservation changes in the slots, as pairs of (source, target).

    Attributes:
        copied: Slot -> slot: a shared block that a row will write to.
        unsealed: Block id -> slot: a record that a row will write to, after its tail was cropped.
        columns: Columns of the tables whose entries changed, besides those that the reservation tells of.
    """

    copied: list[tuple[int, int]]
    unsealed: list[tuple[int, int]]
    columns: list[int]


class SavedSlots(NamedTuple):
    """What dense blocks were at one time, see `DenseBlocks.save`."""

    columns: list[int]
    num_slots: int
    slots: dict[int, int]
    free: list[int]


class DenseBlocks:
    """The dense blocks of one layer group: the first `sink_blocks` of every row, and its newest ones.

    All rows are equally long, so it is the same columns in all tables (of a row that begins with padding, the
    sinks are where they are in the others, and may not be stored); which slot a block has goes by its id, so
    that rows that share a block share its slot. A block that was being filled is sealed by the first
    reservation after it is full, not before: what a rejected draft wrote never becomes bytes.

    ```
    block_size 4, sink_blocks 1, residual_blocks 1        (D: dense, r: record)
    reserve 18:  DDDD rrrr rrrr rrrr DD                   full blocks of a prompt become records at once
    reserve 2:   DDDD rrrr rrrr rrrr DDDD                 full, but a draft may be cropped yet
    reserve 1:   DDDD rrrr rrrr rrrr rrrr D
    crop to 15:  DDDD rrrr rrrr rrr                       the bytes stay
    reserve 1:   DDDD rrrr rrrr DDDD                      a write decodes that one block
    ```

    Plain data, can be deep-copied.

    Args:
        sink_blocks: Blocks at the beginning of every row.
        residual_blocks: Blocks at its end, the one being filled included; 0 where formats take single tokens.

    Attributes:
        columns: The columns that are dense now, in order.
        num_slots: Slots that pools must have.
    """

    def __init__(self, sink_blocks: int, residual_blocks: int) -> None:
        self.sink_blocks = sink_blocks
        self.residual_blocks = residual_blocks
        self.columns: list[int] = []
        self.num_slots = 0
        self._slots: dict[int, int] = {}
        self._free: list[int] = []

    def live_slots(self, manager: BlockManager) -> list[int]:
        """Slots of blocks that rows hold, in order."""
        held = self._held(manager)
        return sorted(slot for block_id, slot in self._slots.items() if block_id in held)

    def slots_by_id(self, manager: BlockManager) -> dict[int, int]:
        """Block id -> slot, of the dense blocks of all rows."""
        return {table.ids[c]: slot for table in manager.tables for c, slot in self.slots_of(table.ids)}

    def renumber(self, moved: Mapping[int, int]) -> None:
        """Follow blocks that got other ids, which nobody held."""
        for block_id in moved.values():
            self._drop(block_id)
        self._slots = {moved.get(block_id, block_id): slot for block_id, slot in self._slots.items()}

    def adopt(self, manager: BlockManager, columns: Sequence[int], ids: Sequence[int]) -> list[int]:
        """Make blocks of rows that were adopted dense. Returns their slots."""
        self.columns = list(columns)
        return [self._slot_for(manager, block_id) for block_id in ids]

    def full(self, manager: BlockManager, new_tokens: int) -> list[tuple[int, int]]:
        """Blocks to seal before new tokens are reserved, as (slot, block id)."""
        columns = self._full_columns(manager, new_tokens)
        ids = {table.ids[c]: None for c in columns for table in manager.tables if table.ids[c] != NULL_BLOCK}
        return [(self._slots[block_id], block_id) for block_id in ids]

    def release_full(self, manager: BlockManager, new_tokens: int) -> list[int]:
        """Make what `full` says dense no more, and its slots free. Returns those columns."""
        columns = self._full_columns(manager, new_tokens)
        for _, block_id in self.full(manager, new_tokens) if columns else ():
            self._drop(block_id)
        self.columns = [column for column in self.columns if column not in columns]
        return columns

    def follow(self, manager: BlockManager, reservation: Reservation) -> Moves:
        """Give slots to what a reservation made dense."""
        size, tables = manager.block_size, manager.tables
        first_new = -(-reservation.start // size)
        last = (reservation.end - 1) // size
        copied: list[tuple[int, int]] = []
        unsealed: list[tuple[int, int]] = []
        changed: list[int] = []
        for block_id in (*(target for _, target in reservation.copies), *reservation.blanks):
            self._drop(block_id)  # of an earlier life of that block
        sources = {new: old for old, new in reservation.copies}
        # The tables name the copies by now, and the slots of what is copied have to last until then.
        left = set(sources.values())
        if reservation.start % size and self._writes_densely(reservation.start // size):
            column = reservation.start // size
            for block_id in {table.ids[column]: None for table in tables if table.ids[column] != NULL_BLOCK}:
                source = sources.get(block_id, block_id)
                if source in self._slots and source != block_id:
                    copied.append((self._slots[source], self._slot_for(manager, block_id, left)))
                elif source not in self._slots:
                    unsealed.append((source, self._slot_for(manager, block_id, left)))
            if column not in self.columns:
                self.columns.append(column)
                changed.append(column)
        for column in range(first_new, last + 1):
            is_dense = column < self.sink_blocks or column > last - self.residual_blocks
            ids = {table.ids[column]: None for table in tables if table.ids[column] != NULL_BLOCK}
            for block_id in ids:
                if is_dense:
                    self._slot_for(manager, block_id, left)
                else:
                    self._drop(block_id)
            if is_dense and ids:
                self.columns.append(column)
        self.columns = sorted(c for c in self.columns if any(table.ids[c] != NULL_BLOCK for table in tables))
        return Moves(copied, unsealed, changed)

    def crop(self, num_blocks: int) -> None:
        """Forget the columns that rows do not have any more."""
        self.columns = [column for column in self.columns if column < num_blocks]

    def reset(self) -> None:
        """Forget everything."""
        self.columns = []
        self._slots.clear()
        self._free = list(range(self.num_slots - 1, -1, -1))

    def save(self) -> SavedSlots:
        """What there is now."""
        return SavedSlots(self.columns.copy(), self.num_slots, self._slots.copy(), self._free.copy())

    def restore(self, saved: SavedSlots) -> None:
        """Be again what was saved."""
        self.columns, self.num_slots = saved.columns.copy(), saved.num_slots
        self._slots, self._free = saved.slots.copy(), saved.free.copy()

    def provide_rows(self, rows: int) -> None:
        """Have the slots that so many rows can need."""
        self._provide(rows * slots_per_row(self.sink_blocks, self.residual_blocks))

    def _provide(self, num_slots: int) -> None:
        self._free[:0] = range(num_slots - 1, self.num_slots - 1, -1)
        self.num_slots = max(self.num_slots, num_slots)

    def slots_of(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """The dense columns of a row, as (column, slot)."""
        return [
            (column, self._slots[ids[column]])
            for column in self.columns
            if column < len(ids) and ids[column] != NULL_BLOCK
        ]

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise an AssertionError if a dense block has no slot, or two blocks have one."""
        slots = list(self._slots.values())
        if len({*slots, *self._free}) != self.num_slots or len(slots) + len(self._free) != self.num_slots:
            raise AssertionError(
                f"{len(slots)} used and {len(self._free)} free slots are not the {self.num_slots} there are"
            )
        for row, ids in enumerate(tables):
            for column in self.columns:
                if ids[column] != NULL_BLOCK and ids[column] not in self._slots:
                    raise AssertionError(f"block {ids[column]} (row {row}, column {column}) has no slot")

    def _full_columns(self, manager: BlockManager, new_tokens: int) -> list[int]:
        if not self.residual_blocks:
            return []
        last = (manager.num_tokens + new_tokens - 1) // manager.block_size
        end = min(last - self.residual_blocks + 1, manager.num_tokens // manager.block_size)
        return [column for column in self.columns if self.sink_blocks <= column < end]

    def _writes_densely(self, column: int) -> bool:
        return self.residual_blocks > 0 or column < self.sink_blocks

    def _slot_for(self, manager: BlockManager, block_id: int, kept: Collection[int] = ()) -> int:
        if block_id not in self._slots:
            if not self._free:
                held = self._held(manager).union(kept)
                for stale in [block_id for block_id in self._slots if block_id not in held]:
                    self._drop(stale)
            if not self._free:
                self._provide(self.num_slots + max(1, self.num_slots // 2))
            self._slots[block_id] = self._free.pop()
        return self._slots[block_id]

    def _held(self, manager: BlockManager) -> set[int]:
        """Blocks of the rows; others may hold blocks of the pool too."""
        return {block_id for table in manager.tables for block_id in table.ids}

    def _drop(self, block_id: int) -> None:
        slot = self._slots.pop(block_id, None)
        if slot is not None:
            self._free.append(slot)
