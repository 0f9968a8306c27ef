"""Layers that share block tables: their bookkeeping, their pools, and the tables as kernels read them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from hf_paged_cache.blocks import BlockManager, DenseBlocks
from hf_paged_cache.config import LayerSpec
from hf_paged_cache.errors import PagedCacheError
from hf_paged_cache.formats import KVFormat, blank_beyond, with_keys_in_int8
from hf_paged_cache.forward.step import Step
from hf_paged_cache.kernels.call import NULL_BLOCK, LayerBlocks, dense_entry

from .device.fault_flags import Faults
from .device.tables import DeviceTables
from .key_guard import KeyErrorGuard
from .pool import KVPool, PoolShape, Storage, split_pairs
from .precision import Precision
from .saved import SavedGroup, SavedLayer
from .store import Saved, Section


def _put(target: torch.Tensor, contents: torch.Tensor, places: Sequence[int]) -> None:
    with torch.no_grad():
        target[torch.tensor(places, dtype=torch.long, device=target.device)] = contents.to(target.device)


class LayerGroup:
    """The layers of one cache that keep the same tokens (all, or those of one window).

    Block ids are shared by the layers of a group, so that bookkeeping is done once per step and not once per
    layer. Layers of one shape also share one `KVPool`; a group with layers of several shapes (or on several
    devices) has several pools under the same ids.

    Args:
        window: Tokens a query sees, or None for all.
        specs: Layer index -> what the config says of that layer.
        section: Whose blocks it takes.
        block_size: Tokens per block.
        row_blocks: Blocks of the longest row that is expected; tables are made that wide.
        precision: How layers are stored; None as they come.
        guard: Looks at the K of every layer that is stored in 4 bits, once; None does not look.

    Attributes:
        window: Tokens a query sees, itself included, or None for all.
        specs: Layer index -> what the config says of that layer.
        section: Whose blocks it takes; other caches may take of them too.
        step: The step in which layers write where they were bound; None between steps.
        formats: Layer index -> how it is stored, None for the model's dtype.
        manager: Which block belongs to which row; integers only.
        dense: Which blocks of quantized layers are in the model's dtype; None if none ever is.
        pools: The tensors, made when the first layer that needs them is written.
    """

    HAS_FIXED_ROWS = False
    """Whether rows have all their blocks from the start."""

    def __init__(
        self,
        window: int | None,
        specs: dict[int, LayerSpec],
        section: Section,
        *,
        block_size: int,
        row_blocks: int,
        precision: Precision | None = None,
        guard: KeyErrorGuard | None = None,
    ) -> None:
        self.window = window
        self.specs = specs
        self.section = section
        self.step: Step | None = None
        precision = precision or Precision(dict.fromkeys(specs))
        self.formats = {index: precision.formats[index] for index in specs}
        self.manager = BlockManager(section.blocks.num_blocks, block_size, window, pool=section.blocks)
        self.dense: DenseBlocks | None = None
        if precision.slots_per_row(block_size) and any(self.formats.values()):
            self.dense = DenseBlocks(precision.sink_blocks(block_size), precision.residual_blocks(block_size))
        self._guard = guard
        self._unguarded = {i for i in specs if guard is not None and guard.concerns(self.formats[i])}
        self.pools: list[KVPool] = []
        self._layers: dict[int, tuple[KVPool, int, LayerBlocks]] = {}
        self._tables = DeviceTables(row_blocks, is_fixed=self.HAS_FIXED_ROWS)
        self._faults: dict[torch.device, Faults] = {}
        self._section_version = section.version
        self._changed: list[int] = []  # columns that `let_go` changed and tables on devices do not show yet
        section.join(self)

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
        """Bytes of all pools, those that are shared with other caches included."""
        return self.section.nbytes + sum(pool.slot_bytes for pool in self.pools)

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks that hold tokens now."""
        return self.bytes_by_format().total()

    def bytes_by_format(self) -> Counter[str]:
        """The same by format; what is in the model's dtype is under `auto`."""
        blocks = self.manager.pool.num_referenced
        slots = 0 if self.dense is None else len(self.dense.live_slots(self.manager))
        total: Counter[str] = Counter()
        for pool in self.pools:
            total.update(pool.bytes_by_format(self._num_layers_in(pool), blocks, slots))
        return total

    @property
    def table_bytes(self) -> int:
        """Bytes of the block tables and lengths that kernels read."""
        return self._tables.nbytes

    def claim(self, layer_idx: int, key_states: torch.Tensor, value_states: torch.Tensor) -> LayerBlocks:
        """Give a layer its place, allocating a pool if none fits. Called once per layer."""
        shape = PoolShape.of(key_states, value_states, self.formats[layer_idx])
        try:
            shape.records(self.block_size)
        except PagedCacheError as error:
            raise PagedCacheError(f"layer {layer_idx}: {error}") from error
        self.section.streams.enter(shape.device, takes_blocks=True)
        pool, place = self._place(layer_idx, shape, self._expected_layers(layer_idx))
        table = self._tables.table(shape.device, self._rows, is_marked=self._has_marks(pool))
        blocks = LayerBlocks(pool.keys[:, place], pool.values[:, place], table)
        self._layers[layer_idx] = (pool, place, blocks)
        self._bind(layer_idx)
        return blocks

    def set_length(self, tokens: int) -> None:
        """Tell kernels of a GPU how many tokens every row has."""
        self._tables.set_length(tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens of every row."""
        return self.manager.num_tokens

    def start(self, batch: int) -> None:
        """Begin with so many empty rows."""
        self.manager.start(batch)
        self._tables.tokens = 0
        for faults in self._faults.values():  # of rows before; here, where there are none to go back to
            faults.reset()
        self._provide_slots(batch)
        self.sync_tables()

    def reset(self) -> None:
        """Forget the rows and give their blocks back."""
        self.manager.reset()
        self._tables.tokens = 0
        if self.dense is not None:
            self.dense.reset()

    def check_faults(self) -> None:
        """Raise UnstorableValueError if kernels of a GPU have met K or V that cannot be stored."""
        for faults in self._faults.values():
            faults.check()

    def let_go(self, new_tokens: int, *, keep_history: bool, padding: Sequence[int] = ()) -> None:
        """Give back what a `reserve` with these arguments does not need any more.

        Blocks and slots that were given back may be written anew, so this cannot be undone; nor need it be.
        """
        self.bind_again()
        if self.dense is not None:
            self._changed += self.dense.release_full(self.manager, new_tokens)
        self._changed += self.manager.let_go(new_tokens, keep_history=keep_history, padding_tokens=padding)

    def reserve(self, new_tokens: int, *, keep_history: bool, padding: Sequence[int] = ()) -> None:
        """Make room for new tokens of every row, after `let_go`; the caller has seen that there is room.

        Args:
            new_tokens: Of every row.
            keep_history: Windows keep what they would drop.
            padding: Of every row, leading tokens that need not be stored; empty if there are no more.
        """
        changed = [*self._changed]
        reservation = self.manager.reserve(new_tokens, keep_history=keep_history, padding_tokens=padding)
        assert reservation is not None, "room was checked for every group before any was reserved"
        changed.append(reservation.changed_from)
        self._enter_streams(takes_blocks=reservation.changed_from * self.block_size < reservation.end)
        moves = None
        if self.dense is not None:
            moves = self.dense.follow(self.manager, reservation)
            changed += moves.columns
            self._grow_slots()
        for pool in self.pools:
            if moves is not None and pool.form is not None and (moves.copied or moves.unsealed):
                pool.follow(moves)
            elif reservation.copies:
                pool.copy_blocks(*split_pairs(reservation.copies))
        self.sync_tables(min(changed))
        self.set_length(reservation.end)
        self._changed = []

    def check_crop(self, num_tokens: int) -> None:
        """Raise what `crop` would raise; changes nothing."""
        self.manager.check_crop(num_tokens)

    def crop(self, num_tokens: int) -> None:
        """Cut every row down to its first tokens."""
        self.manager.crop(num_tokens)
        if self._tables.offsets != self.manager.offsets:
            self.sync_tables()
        self.set_length(num_tokens)

    def release_outside_window(self) -> None:
        """Give back what was only kept for a roll-back."""
        if self.manager.release_outside_window():
            self.sync_tables()

    def reorder(self, row_indices: Sequence[int]) -> None:
        """Make the rows copies of the given old rows, by reference."""
        self.manager.reorder(row_indices)
        self._provide_slots(self.manager.batch)
        self.sync_tables()

    def check_full(self, new_tokens: int) -> None:
        """Let the guard look at blocks that a reservation of so many tokens would seal.

        Raises:
            QuantizationError: It found the K of a layer unfit for its format.
        """
        if self.dense is None or not self._unguarded:
            return
        full = self.dense.full(self.manager, new_tokens)
        slots = torch.tensor([slot for slot, _ in full])
        for layer_idx in sorted(self._unguarded & self._layers.keys()) if full else ():
            _, _, blocks = self._layers[layer_idx]
            self._judge(layer_idx, blocks.keys[slots.to(blocks.keys.device)])

    def seal_full(self, new_tokens: int) -> None:
        """Encode the blocks that are full when so many tokens come.

        They are read from their slots as before, until as many are reserved. Another cache may have sealed a
        block that is shared; the bytes are the same.
        """
        full = [] if self.dense is None else self.dense.full(self.manager, new_tokens)
        if full:
            self._enter_streams(takes_blocks=False)
        for pool in self.pools if full else ():
            if pool.form is not None:
                pool.seal(*split_pairs(full))

    def check_keys(self, layer_idx: int, key_states: torch.Tensor, start: int) -> None:
        """Let the guard look at the first K of a layer that a write will encode.

        Raises:
            QuantizationError: It found them unfit for the layer's format.
        """
        size, end = self.block_size, start + key_states.shape[2]
        found: list[torch.Tensor] = []
        for row, table in enumerate(self.manager.tables):
            columns = range(-(-table.token_at(start) // size), table.token_at(end) // size)
            encoded = (c for c in columns if table.ids[c] != NULL_BLOCK and c not in table.dense)
            for column in islice(encoded, 1):
                first = table.offset + column * size - start
                found.append(key_states[row, :, first : first + size])
        if found:
            self._judge(layer_idx, torch.stack(found))

    def export(self, tokens: Mapping[int, int]) -> SavedGroup:
        """All that it holds, in tensors of their own, and nothing of what else lies in its blocks.

        Args:
            tokens: Layer index -> tokens of every row that this layer has.
        """
        columns, dense = self._first_columns(), self.dense
        numbers = {block_id: number for number, block_id in enumerate(columns)} | {NULL_BLOCK: NULL_BLOCK}
        slots = {} if dense is None else dense.slots_by_id(self.manager)
        tables = self.manager.tables
        return SavedGroup(
            window=self.window,
            tables=[[numbers[block_id] for block_id in table.ids] for table in tables],
            offsets=[table.offset for table in tables],
            first_held=self.manager.first_held,
            dense=[numbers[block_id] for block_id in slots],
            unguarded=[index for index in self._layers if index in self._unguarded],
            layers={
                index: self._export_layer(index, columns, slots, tokens[index]) for index in self._layers
            },
        )

    def _export_layer(
        self, layer_idx: int, columns: Mapping[int, int], slots: Mapping[int, int], tokens: int
    ) -> SavedLayer:
        _, _, blocks = self._layers[layer_idx]
        size, form, device = self.block_size, self.formats[layer_idx], blocks.keys.device

        def index(numbers: Iterable[int]) -> torch.Tensor:
            return torch.tensor([*numbers], dtype=torch.long, device=device)

        def held(ids: Iterable[int]) -> torch.Tensor:
            return index(max(0, min(size, tokens - columns[block_id])) for block_id in ids)

        places = {block_id: block_id for block_id in columns} if form is None else slots
        where = index(places.values())
        keys, values = (blank_beyond(side[where], held(places)) for side in (blocks.keys, blocks.values))
        records = torch.empty(0, keys.shape[1], 0, dtype=torch.uint8, device=device)
        if blocks.records is not None and blocks.form is not None:
            encoded = [block_id for block_id in columns if block_id not in slots]
            records = blocks.form.first_tokens(blocks.records[index(encoded)], held(encoded))
        return SavedLayer("auto" if form is None else form.name, keys, values, records)

    def import_(self, saved: SavedGroup, length: int) -> None:
        """Fill rows that have just begun with what `export` has taken; they hold nothing, and there is room.

        Args:
            saved: Checked.
            length: Tokens of every row.
        """
        for layer_idx, layer in saved.layers.items():
            form = self.formats[layer_idx]
            if form is not None and form.name != layer.format:
                self.formats[layer_idx] = with_keys_in_int8(form)
            self.claim(layer_idx, layer.keys, layer.values)
        ids = self.manager.adopt(saved.tables, length, saved.offsets)
        assert ids is not None, "room was made for all blocks"
        self.manager.first_held = saved.first_held
        self._unguarded -= saved.layers.keys() - set(saved.unguarded)
        slots: list[int] = []
        if self.dense is not None:
            slots = self.dense.adopt(self.manager, [ids[n] for n in saved.dense])
            self._grow_slots()
        for layer_idx, layer in saved.layers.items():
            _, _, blocks = self._layers[layer_idx]
            places = list(ids.values()) if blocks.records is None else slots
            _put(blocks.keys, layer.keys, places)
            _put(blocks.values, layer.values, places)
            if blocks.records is not None:
                _put(blocks.records, layer.records, [ids[number] for number in saved.encoded])
        self.sync_tables()
        self.set_length(length)

    def is_unguarded(self, layer_idx: int) -> bool:
        """Whether the guard has yet to look at a layer."""
        return layer_idx in self._unguarded

    @property
    def can_grow(self) -> bool:
        """Whether no other cache is writing where its layers were bound.

        One whose forward has ended writes no more, also if nobody has looked at it since: an exception may
        have left that forward for good.
        """
        steps = (group.step for group in self.section.members if group is not self)
        return all(step is None or step.is_over for step in steps)

    def grow(self, num_blocks: int) -> None:
        """Enlarge every pool to `num_blocks`; ids and contents stay. All pools or none."""
        self.section.grow(num_blocks)
        self.bind_again()

    def shrink(self, num_blocks: int) -> None:
        """Make every pool as small as that; contents stay. Only if no other cache has blocks of it."""
        if self.section.members != [self]:
            return
        moved = self.section.shrink(num_blocks)
        self.manager.renumber(moved)
        if self.dense is not None:
            self.dense.renumber(moved)
        self.bind_again()
        self.sync_tables()

    def bind_again(self) -> None:
        """Find the tensors of all layers, if some cache has replaced them by larger ones."""
        version = self.section.version
        if self._section_version == version:
            return
        for layer_idx in self._layers:
            self._bind(layer_idx)
        self._section_version = version  # last: whoever is interrupted does it again

    def save(self) -> Saved:
        """Remember all that a change can change, but for what lies in blocks."""
        manager, dense, tokens, step = self.manager.save(), self.dense, self.num_tokens, self.step
        slots = None if dense is None else dense.save()
        attributes = {
            name: copy.copy(getattr(self, name))
            for name in ("pools", "formats", "_unguarded", "_layers", "_changed")
        }

        def restore() -> None:
            vars(self).update({name: copy.copy(value) for name, value in attributes.items()})
            self.step = step
            self.manager.restore(manager)
            if dense is not None and slots is not None:
                dense.restore(slots)

        def follow() -> None:
            self._tables.tokens = tokens
            self.sync_tables()
            self._section_version = -1
            self.bind_again()
            self.set_length(tokens)

        return Saved(restore, follow)

    def fork(self) -> LayerGroup:
        """The same rows for another cache, by sharing their blocks; dense slots are copied."""
        return self._copy_to(self.section, self.manager.fork(), copy.deepcopy(self.dense), {})

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerGroup:
        """A copy with blocks of its own, of which only those in use are written."""
        size = self.block_size
        held = {i: min(size, self.num_tokens - first) for i, first in self._first_columns().items()}
        held = {i: tokens for i, tokens in held.items() if tokens > 0}
        section = Section(self.num_blocks, grows=self.section.grows)
        storages = {id(pool.storage): pool.storage.copy(self.num_blocks, [*held]) for pool in self.pools}
        section.storages = list(storages.values())
        manager = self.manager.apart()
        section.blocks = manager.pool
        twin = memo[id(self)] = self._copy_to(section, manager, copy.deepcopy(self.dense), storages)
        slots = {} if self.dense is None else self.dense.slots_by_id(self.manager)
        for pool in twin.pools:
            pool.blank_beyond(held, slots)
        for index, (_, _, blocks) in self._layers.items():
            memo[id(blocks)] = twin.blocks_of(index)
        return twin

    def _copy_to(
        self,
        section: Section,
        manager: BlockManager,
        dense: DenseBlocks | None,
        storages: dict[int, Storage],
    ) -> LayerGroup:
        """The same layers over other blocks; `storages` says where those of today have gone."""
        twin = type(self).__new__(type(self))
        vars(twin).update(vars(self))
        twin.section, twin.manager, twin.dense, twin.step = section, manager, dense, None
        twin.formats, twin._unguarded = dict(self.formats), {*self._unguarded}
        twin._faults = {device: faults.copy() for device, faults in self._faults.items()}
        twin._tables = self._tables.copy()
        twin._changed = []
        slots = self._used_slots()
        pools = {
            id(pool): pool.copy(storages.get(id(pool.storage), pool.storage), slots) for pool in self.pools
        }
        twin.pools = list(pools.values())
        twin._layers = {}
        for index, (pool, place, blocks) in self._layers.items():
            mine = pools[id(pool)]
            copied = LayerBlocks(mine.keys[:, place], mine.values[:, place], blocks.table)
            twin._layers[index] = (mine, place, copied)
            twin._bind(index)
        twin._section_version = section.version
        section.join(twin)
        return twin

    def blocks_of(self, layer_idx: int) -> LayerBlocks:
        """Where the K and V of a layer lie that has claimed its place."""
        return self._layers[layer_idx][2]

    @property
    def claimed(self) -> list[int]:
        """The layers that have their places."""
        return list(self._layers)

    def has_gap(self, start: int) -> bool:
        """Whether a token from `start` on is not stored, as of a prompt longer than the window."""
        return self.manager.has_gap(start)

    def sync_tables(self, from_column: int = 0) -> None:
        """Copy the manager's rows, from one block column on, to the tables that kernels read."""
        if self._tables.sync(self._rows, from_column, self.manager.offsets):
            for layer_idx in self._layers:
                self._bind(layer_idx)
        if self.dense is not None:
            columns = {id(pool): self._dense_columns(pool) for pool in self.pools}
            for pool, _, blocks in self._layers.values():
                blocks.dense_columns = columns[id(pool)]

    def _rows(self, is_marked: bool, from_column: int) -> list[list[int]]:
        """The entries of all rows from one column on."""
        rows = [table.ids[from_column:] for table in self.manager.tables]
        if not is_marked or self.dense is None:
            return rows
        for row, table in zip(rows, self.manager.tables, strict=True):
            for column, slot in self.dense.slots_of(table):
                if column >= from_column:
                    row[column - from_column] = dense_entry(slot)
        return rows

    def _has_marks(self, pool: KVPool) -> bool:
        return self.dense is not None and pool.form is not None

    def _dense_columns(self, pool: KVPool) -> tuple[tuple[int, ...], ...] | None:
        """As `LayerBlocks` has them; on a CPU nobody asks."""
        if pool.shape.device.type == "cpu":
            return None
        if self.dense is None or pool.form is None:
            return ()
        rows = [tuple(table.dense) for table in self.manager.tables]
        return tuple(rows[:1] if len(set(rows)) == 1 else rows)

    def _bind(self, layer_idx: int) -> None:
        """Point a layer's blocks to where pools, table and lengths lie now."""
        pool, place, blocks = self._layers[layer_idx]
        device = pool.shape.device
        blocks.native = blocks.choice = None  # first: what it points to may go
        blocks.table = self._tables.table(device, self._rows, is_marked=self._has_marks(pool))
        blocks.lengths = self._tables.lengths(device)
        blocks.offsets = self._tables.offsets_on(device)
        blocks.dense_columns = self._dense_columns(pool)
        blocks.keys, blocks.values = pool.keys[:, place], pool.values[:, place]
        blocks.records = None if pool.records is None else pool.records[:, place]
        blocks.form = pool.form
        if pool.form is not None and device.type != "cpu":
            if device not in self._faults:
                self._faults[device] = Faults(device, [i for i, form in self.formats.items() if form])
            blocks.fault = self._faults[device].of(layer_idx)

    def _enter_streams(self, *, takes_blocks: bool) -> None:
        """Order what follows after the other streams that use the section: see `Streams.enter`."""
        for device in {pool.shape.device for pool in self.pools}:
            self.section.streams.enter(device, takes_blocks=takes_blocks)

    def _place(self, layer_idx: int, shape: PoolShape, room: int) -> tuple[KVPool, int]:
        """The pool of a layer and its place there, in tensors for `room` layers if some have to be made."""
        storage, place = self.section.claim(layer_idx, shape, self.block_size, room)
        pool = next((pool for pool in self.pools if pool.storage is storage), None)
        if pool is None:
            pool = KVPool(storage, num_slots=0 if self.dense is None else self.dense.num_slots)
            self.pools.append(pool)
        return pool, place

    def _num_layers_in(self, pool: KVPool) -> int:
        return sum(held is pool for held, _, _ in self._layers.values())

    def _provide_slots(self, batch: int) -> None:
        if self.dense is not None:
            self.dense.provide_rows(batch)
            self._grow_slots()

    def _grow_slots(self) -> None:
        """Make the pools as large as the slots that were given out."""
        num_slots = 0 if self.dense is None else self.dense.num_slots
        grown = [pool for pool in self.pools if pool.form is not None and pool.keys.shape[0] < num_slots]
        for pool in grown:
            pool.grow_slots(num_slots)
        for layer_idx in self._layers if grown else ():
            self._bind(layer_idx)

    def _judge(self, layer_idx: int, keys: torch.Tensor) -> None:
        """Let the guard decide on a layer, by full blocks `[..., kv_heads, block_size, head_dim]` of K."""
        form = self.formats[layer_idx]
        assert self._guard is not None, "only a guard leaves layers unguarded"
        assert form is not None, "the guard concerns quantized layers"
        verdict = self._guard.judge(layer_idx, form, keys)
        if verdict is not None:
            self._move(layer_idx, verdict.better)
            self._guard.say(verdict)
        self._unguarded.discard(layer_idx)

    def _move(self, layer_idx: int, form: KVFormat) -> None:
        """Store a layer in another format, before any of its blocks is a record."""
        old, old_place, blocks = self._layers[layer_idx]
        pool, place = self._place(layer_idx, replace(old.shape, format=form), 1)
        for index in self._used_slots():
            pool.keys[index, place] = old.keys[index, old_place]
            pool.values[index, place] = old.values[index, old_place]
        self.formats[layer_idx] = form
        self._layers[layer_idx] = (pool, place, blocks)
        if not self._num_layers_in(old) and len(old.storage.layers) == old.storage.num_layers:
            self.pools.remove(old)
            self.section.drop(old.storage)
        self._bind(layer_idx)

    def _used_slots(self) -> list[int]:
        return [] if self.dense is None else self.dense.live_slots(self.manager)

    def _first_columns(self) -> dict[int, int]:
        """Block id -> where in the batch its first token stands, of all blocks of rows, in their order."""
        return {
            block_id: table.offset + column * self.block_size
            for table in self.manager.tables
            for column, block_id in enumerate(table.ids)
            if block_id != NULL_BLOCK
        }

    def _expected_layers(self, layer_idx: int) -> int:
        hint = self.specs[layer_idx], self.formats[layer_idx]
        alike = [index for index, spec in self.specs.items() if (spec, self.formats[index]) == hint]
        return sum(1 for index in alike if index not in self._layers)
