"""Pool tensors: preallocated memory for the K and V of layers that share one shape and format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from hf_paged_cache.formats.record import KVFormat, RecordFormat, blank_beyond
from hf_paged_cache.kernels import dispatch

from .device.memory import allocate
from .device.virtual_memory import GrowingMemory, growing_memory

if TYPE_CHECKING:
    from hf_paged_cache.blocks import Moves

# Tensors, and the memory that they lie in where that can grow; replaced as one.
Held = tuple[list[torch.Tensor], list[GrowingMemory]]


@dataclass(frozen=True, slots=True)
class PoolShape:
    """What layers must agree on to lie in the same pool tensors."""

    kv_heads: int
    head_dim: int  # of K
    v_head_dim: int
    dtype: torch.dtype  # of the model's K and V
    device: torch.device
    format: KVFormat | None = None  # None: as they come

    @classmethod
    def of(cls, key_states: torch.Tensor, value_states: torch.Tensor) -> PoolShape:
        """The shape that stores `[batch, kv_heads, tokens, head_dim]` K and V."""
        _, kv_heads, _, head_dim = key_states.shape
        return cls(kv_heads, head_dim, value_states.shape[3], key_states.dtype, key_states.device)

    def layout(self, block_size: int) -> RecordFormat | None:
        """The records of quantized blocks."""
        return None if self.format is None else self.format.bind(block_size, self.head_dim, self.v_head_dim)

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block in one layer, as it is stored for good."""
        layout = self.layout(block_size)
        return self.dense_bytes(block_size) if layout is None else self.kv_heads * layout.nbytes

    def dense_bytes(self, block_size: int) -> int:
        """Bytes of one block in one layer, in the model's dtype."""
        return self.kv_heads * block_size * (self.head_dim + self.v_head_dim) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class NewTokens:
    """What a forward brings to a layer, but for its contents."""

    batch: int  # rows
    count: int  # tokens of every row
    shape: PoolShape  # what pool tensors for them must be like

    @classmethod
    def of(cls, key_states: torch.Tensor, value_states: torch.Tensor) -> NewTokens:
        """What K and V `[batch, kv_heads, tokens, head_dim]` are."""
        return cls(key_states.shape[0], key_states.shape[2], PoolShape.of(key_states, value_states))


