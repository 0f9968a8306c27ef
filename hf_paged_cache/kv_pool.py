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


class KVPool:
    """K and V of several layers.

    Without a format they lie in two tensors `[blocks, layers, kv_heads, block_size, head_dim]`: a block's K
    (or V) in all layers is one contiguous run, and one (block, layer, head) tile is contiguous. With one
    there are records, `[blocks, layers, kv_heads, nbytes]`, and the two tensors have `slots` for the few
    blocks that stay in the model's dtype.

    The memory is left uninitialised: on a CPU it costs nothing until a block is written.

    Attributes:
        shape: What its layers agree on.
        form: What the bytes of records mean, or None.
        keys: `[blocks or slots, layers, kv_heads, block_size, head_dim]`.
        values: `[blocks or slots, layers, kv_heads, block_size, v_head_dim]`.
        records: uint8 `[blocks, layers, kv_heads, nbytes]`, or None.
    """

    def __init__(
        self, shape: PoolShape, *, num_blocks: int, num_layers: int, block_size: int, num_slots: int = 0
    ) -> None:
        self.shape = shape
        self.form = shape.records(block_size)
        self._num_layers = num_layers
        self._block_size = block_size
        self._claimed = 0
        self._left = 0
        self.records: torch.Tensor | None = None
        if self.form is None:
            num_slots = num_blocks
        else:
            records = num_blocks, num_layers, shape.kv_heads, self.form.nbytes
            self.records = _empty(records, torch.uint8, shape.device)
        self.keys, self.values = self._allocate(num_slots)

    @property
    def has_free_slot(self) -> bool:
        """Whether another layer can move in."""
        return self._claimed < self._num_layers

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.keys.nbytes + self.values.nbytes + (0 if self.records is None else self.records.nbytes)

    @property
    def num_used_layers(self) -> int:
        """Layers that live here."""
        return self._claimed - self._left

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers of the pool, as it is stored for good."""
        return self._num_layers * self.shape.block_bytes(self._block_size)

    def claim_slot(self) -> int:
        """Give the next layer its place in the second dimension."""
        slot = self._claimed
        self._claimed += 1
        return slot

    def leave_slot(self) -> None:
        """Let a layer move out; its place stays empty."""
        self._left += 1

    def used_bytes(self, blocks: int, slots: int) -> int:
        """Bytes that the layers use of so many blocks, of which quantised layers keep some in slots."""
        slots = 0 if self.form is None else slots
        stored = (blocks - slots) * self.shape.block_bytes(self._block_size)
        return self.num_used_layers * (stored + slots * self.shape.dense_bytes(self._block_size))

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
        keys, values = self._allocate(num_slots)
        for new, old in ((keys, self.keys), (values, self.values)):
            new[: old.shape[0]] = old
        self.keys, self.values = keys, values

    def copy(self, num_blocks: int, used: list[int], used_slots: Sequence[int]) -> KVPool:
        """Another pool for the same layers.

        Args:
            num_blocks: Its blocks.
            used: Ids whose content is copied. The others are not touched, so that they stay free of charge.
            used_slots: The same for the slots of a quantised pool.
        """
        twin = KVPool(
            self.shape,
            num_blocks=num_blocks,
            num_layers=self._num_layers,
            block_size=self._block_size,
            num_slots=self.keys.shape[0],
        )
        twin._claimed, twin._left = self._claimed, self._left
        if self.records is not None and twin.records is not None:
            for block_id in used:
                twin.records[block_id] = self.records[block_id]
        for index in used if self.records is None else used_slots:
            twin.keys[index] = self.keys[index]
            twin.values[index] = self.values[index]
        return twin

    def _allocate(self, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self.shape
        leading = (num_slots, self._num_layers, shape.kv_heads, self._block_size)
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
