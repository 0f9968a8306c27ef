"""Layers that share block tables: their bookkeeping, their pools, and the tables as kernels read them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .blocks import BlockManager, Reservation
from .kernels.problem import NULL_BLOCK, LayerBlocks, RowLengths
from .kv_pool import KVPool, PoolShape
from .spec import LayerSpec


@dataclass(frozen=True, slots=True)
class Owner:
    """The attention module that was seen to use a layer's K and V.

    Attributes:
        module: The module, if it still lives.
        fingerprint: What tells its weights from others.
    """

    module: weakref.ref[torch.nn.Module]
    fingerprint: tuple[Any, ...]


class LayerGroup:
    """The layers of one cache that keep the same tokens (all, or those of one window).

    Block ids are shared by the layers of a group, so that bookkeeping is done once per step and not once per
    layer. Layers of one shape also share one `KVPool`; a group with layers of several shapes (or on several
    devices) has several pools under the same ids.

    Args:
        window: Tokens a query sees, or None for all.
        specs: Layer index -> what the config says of that layer.
        num_blocks: Blocks of each pool.
        block_size: Tokens per block.
        row_blocks: Blocks of the longest row that is expected; tables are made that wide.

    Attributes:
        window: Tokens a query sees, itself included, or None for all.
        specs: Layer index -> what the config says of that layer.
        manager: Which block belongs to which row; integers only.
        pools: The tensors, made when the first layer that needs them is written.
        owners: Layer index -> whose weights computed that layer's K and V.
    """

    def __init__(
        self,
        window: int | None,
        specs: dict[int, LayerSpec],
        *,
        num_blocks: int,
        block_size: int,
        row_blocks: int,
    ) -> None:
        self.window = window
        self.specs = specs
        self.manager = BlockManager(num_blocks, block_size, window=window)
        self.pools: list[KVPool] = []
        self._row_blocks = row_blocks
        self._tokens = 0
        self.owners: dict[int, Owner] = {}
        self._layers: dict[int, tuple[KVPool, int, LayerBlocks]] = {}
        self._tables: dict[torch.device, torch.Tensor] = {}
        self._lengths: dict[torch.device, RowLengths] = {}

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.manager.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks of each pool."""
        return self.manager.pool.num_blocks

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.nbytes for pool in self.pools)

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks that hold tokens now."""
        return self.manager.pool.num_referenced * sum(pool.bytes_per_block for pool in self.pools)

    @property
    def table_bytes(self) -> int:
        """Bytes of the block tables and lengths that kernels read."""
        lengths = (held.on_device for held in self._lengths.values())
        return sum(tensor.nbytes for tensor in (*self._tables.values(), *lengths))

    def claim(self, layer_idx: int, key_states: torch.Tensor, value_states: torch.Tensor) -> LayerBlocks:
        """Give a layer its place, allocating a pool if none fits. Called once per layer."""
        shape = PoolShape.of(key_states, value_states)
        pool = next((pool for pool in self.pools if pool.shape == shape and pool.has_free_slot), None)
        if pool is None:
            pool = KVPool(
                shape,
                num_blocks=self.num_blocks,
                num_layers=self._expected_layers(layer_idx),
                block_size=self.block_size,
            )
            self.pools.append(pool)
        slot = pool.claim_slot()
        table = self._table_on(shape.device)
        blocks = LayerBlocks(pool.keys[:, slot], pool.values[:, slot], table, self._lengths.get(shape.device))
        self._layers[layer_idx] = (pool, slot, blocks)
        return blocks

    def apply(self, reservation: Reservation) -> None:
        """Bring pools and tables up to what the manager has just reserved."""
        if reservation.copies:
            src, dst = (list(ids) for ids in zip(*reservation.copies, strict=True))
            for pool in self.pools:
                pool.copy_blocks(src, dst)
        self.sync_tables(reservation.changed_from)
        self.set_length(reservation.end)

    def set_length(self, tokens: int) -> None:
        """Tell kernels of a GPU how many tokens every row has."""
        self._tokens = tokens
        for lengths in self._lengths.values():
            lengths.set(tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens of every row."""
        return self.manager.num_tokens

    def start(self, batch: int) -> None:
        """Begin with so many empty rows."""
        self.manager.start(batch)
        self._tokens = 0
        self.sync_tables()

    def reset(self) -> None:
        """Forget the rows and give their blocks back."""
        self.manager.reset()
        self.owners.clear()
        self._tokens = 0

    def reserve(self, new_tokens: int, *, keep_history: bool) -> None:
        """Make room for new tokens of every row; the caller has seen that there is room."""
        reservation = self.manager.reserve(new_tokens, keep_history=keep_history)
        assert reservation is not None, "room was checked for every group before any was reserved"
        self.apply(reservation)

    def check_crop(self, num_tokens: int) -> None:
        """Raise what `crop` would raise; changes nothing."""
        self.manager.check_crop(num_tokens)

    def crop(self, num_tokens: int) -> None:
        """Cut every row down to its first tokens."""
        self.manager.crop(num_tokens)
        self.set_length(num_tokens)

    def release_outside_window(self) -> None:
        """Give back what was only kept for a roll-back."""
        if self.manager.release_outside_window():
            self.sync_tables()

    def reorder(self, row_indices: Sequence[int]) -> None:
        """Make the rows copies of the given old rows, by reference."""
        self.manager.reorder(row_indices)
        self.sync_tables()

    def grow(self, num_blocks: int) -> None:
        """Enlarge every pool to `num_blocks`; ids and contents stay. All pools or none."""
        used = self._used_blocks()
        larger = [pool.copy(num_blocks, used) for pool in self.pools]
        self.manager.pool.grow(num_blocks - self.num_blocks)
        for pool, copied in zip(self.pools, larger, strict=True):
            pool.keys, pool.values = copied.keys, copied.values
        for pool, slot, blocks in self._layers.values():
            blocks.keys, blocks.values, blocks.native = pool.keys[:, slot], pool.values[:, slot], None

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerGroup:
        """A copy with pools of its own, into which only the blocks in use are written."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        vars(twin).update(vars(self))
        used = self._used_blocks()
        twin.manager = copy.deepcopy(self.manager, memo)
        twin.owners = dict(self.owners)
        twin._tables = {device: table.clone() for device, table in self._tables.items()}
        twin._lengths = {
            device: RowLengths(held.tokens, held.on_device.clone()) for device, held in self._lengths.items()
        }
        pools = {id(pool): pool.copy(self.num_blocks, used) for pool in self.pools}
        twin.pools = list(pools.values())
        twin._layers = {}
        for index, (pool, slot, blocks) in self._layers.items():
            mine = pools[id(pool)]
            device = pool.shape.device
            copied = memo[id(blocks)] = LayerBlocks(
                mine.keys[:, slot], mine.values[:, slot], twin._tables[device], twin._lengths.get(device)
            )
            twin._layers[index] = (mine, slot, copied)
        return twin

    def has_gap(self, start: int) -> bool:
        """Whether a token from `start` on is not stored, as of a prompt longer than the window."""
        tables = self.manager.tables
        return bool(tables) and NULL_BLOCK in tables[0].ids[start // self.block_size :]

    def sync_tables(self, from_column: int = 0) -> None:
        """Copy the manager's rows, from one block column on, to the tables that kernels read."""
        rows = [table.ids for table in self.manager.tables]
        for device, table in self._tables.items():
            if not self._fits(table, rows):
                table = self._new_table(device, rows)
                from_column = 0
            _write_rows(table, rows, from_column)

    def _used_blocks(self) -> list[int]:
        return sorted({block_id for table in self.manager.tables for block_id in table.stored_ids()})

    def _expected_layers(self, layer_idx: int) -> int:
        hint = self.specs[layer_idx]
        return sum(1 for index, spec in self.specs.items() if spec == hint and index not in self._layers)

    def _table_on(self, device: torch.device) -> torch.Tensor:
        if device not in self._tables:
            rows = [table.ids for table in self.manager.tables]
            _write_rows(self._new_table(device, rows), rows, 0)
        return self._tables[device]

    def _columns(self, longest: int) -> int:
        """Columns of a new table, for rows of which the longest has so many blocks."""
        return max(self._row_blocks, 2 * longest)

    def _has_lengths(self, device: torch.device) -> bool:
        """Whether kernels read lengths there, and not from the host."""
        return device.type != "cpu"

    def _fits(self, table: torch.Tensor, rows: list[list[int]]) -> bool:
        return table.shape[0] == len(rows) and all(len(row) <= table.shape[1] for row in rows)

    def _new_table(self, device: torch.device, rows: list[list[int]]) -> torch.Tensor:
        """A table that rows do not outgrow and lengths for as many rows, for every layer on that device."""
        longest = max((len(row) for row in rows), default=0)
        columns = self._columns(longest)
        with torch.inference_mode(False):
            table = torch.full((len(rows), columns), NULL_BLOCK, dtype=torch.int32, device=device)
            if self._has_lengths(device):
                lengths = torch.full((len(rows),), self._tokens, dtype=torch.int32, device=device)
                self._lengths[device] = RowLengths(self._tokens, lengths)
        self._tables[device] = table
        for pool, _, blocks in self._layers.values():
            if pool.shape.device == device:
                blocks.table, blocks.lengths, blocks.native = table, self._lengths.get(device), None
        return table


def _write_rows(table: torch.Tensor, rows: list[list[int]], from_column: int) -> None:
    if table.device.type == "cpu":
        array = table.numpy()
        for index, row in enumerate(rows):
            array[index, from_column : len(row)] = row[from_column:]
        return
    width = max((len(row) for row in rows), default=0) - from_column
    if width <= 0:
        return
    padded = np.full((len(rows), width), NULL_BLOCK, dtype=np.int32)
    for index, row in enumerate(rows):
        padded[index, : len(row) - from_column] = row[from_column:]
    # Pinned, so that the host need not wait until the device has read it.
    sent = torch.from_numpy(padded)
    sent = sent.pin_memory() if table.device.type == "cuda" else sent
    table[:, from_column : from_column + width] = sent.to(table.device, non_blocking=True)