class PoolTensors:
    """All blocks of several layers, for every cache of a store.

    Without a format K and V lie in two tensors `[blocks, layers, kv_heads, block_size, head_dim]`: a block's
    K (or V) in all layers is one contiguous run, and one (block, layer, head) tile is contiguous. With one
    there are records, uint8 `[blocks, layers, kv_heads, nbytes]`.

    The memory is left uninitialised: on a CPU it costs nothing until a block is written.
    """

    def __init__(
        self, shape: PoolShape, num_blocks: int, num_layers: int, block_size: int, *, grows: bool = False
    ) -> None:
        self.shape = shape
        self.num_layers = num_layers  # that there is room for
        self.block_size = block_size
        self.grows = grows  # more blocks are expected: it lies in memory that grows, where there is such
        self.layout = shape.layout(block_size)
        self.layers: dict[int, int] = {}  # index -> place in the second dimension
        sizes = self._sizes(num_blocks)
        memory = [growing_memory(shape.device) for _ in sizes] if grows else []
        held = self._in_place(num_blocks, [each for each in memory if each is not None])
        self.held = held or ([allocate(*each, shape.device, block_size) for each in sizes], [])

    @property
    def tensors(self) -> list[torch.Tensor]:
        """K and V, or records."""
        return self.held[0]

    @property
    def num_blocks(self) -> int:
        """Blocks that there is room for."""
        return self.tensors[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of K and V, or records."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        return self.num_layers * self.shape.block_bytes(self.block_size)

    def claim(self, layer_idx: int) -> bool:
        """Give a layer a place if it has none yet; False if there is no room."""
        if layer_idx not in self.layers and len(self.layers) < self.num_layers:
            self.layers[layer_idx] = len(self.layers)
        return layer_idx in self.layers

    def copy(
        self, num_blocks: int, used: Mapping[int, int], moved: Mapping[int, int] | None = None
    ) -> PoolTensors:
        """The same layers in tensors of their own, which have `num_blocks`.

        Of the `used` blocks, given as id -> first tokens, so many are copied, to the id that `moved` says if
        it has one. Others are not touched, and so cost nothing.
        """
        copied = PoolTensors(self.shape, num_blocks, self.num_layers, self.block_size, grows=self.grows)
        copied.layers, moved = dict(self.layers), moved or {}
        for new, old in zip(copied.tensors, self.tensors, strict=True):
            for block_id, tokens in used.items():
                content = old[block_id]
                if tokens < self.block_size:
                    content = self._first_tokens(content[None], self._indices([tokens]))[0]
                new[moved.get(block_id, block_id)] = content
        return copied

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, all layers at once: (source, target) ids (copy-on-write)."""
        for tensor in self.tensors if pairs else ():
            dispatch.copy_blocks(tensor, *split_pairs(pairs))

    def export(self, place: int, tokens: Mapping[int, int]) -> list[torch.Tensor]:
        """What one layer has in blocks, given as id -> first tokens of it: `[blocks, kv_heads, ...]`."""
        ids, counts = (self._indices([*each]) for each in (tokens.keys(), tokens.values()))
        return [self._first_tokens(tensor[ids, place], counts) for tensor in self.tensors]

    def import_(self, place: int, ids: Sequence[int], contents: Sequence[torch.Tensor]) -> None:
        """Put what `export` has taken of a layer into blocks."""
        with torch.no_grad():
            for tensor, content in zip(self.tensors, contents, strict=True):
                tensor[self._indices(ids), place] = content.to(tensor.device)

    def _indices(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self.shape.device)

    def _first_tokens(self, blocks: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Copies of blocks in which nothing is left but the first tokens `[blocks]` of each."""
        first_tokens = blank_beyond if self.layout is None else self.layout.first_tokens
        return first_tokens(blocks, tokens)

    def resized(self, num_blocks: int, used: Sequence[int], moved: Mapping[int, int]) -> Held:
        """What `held` is for so many blocks: in the memory where they lie, otherwise copied (see `copy`)."""
        held = self._in_place(num_blocks, self.held[1]) if num_blocks >= self.num_blocks else None
        return held or self.copy(num_blocks, dict.fromkeys(used, self.block_size), moved).held

    def _sizes(self, num_blocks: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        shape, leading = self.shape, (num_blocks, self.num_layers, self.shape.kv_heads)
        if self.layout is not None:
            return [((*leading, self.layout.nbytes), torch.uint8)]
        return [((*leading, self.block_size, dim), shape.dtype) for dim in (shape.head_dim, shape.v_head_dim)]

    def _in_place(self, num_blocks: int, memory: list[GrowingMemory]) -> Held | None:
        """Tensors in memory that grows; None if there is none for each of them, or none is left."""
        sizes = self._sizes(num_blocks)
        if len(memory) < len(sizes):
            return None
        try:
            with torch.inference_mode(False):
                return [each.tensor(*size) for each, size in zip(memory, sizes, strict=True)], memory
        except RuntimeError:
            return None


class LayerPool:
    """K and V of one cache's layers: blocks that caches share and, where those are records, dense blocks."""

    def __init__(self, tensors: PoolTensors, num_dense: int) -> None:
        self.tensors = tensors
        self.shape, self.layout = tensors.shape, tensors.layout
        self.dense: PoolTensors | None = None  # of this cache alone
        if self.layout is not None:
            shape = replace(self.shape, format=None)
            self.dense = PoolTensors(shape, num_dense, tensors.num_layers, tensors.block_size)

    @property
    def keys(self) -> torch.Tensor:
        """`[blocks or dense blocks, layers, kv_heads, block_size, head_dim]`."""
        return (self.dense or self.tensors).tensors[0]

    @property
    def values(self) -> torch.Tensor:
        """The same, with the head dim of V."""
        return (self.dense or self.tensors).tensors[1]

    @property
    def records(self) -> torch.Tensor | None:
        """uint8 `[blocks, layers, kv_heads, nbytes]`, or None."""
        return None if self.layout is None else self.tensors.tensors[0]

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dense blocks beside records."""
        return 0 if self.dense is None else self.dense.nbytes

    def seal(self, dense_ids: list[int], ids: list[int]) -> None:
        """Encode full blocks, all layers at once: dense block -> record."""
        self._move(dispatch.encode_blocks, dense_ids, ids)

    def follow(self, moves: Moves) -> None:
        """Bring dense blocks and records up to what a reservation has changed in them."""
        assert self.dense is not None, "only a quantized pool has dense blocks"
        self.dense.copy_blocks(moves.copied)
        if moves.unsealed:
            ids, dense_ids = split_pairs(moves.unsealed)
            self._move(dispatch.decode_blocks, dense_ids, ids)
        self.tensors.copy_blocks(moves.records)

    def copy(self, tensors: PoolTensors, used_dense: Mapping[int, int]) -> LayerPool:
        """The same layers of another cache, in these tensors or a copy of them; dense blocks are copied."""
        copied = LayerPool(tensors, num_dense=0)
        copied.dense = None if self.dense is None else self.dense.copy(self.dense.num_blocks, used_dense)
        return copied

    def _move(self, move: Callable[..., None], dense_ids: list[int], ids: list[int]) -> None:
        assert self.layout is not None, "only quantized blocks are encoded and decoded"
        move(self.layout, self.records, self.keys, self.values, dense_ids, ids)


def split_pairs(pairs: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """The first and the second of every pair."""
    return [first for first, _ in pairs], [second for _, second in pairs]
