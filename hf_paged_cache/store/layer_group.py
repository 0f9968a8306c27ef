"""Layers that share block tables: their bookkeeping, their pools, and the tables as kernels read them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Self

import torch

from hf_paged_cache.blocks.block import NULL_BLOCK
from hf_paged_cache.blocks.block_manager import BlockManager
from hf_paged_cache.blocks.dense_blocks import DenseBlocks
from hf_paged_cache.errors import PagedCacheError
from hf_paged_cache.formats import KVFormat, format_name, with_keys_in_int8
from hf_paged_cache.kernels.call import LayerBlocks

from . import key_guard
from .device.fault_flags import Faults
from .device.tables import DeviceTables
from .pool_tensors import LayerPool, PoolShape, split_pairs
from .saved import SavedGroup, SavedLayer
from .store import Saved
from .window_store import Holder, WindowStore

if TYPE_CHECKING:
    from hf_paged_cache.config import KeyErrorGuard
    from hf_paged_cache.host.architectures import LayerSpec

    from .precision import Precision


class LayerGroup:
    """The layers of one cache that keep the same tokens (all, or those of one window).

    Block ids are shared by the layers of a group, so that bookkeeping is done once per step and not once per
    layer. Layers of one shape also share one `LayerPool`; a group with layers of several shapes (or on
    several devices) has several pools under the same ids. Its store may serve other caches too.
    """

    HAS_FIXED_ROWS = False  # whether rows have all their blocks from the start

    def __init__(
        self,
        specs: dict[int, LayerSpec],
        store: WindowStore,
        precision: Precision,
        *,
        row_blocks: int,  # of the longest row that is expected; tables are made that wide
        guard: KeyErrorGuard = "off",
    ) -> None:
        self.specs = specs  # by layer index
        self.store = store
        self.formats = {index: precision.formats[index] for index in specs}
        self.manager = BlockManager(store.num_blocks, store.block_size, store.window, pool=store.blocks)
        is_quantized = any(self.formats.values())
        self.dense = precision.dense_blocks(store.block_size) if is_quantized else DenseBlocks(0, 0)
        self._guard = guard
        # Layers that the guard has yet to look at.
        self.unguarded = {i for i in specs if guard != "off" and key_guard.concerns(self.formats[i])}
        self.pools: list[LayerPool] = []  # made when the first layer that needs them is written
        self.holder = Holder(self.manager, self.pools)
        self.blocks: dict[int, LayerBlocks] = {}  # by layer; filled as layers claim their places
        self._pools: dict[int, LayerPool] = {}  # by layer
        self.tables = DeviceTables(self.manager, self.dense, row_blocks, is_fixed=self.HAS_FIXED_ROWS)
        self.faults: dict[torch.device, Faults] = {}
        self._store_version = store.version
        store.join(self.holder)

    @property
    def window(self) -> int | None:
        """Tokens a query sees, itself included, or None for all."""
        return self.store.window

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.manager.block_size

    @property
    def num_tokens(self) -> int:
        """Tokens of every row."""
        return self.manager.num_tokens

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools, those that are shared with other caches included."""
        shared = sum(tensors.nbytes for tensors in self.store.tensors)
        return shared + sum(pool.dense_bytes for pool in self.pools)

    def bytes_by_format(self) -> Counter[str]:
        """Format -> bytes of the blocks that hold tokens; `auto` is the model's dtype."""
        blocks, dense = self.store.blocks.num_referenced, len(self.dense.dense_ids(self.manager))
        total: Counter[str] = Counter()
        for shape in (pool.shape for pool in self._pools.values()):
            total["auto"] += (dense if shape.format else blocks) * shape.dense_bytes(self.block_size)
            if shape.format is not None:
                total[shape.format.name] += (blocks - dense) * shape.block_bytes(self.block_size)
        return total

    def claim(self, layer_idx: int, shape: PoolShape) -> LayerBlocks:
        """Give a layer its place, allocating a pool if none fits. Called once per layer."""
        shape = replace(shape, format=self.formats[layer_idx])
        try:
            shape.layout(self.block_size)
        except PagedCacheError as error:
            raise PagedCacheError(f"layer {layer_idx}: {error}") from error
        self.store.streams.enter(shape.device, takes_blocks=True)
        alike = self.specs[layer_idx], self.formats[layer_idx]
        left = self.specs.keys() - self._pools.keys()
        expected = sum((self.specs[index], self.formats[index]) == alike for index in left)
        return self._add_layer(layer_idx, self._pool_for(layer_idx, shape, expected))

    # --- rows -----------------------------------------------------------------------------------------------

    def start(self, batch: int) -> None:
        """Begin with so many empty rows."""
        self.manager.start(batch)
        self.tables.tokens = 0
        for faults in self.faults.values():  # of rows before; here, where there are none to go back to
            faults.reset()
        self.dense.provide(batch * self.dense.dense_per_row)
        self._grow_dense()
        self.sync_tables()

    def reset(self) -> None:
        """Forget the rows and give their blocks back."""
        self.manager.reset()
        self.tables.tokens = 0
        self.dense.reset()
        self.holder.step = None

    def let_go(self, new_tokens: int, *, keep_history: bool, padding: Sequence[int] = ()) -> list[int]:
        """Give back what a `reserve` with these arguments does not need any more; columns that changed.

        What was given back may be written anew, so this cannot be undone; nor need it be.
        """
        self.bind_again()
        changed = self.dense.release_full(self.manager, new_tokens)
        return changed + self.manager.let_go(new_tokens, keep_history=keep_history, padding_tokens=padding)

    def reserve(
        self, new_tokens: int, changed: list[int], *, keep_history: bool, padding: Sequence[int] = ()
    ) -> None:
        """Make room for new tokens, after `let_go`, which tells what has changed; there are blocks enough."""
        reservation = self.manager.reserve(new_tokens, keep_history=keep_history, padding_tokens=padding)
        assert reservation is not None, "room was checked for every group before any was reserved"
        changed = [*changed, reservation.changed_from]
        takes_blocks = reservation.changed_from * self.block_size < reservation.end
        for device in {pool.shape.device for pool in self.pools}:
            self.store.streams.enter(device, takes_blocks=takes_blocks)
        moves = self.dense.follow(self.manager, reservation) if self.dense else None
        self._grow_dense()
        for pool in self.pools:
            if pool.layout is not None and moves is not None:
                pool.follow(moves)
            else:
                pool.tensors.copy_blocks(reservation.copies)
        self.sync_tables(min(changed if moves is None else [*changed, *moves.columns]))
        self.tables.set_length(reservation.end)

    def crop(self, num_tokens: int) -> None:
        """Cut every row down to its first tokens."""
        self.manager.crop(num_tokens)
        if self.tables.offsets != self.manager.offsets:
            self.sync_tables()
        self.tables.set_length(num_tokens)

    def release_outside_window(self) -> None:
        """Give back what was only kept for a roll-back."""
        if self.manager.release_outside_window():
            self.sync_tables()

    def reorder(self, row_indices: Sequence[int]) -> None:
        """Make the rows copies of the given old rows, by reference."""
        self.manager.reorder(row_indices)
        self.dense.provide(self.manager.batch * self.dense.dense_per_row)
        self._grow_dense()
        self.sync_tables()

    # --- quantized layers -----------------------------------------------------------------------------------

    def seal_full(self, new_tokens: int) -> None:
        """Encode the blocks that are full when so many tokens come, after the guard has looked at them.

        They are read as dense blocks until those are reserved. Caches that share a block seal it alike.
        """
        dense_ids, ids = split_pairs(self.dense.full(self.manager, new_tokens))
        if not dense_ids:
            return
        for layer_idx in sorted(self.unguarded & self.blocks.keys()):
            self._judge(layer_idx, self.blocks[layer_idx].keys[dense_ids])
        for pool in self.pools:
            if pool.layout is not None:
                self.store.streams.enter(pool.shape.device, takes_blocks=False)
                pool.seal(dense_ids, ids)

    def check_keys(self, layer_idx: int, key_states: torch.Tensor, start: int) -> None:
        """Let the guard look at the first K of a layer that a write will encode."""
        size, end = self.block_size, start + key_states.shape[2]
        found: list[torch.Tensor] = []
        for row, table in enumerate(self.manager.tables):
            columns = range(-(-table.token_at(start) // size), table.token_at(end) // size)
            encoded = (c for c in columns if table.ids[c] != NULL_BLOCK and c not in table.dense)
            if (column := next(encoded, None)) is not None:
                first = table.offset + column * size - start
                found.append(key_states[row, :, first : first + size])
        if found:
            self._judge(layer_idx, torch.stack(found))

    def _judge(self, layer_idx: int, keys: torch.Tensor) -> None:
        """Let the guard decide on a layer, by full blocks `[..., kv_heads, block_size, head_dim]` of K."""
        kv_format = self.formats[layer_idx]
        assert kv_format is not None, "the guard concerns quantized layers"
        fault = key_guard.fault_of(layer_idx, kv_format, keys, raises=self._guard == "error")
        if fault is not None:
            self._move(layer_idx, with_keys_in_int8(kv_format))
            key_guard.logger.warning("%s, so its keys are stored in int8", fault)
        self.unguarded.discard(layer_idx)

    def _move(self, layer_idx: int, kv_format: KVFormat) -> None:
        """Store a layer in another format, before any of its blocks is a record."""
        old = self._pools[layer_idx]
        pool = self._pool_for(layer_idx, replace(old.shape, format=kv_format), 1)
        old_place, place = old.tensors.layers[layer_idx], pool.tensors.layers[layer_idx]
        dense_ids = [*self.dense.dense_ids(self.manager).values()]
        pool.keys[dense_ids, place] = old.keys[dense_ids, old_place]
        pool.values[dense_ids, place] = old.values[dense_ids, old_place]
        self.formats[layer_idx] = kv_format
        self._add_layer(layer_idx, pool)
        if old not in self._pools.values() and len(old.tensors.layers) == old.tensors.num_layers:
            self.pools.remove(old)
            self.store.drop(old.tensors)

    # --- sizes of pools -------------------------------------------------------------------------------------

    def grow(self, num_blocks: int) -> bool:
        """Enlarge every pool; ids and contents stay. False, and no change, while another cache is writing."""
        can_move = self.store.can_move(self.holder)
        if can_move:
            self.store.resize(num_blocks)
            self.bind_again()
        return can_move

    def shrink(self, num_blocks: int) -> None:
        """Make every pool as small as that; contents stay. Only if no other cache has blocks of it."""
        moved = self.store.resize(num_blocks)
        self.manager.renumber(moved)
        self.dense.renumber(moved)
        self.bind_again()
        self.sync_tables()

    def bind_again(self) -> None:
        """Find the tensors of all layers, if some cache has replaced them by larger ones."""
        version = self.store.version
        if self._store_version != version:
            self._bind_all()
        self._store_version = version  # last: whoever is interrupted does it again

    # --- saved and copied -----------------------------------------------------------------------------------

    def export(self, tokens: Mapping[int, int]) -> SavedGroup:
        """The `tokens` of each layer, in tensors of their own, and nothing of what else its blocks hold."""
        numbers = {block_id: number for number, block_id in enumerate(self._tokens_in_blocks(0))}
        dense_ids, tables = self.dense.dense_ids(self.manager), self.manager.tables
        return SavedGroup(
            window=self.window,
            tables=[[numbers.get(block_id, NULL_BLOCK) for block_id in table.ids] for table in tables],
            offsets=[table.offset for table in tables],
            first_held=self.manager.first_held,
            dense=[numbers[block_id] for block_id in dense_ids],
            unguarded=[index for index in self._pools if index in self.unguarded],
            layers={index: self._export_layer(index, tokens[index], dense_ids) for index in self._pools},
        )

    def _export_layer(self, layer_idx: int, tokens: int, dense_ids: Mapping[int, int]) -> SavedLayer:
        pool, held = self._pools[layer_idx], self._tokens_in_blocks(tokens)
        place = pool.tensors.layers[layer_idx]
        if pool.dense is None:
            keys, values = pool.tensors.export(place, held)
            records = torch.empty(0, keys.shape[1], 0, dtype=torch.uint8, device=keys.device)
        else:
            keys, values = pool.dense.export(place, {dense_id: held[i] for i, dense_id in dense_ids.items()})
            (records,) = pool.tensors.export(place, {i: n for i, n in held.items() if i not in dense_ids})
        return SavedLayer(format_name(self.formats[layer_idx]), keys, values, records)

    def import_(self, saved: SavedGroup, length: int) -> None:
        """Fill empty rows with what `export` has taken of rows of that length; it was checked, and fits."""
        for layer_idx, layer in saved.layers.items():
            kv_format = self.formats[layer_idx]
            if kv_format is not None and kv_format.name != layer.format:
                self.formats[layer_idx] = with_keys_in_int8(kv_format)
            self.claim(layer_idx, PoolShape.of(layer.keys, layer.values))
        ids = self.manager.adopt(saved.tables, length, saved.offsets)
        assert ids is not None, "room was made for all blocks"
        self.manager.first_held = saved.first_held
        self.unguarded -= saved.layers.keys() - set(saved.unguarded)
        dense_ids = self.dense.adopt(self.manager, [ids[number] for number in saved.dense])
        self._grow_dense()
        encoded = [ids[number] for number in saved.encoded]
        for layer_idx, layer in saved.layers.items():
            pool, kv = self._pools[layer_idx], (layer.keys, layer.values)
            place = pool.tensors.layers[layer_idx]
            if pool.dense is None:
                pool.tensors.import_(place, [*ids.values()], kv)
            else:
                pool.dense.import_(place, dense_ids, kv)
                pool.tensors.import_(place, encoded, (layer.records,))
        self.sync_tables()
        self.tables.set_length(length)

    def save(self) -> Saved:
        """Remember all that a change can change, but for what lies in blocks."""
        restore_manager, restore_dense, pools = self.manager.save(), self.dense.save(), [*self.pools]
        step, tokens = self.holder.step, self.num_tokens
        changing = ("formats", "unguarded", "blocks", "_pools")
        attributes = {name: copy.copy(getattr(self, name)) for name in changing}

        def restore() -> None:
            vars(self).update({name: copy.copy(value) for name, value in attributes.items()})
            self.pools[:] = pools
            self.holder.step = step
            restore_manager()
            restore_dense()

        def follow() -> None:
            self.tables.tokens = tokens
            self.sync_tables()
            self._store_version = -1
            self.bind_again()
            self.tables.set_length(tokens)

        return Saved(restore, follow)

    def fork(self, store: WindowStore | None = None) -> Self:
        """The same rows for another cache: blocks are shared, or copied if a store is given, an empty one."""
        dense_ids, held = self.dense.dense_ids(self.manager), self._tokens_in_blocks(self.num_tokens)
        copied = copy.copy(self)
        copied.dense = copy.deepcopy(self.dense)
        copied.formats, copied.unguarded = dict(self.formats), {*self.unguarded}
        copied.faults = {device: faults.copy() for device, faults in self.faults.items()}
        copied.manager = self.manager.fork(None if store is None else store.blocks)
        copied.tables = self.tables.copy(copied.manager, copied.dense)
        tensors = [pool.tensors for pool in self.pools]
        if store is not None:
            copied.store = store
            for each in tensors:
                kept = dense_ids if each.layout is not None else {}
                used = {i: tokens for i, tokens in held.items() if tokens and i not in kept}
                store.tensors.append(each.copy(store.num_blocks, used))
            tensors = store.tensors
        used_dense = {dense_id: held[block_id] for block_id, dense_id in dense_ids.items()}
        copied.pools = [pool.copy(each, used_dense) for pool, each in zip(self.pools, tensors, strict=True)]
        copied.holder = Holder(copied.manager, copied.pools)
        copied.blocks, copied._pools = {}, {}
        for layer_idx, pool in self._pools.items():
            copied._add_layer(layer_idx, copied.pools[self.pools.index(pool)])
        copied._store_version = copied.store.version
        copied.store.join(copied.holder)
        return copied

    # --- tables and pointers --------------------------------------------------------------------------------

    def sync_tables(self, from_column: int = 0) -> None:
        """Copy the manager's rows, from one block column on, to the tables that kernels read."""
        if self.tables.sync(from_column):
            self._bind_all()
        if self.dense:
            columns = {
                id(pool): self.tables.dense_columns(pool.shape.device, is_marked=pool.layout is not None)
                for pool in self.pools
            }
            for layer_idx, blocks in self.blocks.items():
                blocks.dense_columns = columns[id(self._pools[layer_idx])]

    def _add_layer(self, layer_idx: int, pool: LayerPool) -> LayerBlocks:
        self._pools[layer_idx] = pool
        self._bind(layer_idx)
        return self.blocks[layer_idx]

    def _bind_all(self) -> None:
        for layer_idx in self._pools:
            self._bind(layer_idx)

    def _bind(self, layer_idx: int) -> None:
        """Point a layer's blocks to where pools, table and lengths lie now."""
        pool = self._pools[layer_idx]
        device, place = pool.shape.device, pool.tensors.layers[layer_idx]
        is_marked = bool(self.dense) and pool.layout is not None
        keys, values = pool.keys[:, place], pool.values[:, place]
        if layer_idx not in self.blocks:
            table = self.tables.table(device, is_marked=is_marked)
            self.blocks[layer_idx] = LayerBlocks(keys, values, table)
        blocks = self.blocks[layer_idx]
        blocks.native = blocks.choice = None  # first: what it points to may go
        self.tables.bind(blocks, device, is_marked=is_marked)
        blocks.keys, blocks.values = keys, values
        blocks.records = None if pool.records is None else pool.records[:, place]
        blocks.layout = pool.layout
        if pool.layout is not None and device.type != "cpu":
            if device not in self.faults:
                self.faults[device] = Faults(device, [i for i, each in self.formats.items() if each])
            blocks.fault = self.faults[device].of(layer_idx)

    def _pool_for(self, layer_idx: int, shape: PoolShape, num_layers: int) -> LayerPool:
        """A pool where a layer has a place; if tensors have to be made, for so many layers."""
        tensors = self.store.claim(layer_idx, shape, num_layers)
        pool = next((pool for pool in self.pools if pool.tensors is tensors), None)
        if pool is None:
            pool = LayerPool(tensors, self.dense.num_dense)
            self.pools.append(pool)
        return pool

    def _grow_dense(self) -> None:
        """Make room for all dense blocks that there are."""
        num_dense = self.dense.num_dense
        for pool in self.pools:
            if pool.dense is not None and pool.dense.num_blocks < num_dense:
                held = dict.fromkeys(range(pool.dense.num_blocks), self.block_size)
                pool.dense = pool.dense.copy(num_dense, held)
                self._bind_all()

    def _tokens_in_blocks(self, tokens: int) -> dict[int, int]:
        """Block id -> how many of the first tokens of rows lie there, in the order of tables."""
        size = self.block_size
        return {
            block_id: max(0, min(size, tokens - table.offset - column * size))
            for table in self.manager.tables
            for column, block_id in enumerate(table.ids)
            if block_id != NULL_BLOCK
        }
