"""Where K and V lie: the preallocated tensors of layers that share one shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .kernels import dispatch
from .memory import advise_huge_pages


@dataclass(frozen=True, slots=True)
class PoolShape:
    """What layers must agree on to lie in one pool."""

    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, key_states: torch.Tensor, value_states: torch.Tensor) -> PoolShape:
        """The shape that stores `[batch, kv_heads, tokens, head_dim]` K and V."""
        return cls(
            kv_heads=key_states.shape[1],
            head_dim=key_states.shape[3],
            v_head_dim=value_states.shape[3],
            dtype=key_states.dtype,
            device=key_states.device,
        )

    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return self.kv_heads * (self.head_dim + self.v_head_dim) * self.dtype.itemsize


class KVPool:
    """K and V of several layers: two tensors `[blocks, layers, kv_heads, block_size, head_dim]`.

    A block's K (or V) in all layers is one contiguous run, and one (block, layer, head) tile is contiguous.
    The memory is left uninitialised: on a CPU it costs nothing until a block is written.

    Attributes:
        shape: What its layers agree on.
        keys: `[blocks, layers, kv_heads, block_size, head_dim]`.
        values: `[blocks, layers, kv_heads, block_size, v_head_dim]`.
    """

    def __init__(self, shape: PoolShape, *, num_blocks: int, num_layers: int, block_size: int) -> None:
        self.shape = shape
        self._num_layers = num_layers
        self._block_size = block_size
        self._claimed = 0
        self.keys, self.values = self._allocate(num_blocks)

    @property
    def has_free_slot(self) -> bool:
        """Whether another layer can move in."""
        return self._claimed < self._num_layers

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers of the pool."""
        return self.nbytes // self.keys.shape[0]

    def claim_slot(self) -> int:
        """Give the next layer its place in the second dimension."""
        slot = self._claimed
        self._claimed += 1
        return slot

    def copy_blocks(self, src: list[int], dst: list[int]) -> None:
        """Copy whole blocks, all layers at once (copy-on-write)."""
        dispatch.copy_blocks(self.keys, src, dst)
        dispatch.copy_blocks(self.values, src, dst)

    def copy(self, num_blocks: int, used: list[int]) -> KVPool:
        """Another pool for the same layers.

        Args:
            num_blocks: Its blocks.
            used: Ids whose content is copied. The others are not touched, so that they stay free of charge.
        """
        twin = KVPool(
            self.shape, num_blocks=num_blocks, num_layers=self._num_layers, block_size=self._block_size
        )
        twin._claimed = self._claimed
        for block_id in used:
            twin.keys[block_id] = self.keys[block_id]
            twin.values[block_id] = self.values[block_id]
        return twin

    def _allocate(self, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self.shape
        leading = (num_blocks, self._num_layers, shape.kv_heads, self._block_size)
        # A pool made inside torch.inference_mode() could not be written outside of it.
        with torch.inference_mode(False):
            keys = torch.empty(*leading, shape.head_dim, dtype=shape.dtype, device=shape.device)
            values = torch.empty(*leading, shape.v_head_dim, dtype=shape.dtype, device=shape.device)
        advise_huge_pages(keys)
        advise_huge_pages(values)
        return keys, values
