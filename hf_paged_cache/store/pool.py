"""Where K and V lie: the preallocated tensors of layers that share one shape and format."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from hf_paged_cache.blocks import Moves
from hf_paged_cache.formats import KVFormat, RecordFormat, blank_beyond
from hf_paged_cache.kernels import dispatch

from .device.memory import advise_huge_pages, allocate
from .device.virtual_memory import growing_memory

_NOWHERE: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PoolShape:
    """What layers must agree on to lie in one pool.

    Attributes:
        kv_heads: Heads of K and V.
        head_dim: Of K.
        v_head_dim: Of V.
        dtype: Of the model's K and V.
        device: Where they are.
        format: How they are stored; None as they come.
    """

    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    device: torch.device
    format: KVFormat | None = None

    @classmethod
    def of(
        cls, key_states: torch.Tensor, value_states: torch.Tensor, form: KVFormat | None = None
    ) -> PoolShape:
        """The shape that stores `[batch, kv_heads, tokens, head_dim]` K and V."""
        return cls(
            kv_heads=key_states.shape[1],
            head_dim=key_states.shape[3],
            v_head_dim=value_states.shape[3],
            dtype=key_states.dtype,
            device=key_states.device,
            format=form,
        )

    def records(self, block_size: int) -> RecordFormat | None:
        """The records of quantized blocks."""
        return None if self.format is None else self.format.bind(block_size, self.head_dim, self.v_head_dim)

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block in one layer, as it is stored for good."""
        form = self.records(block_size)
        return self.dense_bytes(block_size) if form is None else self.kv_heads * form.nbytes

    def dense_bytes(self, block_size: int) -> int:
        """Bytes of one block in one layer, in the model's dtype."""
        return self.kv_heads * block_size * (self.head_dim + self.v_head_dim) * self.dtype.itemsize


class Storage:
    """All blocks of several layers, for every cache of a store.

    Without a format K and V lie in two tensors `[blocks, layers, kv_heads, block_size, head_dim]`: a block's
    K (or V) in all layers is one contiguous run, and one (block, layer, head) tile is contiguous. With one
    there are records, `[blocks, layers, kv_heads, nbytes]`.

    The memory is left uninitialised: on a CPU it costs nothing until a block is written.

    Attributes:
        shape: What its layers agree on.
        block_size: Tokens per block.
        form: What the bytes of records mean, or None.
        num_layers: Layers that there is room for.
        layers: Layer index -> its place in the second dimension.
        keys: `[blocks, layers, kv_heads, block_size, head_dim]`, or None with a format.
        values: `[blocks, layers, kv_heads, block_size, v_head_dim]`, or None with a format.
        records: uint8 `[blocks, layers, kv_heads, nbytes]`, or None without a format.
        grows: More blocks are expected, so that memory is taken that grows where it lies, if there is such.
    """

    def __init__(
        self, shape: PoolShape, *, num_blocks: int, num_layers: int, block_size: int, grows: bool = False
    ) -> None:
        self.shape = shape
        self.grows = grows
        self.block_size = block_size
        self.form = shape.records(block_size)
        self.num_layers = num_layers
        self.layers: dict[int, int] = {}
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self.records: torch.Tensor | None = None
        wanted = self._sizes(num_blocks)
        self._memory = [growing_memory(shape.device) for _ in wanted] if grows else []
        tensors = self._in_place(num_blocks)
        if tensors is None:
            self._memory, tensors = [], [_empty(*each, shape.device, block_size) for each in wanted]
        self._take(tensors)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What there is of K, V and records."""
        return [tensor for tensor in (self.keys, self.values, self.records) if tensor is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def grows_in_place(self) -> bool:
        """Whether more blocks can come without a copy of those that there are."""
        return bool(self._memory)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        return self.num_layers * self.shape.block_bytes(self.block_size)

    def claim(self, layer_idx: int) -> int | None:
        """The place of a layer, a new one if it has none yet; None if there is no room."""
        if layer_idx not in self.layers and len(self.layers) < self.num_layers:
            self.layers[layer_idx] = len(self.layers)
        return self.layers.get(layer_idx)

    def copy(self, num_blocks: int, used: Sequence[int], moved: Mapping[int, int] = _NOWHERE) -> Storage:
        """The same layers in tensors of their own.

        Args:
            num_blocks: Blocks of the copy.
            used: Ids whose content is copied. The others are not touched, so that they stay free of charge.
            moved: Id -> another one that it has in the copy.
        """
        twin = Storage(
            self.shape,
            num_blocks=num_blocks,
            num_layers=self.num_layers,
            block_size=self.block_size,
            grows=self.grows,
        )
        twin.layers = dict(self.layers)
        for new, old in zip(twin.tensors, self.tensors, strict=True):
            for block_id in used:
                new[moved.get(block_id, block_id)] = old[block_id]
        return twin

    def extended(self, num_blocks: int) -> Storage | None:
        """The same with more blocks, in the memory where they lie; None if they have to be copied."""
        tensors = self._in_place(num_blocks)
        if tensors is None:
            return None
        twin = copy.copy(self)
        twin._take(tensors)
        return twin

    def become(self, other: Storage) -> None:
        """Take over the tensors of a copy of itself."""
        self.held = other.held

    @property
    def held(self) -> tuple[Any, ...]:
        """All that a change of size replaces."""
        return self.keys, self.values, self.records, self._memory

    @held.setter
    def held(self, held: tuple[Any, ...]) -> None:
        self.keys, self.values, self.records, self._memory = held

    def _sizes(self, num_blocks: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Sizes and dtypes of the tensors."""
        shape, leading = self.shape, (num_blocks, self.num_layers, self.shape.kv_heads)
        if self.form is not None:
            return [((*leading, self.form.nbytes), torch.uint8)]
        return [((*leading, self.block_size, dim), shape.dtype) for dim in (shape.head_dim, shape.v_head_dim)]

    def _in_place(self, num_blocks: int) -> list[torch.Tensor] | None:
        """The tensors in memory that grows; None if there is none, or none is left."""
        found = []
        try:
            for memory, each in zip(self._memory, self._sizes(num_blocks), strict=False):
                if memory is None:
                    return None
                with torch.inference_mode(False):
                    found.append(memory.tensor(*each))
        except RuntimeError:
            return None
        return found or None

    def _take(self, tensors: list[torch.Tensor]) -> None:
        if self.form is None:
            self.keys, self.values = tensors
        else:
            (self.records,) = tensors


