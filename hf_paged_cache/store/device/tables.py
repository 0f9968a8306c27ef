"""Block tables and lengths of a group's rows, as kernels read them on each device."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from hf_paged_cache.kernels.call import NULL_BLOCK, LayerBlocks, RowLengths, dense_entry, on_device

if TYPE_CHECKING:
    from hf_paged_cache.blocks import BlockManager, DenseBlocks


class DeviceTables:
    """The tables of one layer group.

    There are up to two on a device: one with the ids of all blocks, and one in which entries of dense blocks
    are marked, for quantized layers.
    """

    def __init__(self, manager: BlockManager, dense: DenseBlocks, row_blocks: int, *, is_fixed: bool) -> None:
        self.row_blocks = row_blocks  # of the longest row that is expected; tables are made that wide
        self.tokens = 0  # of every row
        self.offsets: tuple[int, ...] = ()  # as of `BlockManager`
        self._manager = manager
        self._dense = dense
        self._is_fixed = is_fixed  # tables have just that many columns, and lengths lie on CPUs too
        self._tables: dict[tuple[torch.device, bool], torch.Tensor] = {}
        self._lengths: dict[torch.device, RowLengths] = {}
        self._offsets: dict[torch.device, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all tables and lengths."""
        lengths = (held.on_device for held in self._lengths.values())
        return sum(t.nbytes for t in (*self._tables.values(), *lengths, *self._offsets.values()))

    def table(self, device: torch.device, *, is_marked: bool) -> torch.Tensor:
        """The table on a device, int32 `[rows, columns]`; made if there is none."""
        if (device, is_marked) not in self._tables:
            self._renew(device, is_marked)
        return self._tables[device, is_marked]

    def bind(self, blocks: LayerBlocks, device: torch.device, *, is_marked: bool) -> None:
        """Point a layer's blocks to what there is on its device."""
        blocks.table = self.table(device, is_marked=is_marked)
        blocks.lengths = self._lengths.get(device)  # none where kernels are told by the host
        if self.offsets and device not in self._offsets:
            with torch.inference_mode(False):
                self._offsets[device] = on_device(self.offsets, device)
        blocks.offsets = self._offsets.get(device)
        blocks.dense_columns = self.dense_columns(device, is_marked=is_marked)

    def dense_columns(self, device: torch.device, *, is_marked: bool) -> tuple[tuple[int, ...], ...] | None:
        """As `LayerBlocks` has them; on a CPU nobody asks."""
        if device.type == "cpu":
            return None
        rows = [tuple(table.dense) for table in self._manager.tables] if is_marked else []
        return tuple(rows[:1] if len(set(rows)) == 1 else rows)

    def sync(self, from_column: int) -> bool:
        """Bring all tables up to date from one column on. Returns whether a tensor had to be replaced."""
        is_replaced = self.offsets != self._manager.offsets
        if is_replaced:
            self.offsets, self._offsets = self._manager.offsets, {}
        for (device, is_marked), table in tuple(self._tables.items()):
            rows = self._rows(is_marked, from_column)
            if self._fits(table, rows, from_column):
                _write_rows(table, rows, from_column)
            else:
                self._renew(device, is_marked)
                is_replaced = True
        return is_replaced

    def set_length(self, tokens: int) -> None:
        """Tell kernels of a GPU how many tokens every row has."""
        self.tokens = tokens
        for lengths in self._lengths.values():
            lengths.set(tokens)

    def pull_length(self) -> int:
        """Tokens of every row, asked of a device."""
        lengths = next(iter(self._lengths.values()), None)
        if lengths is not None:
            self.tokens = int(lengths.on_device[0])
            for held in self._lengths.values():
                held.tokens = self.tokens
        return self.tokens

    def copy(self, manager: BlockManager, dense: DenseBlocks) -> DeviceTables:
        """The same for a copy of the rows, in tensors of its own."""
        return copy.deepcopy(self, {id(self._manager): manager, id(self._dense): dense})

    def _rows(self, is_marked: bool, from_column: int) -> list[list[int]]:
        """The entries of all rows from one column on."""
        rows = [table.ids[from_column:] for table in self._manager.tables]
        for row, table in zip(rows, self._manager.tables, strict=True) if is_marked else ():
            for column, dense_id in self._dense.columns_of(table):
                if column >= from_column:
                    row[column - from_column] = dense_entry(dense_id)
        return rows

    def _fits(self, table: torch.Tensor, rows: list[list[int]], from_column: int) -> bool:
        if self._is_fixed:
            return table.shape == (len(rows), self.row_blocks)
        return table.shape[0] == len(rows) and all(from_column + len(row) <= table.shape[1] for row in rows)

    def _renew(self, device: torch.device, is_marked: bool) -> None:
        """A table that rows do not outgrow, and lengths for as many rows."""
        rows, columns = self._rows(is_marked, 0), self.row_blocks
        if not self._is_fixed:
            columns = max(columns, 2 * max((len(row) for row in rows), default=0))
        held = self._lengths.get(device)
        with torch.inference_mode(False):
            table = torch.full((len(rows), columns), NULL_BLOCK, dtype=torch.int32, device=device)
            if self._has_lengths(device) and (held is None or held.on_device.shape[0] != len(rows)):
                lengths = torch.full((len(rows),), self.tokens, dtype=torch.int32, device=device)
                self._lengths[device] = RowLengths(self.tokens, lengths)
        self._tables[device, is_marked] = table
        _write_rows(table, rows, 0)

    def _has_lengths(self, device: torch.device) -> bool:
        """Whether kernels read lengths there, and not from the host."""
        return self._is_fixed or device.type != "cpu"


def _write_rows(table: torch.Tensor, rows: list[list[int]], from_column: int) -> None:
    width = max((len(row) for row in rows), default=0)
    if table.device.type == "cpu":
        array = table.numpy()
        for index, row in enumerate(rows):
            array[index, from_column : from_column + len(row)] = row
    elif width:
        padded = [row + [NULL_BLOCK] * (width - len(row)) for row in rows]
        table[:, from_column : from_column + width] = on_device(padded, table.device)
