"""Where K and V lie: the preallocated tensors of layers that share one shape and format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .blocks import Moves
from .formats import KVFormat, RecordFormat
from .kernels import dispatch
from .memory import advise_huge_pages


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
        """The records of quantised blocks."""
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
    """

    def __init__(self, shape: PoolShape, *, num_blocks: int, num_layers: int, block_size: int) -> None:
        self.shape = shape
        self.block_size = block_size
        self.form = shape.records(block_size)
        self.num_layers = num_layers
        self.layers: dict[int, int] = {}
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self.records: torch.Tensor | None = None
        if self.form is None:
            self.keys, self.values = allocate_dense(shape, num_blocks, num_layers, block_size)
        else:
            sizes = num_blocks, num_layers, shape.kv_heads, self.form.nbytes
            self.records = _empty(sizes, torch.uint8, shape.device)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What there is of K, V and records."""
        return [tensor for tensor in (self.keys, self.values, self.records) if tensor is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        return self.num_layers * self.shape.block_bytes(self.block_size)

    def claim(self, layer_idx: int) -> int | None:
        """The place of a layer, a new one if it has none yet; None if there is no room."""
        if layer_idx not in self.layers and len(self.layers) < self.num_layers:
            self.layers[layer_idx] = len(self.layers)
        return self.layers.get(layer_idx)

    def copy(self, num_blocks: int, used: Sequence[int]) -> Storage:
        """The same layers in tensors of their own.

        Args:
            num_blocks: Blocks of the copy.
            used: Ids whose content is copied. The others are not touched, so that they stay free of charge.
        """
        twin = Storage(
            self.shape, num_blocks=num_blocks, num_layers=self.num_layers, block_size=self.block_size
        )
        twin.layers = dict(self.layers)
        for new, old in zip(twin.tensors, self.tensors, strict=True):
            for block_id in used:
                new[block_id] = old[block_id]
        return twin

    def become(self, other: Storage) -> None:
        """Take over the tensors of a copy of itself."""
        self.keys, self.values, self.records = other.keys, other.values, other.records


class KVPool:
    """What one cache has in a storage: all of its blocks, and dense slots of its own if they are quantised.

    A slot is a block in the model's dtype; a quantised layer keeps a few, `[slots, layers, kv_heads,
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
            slots: How many of them quantised layers keep in slots.
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

    def blank(self, ids: list[int]) -> None:
        """Fill whole blocks with zeros, as they are stored for good."""
        for pool in (self.keys, self.values) if self.records is None else (self.records,):
            pool[torch.tensor(ids, device=pool.device)] = 0

    def copy_slots(self, src: list[int], dst: list[int]) -> None:
        """Copy whole blocks in the model's dtype, all layers at once."""
        dispatch.copy_blocks(self.keys, src, dst)
        dispatch.copy_blocks(self.values, src, dst)

    def seal(self, slots: list[int], ids: list[int]) -> None:
        """Encode full blocks, all layers at once: slot -> record."""
        assert self.form is not None, "only a quantised pool seals blocks"
        assert self.records is not None, "a quantised pool has records"
        dispatch.encode_blocks(self.form, self.records, self.keys, self.values, slots, ids)

    def unseal(self, slots: list[int], ids: list[int]) -> None:
        """Decode blocks that will be written to: record -> slot."""
        assert self.form is not None, "only a quantised pool unseals blocks"
        assert self.records is not None, "a quantised pool has records"
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
        assert self._slots is not None, "only a quantised pool has slots"
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
    keys = _empty((*leading, shape.head_dim), shape.dtype, shape.device)
    return keys, _empty((*leading, shape.v_head_dim), shape.dtype, shape.device)


def split_pairs(pairs: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """The first and the second of every pair."""
    return [first for first, _ in pairs], [second for _, second in pairs]


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # A pool made inside torch.inference_mode() could not be written outside of it.
    with torch.inference_mode(False):
        tensor = torch.empty(*shape, dtype=dtype, device=device)
    advise_huge_pages(tensor)
    return tensor