class KVPool:
    """What one cache has in a storage: all of its blocks, and dense slots of its own if they are quantized.

    A slot is a block in the model's dtype; a quantized layer keeps a few, `[slots, layers, kv_heads,
    block_size, head_dim]`.

    Attributes:
        storage: Where blocks lie; other caches may share it.
    """

    def __init__(self, storage: Storage, *, num_slots: int = 0) -> None:
        self.storage = storage
        self._slots = None if storage.form is None else self._allocate(num_slots)

    @property
    def shape(self) -> PoolShape:
        """What its layers agree on."""
        return self.storage.shape

    @property
    def form(self) -> RecordFormat | None:
        """What the bytes of records mean, or None."""
        return self.storage.form

    @property
    def keys(self) -> torch.Tensor:
        """`[blocks or slots, layers, kv_heads, block_size, head_dim]`."""
        keys = self.storage.keys if self._slots is None else self._slots[0]
        assert keys is not None, "a storage without a format has K"
        return keys

    @property
    def values(self) -> torch.Tensor:
        """`[blocks or slots, layers, kv_heads, block_size, v_head_dim]`."""
        values = self.storage.values if self._slots is None else self._slots[1]
        assert values is not None, "a storage without a format has V"
        return values

    @property
    def records(self) -> torch.Tensor | None:
        """uint8 `[blocks, layers, kv_heads, nbytes]`, or None."""
        return self.storage.records

    @property
    def slot_bytes(self) -> int:
        """Bytes of the slots."""
        return 0 if self._slots is None else sum(tensor.nbytes for tensor in self._slots)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers of the storage, as it is stored for good."""
        return self.storage.bytes_per_block

    def bytes_by_format(self, layers: int, blocks: int, slots: int) -> dict[str, int]:
        """Format -> bytes that layers use of so many blocks; `auto` is the model's dtype.

        Args:
            layers: How many of this cache live here.
            blocks: That hold tokens.
            slots: How many of them quantized layers keep in slots.
        """
        size = self.storage.block_size
        if self.shape.format is None:
            return {"auto": layers * blocks * self.shape.block_bytes(size)}
        return {
            "auto": layers * slots * self.shape.dense_bytes(size),
            self.shape.format.name: layers * (blocks - slots) * self.shape.block_bytes(size),
        }

    def copy_blocks(self, src: list[int], dst: list[int]) -> None:
        """Copy whole blocks, all layers at once (copy-on-write)."""
        if self.records is not None:
            dispatch.copy_blocks(self.records, src, dst)
        else:
            self.copy_slots(src, dst)

    def blank_beyond(self, held: Mapping[int, int], slots: Mapping[int, int]) -> None:
        """Leave nothing in blocks but the first tokens of each, as in a copy that is another's.

        Args:
            held: Block id -> how many.
            slots: Block id -> slot, of those that quantized layers keep in the model's dtype.
        """
        size, dense, form = self.storage.block_size, held, self.form
        if form is not None and self.records is not None:
            ids, counts = _indices(
                {i: 0 if i in slots else n for i, n in held.items()}, size, self.shape.device
            )
            self.records[ids] = form.first_tokens(self.records[ids], counts)
            dense = {slot: held[block_id] for block_id, slot in slots.items()}
        ids, counts = _indices(dense, size, self.shape.device)
        for pool in (self.keys, self.values):
            pool[ids] = blank_beyond(pool[ids], counts)

    def copy_slots(self, src: list[int], dst: list[int]) -> None:
        """Copy whole blocks in the model's dtype, all layers at once."""
        dispatch.copy_blocks(self.keys, src, dst)
        dispatch.copy_blocks(self.values, src, dst)

    def seal(self, slots: list[int], ids: list[int]) -> None:
        """Encode full blocks, all layers at once: slot -> record."""
        assert self.form is not None, "only a quantized pool seals blocks"
        assert self.records is not None, "a quantized pool has records"
        dispatch.encode_blocks(self.form, self.records, self.keys, self.values, slots, ids)

    def unseal(self, slots: list[int], ids: list[int]) -> None:
        """Decode blocks that will be written to: record -> slot."""
        assert self.form is not None, "only a quantized pool unseals blocks"
        assert self.records is not None, "a quantized pool has records"
        dispatch.decode_blocks(self.form, self.records, self.keys, self.values, slots, ids)

    def follow(self, moves: Moves) -> None:
        """Bring slots up to what a reservation has changed in them."""
        if moves.copied:
            self.copy_slots(*split_pairs(moves.copied))
        if moves.unsealed:
            ids, slots = split_pairs(moves.unsealed)
            self.unseal(slots, ids)

    def grow_slots(self, num_slots: int) -> None:
        """Have so many slots; contents stay."""
        assert self._slots is not None, "only a quantized pool has slots"
        grown = self._allocate(num_slots)
        for new, old in zip(grown, self._slots, strict=True):
            new[: old.shape[0]] = old
        self._slots = grown

    def copy(self, storage: Storage, used_slots: Sequence[int]) -> KVPool:
        """The same layers of another cache, in this storage or in a copy of it; its slots are its own."""
        twin = KVPool(storage, num_slots=self.keys.shape[0])
        for index in used_slots if self._slots is not None else ():
            twin.keys[index] = self.keys[index]
            twin.values[index] = self.values[index]
        return twin

    def _allocate(self, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        storage = self.storage
        return allocate_dense(storage.shape, num_slots, storage.num_layers, storage.block_size)


def allocate_dense(
    shape: PoolShape, num_blocks: int, num_layers: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for K and V of so many blocks in the model's dtype."""
    leading = (num_blocks, num_layers, shape.kv_heads, block_size)
    keys = _empty((*leading, shape.head_dim), shape.dtype, shape.device, block_size)
    return keys, _empty((*leading, shape.v_head_dim), shape.dtype, shape.device, block_size)


def _indices(
    held: Mapping[int, int], block_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of blocks that are not full: which, and how many tokens they hold."""
    partial = {index: count for index, count in held.items() if count < block_size}
    return torch.tensor([*partial], device=device, dtype=torch.long), torch.tensor(
        [*partial.values()], device=device, dtype=torch.long
    )


def split_pairs(pairs: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """The first and the second of every pair."""
    return [first for first, _ in pairs], [second for _, second in pairs]


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, block_size: int) -> torch.Tensor:
    tensor = allocate(shape, dtype, device, block_size)
    advise_huge_pages(tensor)
    return tensor
