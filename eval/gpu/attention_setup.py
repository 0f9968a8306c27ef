"""Section c, what it measures on: K and V of a decode step, in blocks and dense."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eval.gpu.device import Device
from hf_paged_cache.kernels import dispatch
from hf_paged_cache.kernels.call import Attention, LayerBlocks, RowLengths
from hf_paged_cache.store.pool_tensors import PoolShape, PoolTensors

BLOCK_SIZE = 64


@dataclass(frozen=True)
class Shape:
    """Heads of one layer, in bfloat16."""

    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16


LLAMA_3_8B = Shape()
TOY = Shape(q_heads=4, kv_heads=2, head_dim=16)


@dataclass(frozen=True)
class Case:
    """A decode step over `tokens` tokens in each of `batch` rows, the new one included."""

    shape: Shape
    batch: int
    tokens: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that one layer reads."""
        shape = self.shape
        return 2 * self.batch * self.tokens * shape.kv_heads * shape.head_dim * shape.dtype.itemsize

    def layers(self, cache_bytes: int) -> int:
        """Layers to go round, so that nothing is still in the device's cache when it is read again."""
        return max(2, -(-4 * cache_bytes // self.kv_bytes))


class PagedStack:
    """The layers of one pool with shuffled blocks; `step` writes and attends the new token in each."""

    def __init__(self, case: Case, device: Device, generator: torch.Generator) -> None:
        shape = case.shape
        self.case = case
        self.layers = case.layers(device.cache_bytes())
        columns = -(-case.tokens // BLOCK_SIZE)
        num_blocks = case.batch * columns
        keys, values = PoolTensors(
            PoolShape(shape.kv_heads, shape.head_dim, shape.head_dim, shape.dtype, device.torch_device),
            num_blocks=num_blocks,
            num_layers=self.layers,
            block_size=BLOCK_SIZE,
        ).tensors
        keys.normal_(generator=generator)
        values.normal_(generator=generator)
        order = torch.randperm(num_blocks, generator=generator, device=device.torch_device)
        table = order.to(torch.int32).view(case.batch, columns).contiguous()
        lengths = torch.full((case.batch,), case.tokens, dtype=torch.int32, device=device.torch_device)
        held = RowLengths(case.tokens, lengths)
        self.blocks = [
            LayerBlocks(keys[:, layer], values[:, layer], table, held) for layer in range(self.layers)
        ]
        self.mask = torch.ones(case.batch, 1, 1, case.tokens, dtype=torch.bool, device=device.torch_device)
        self.query, self.new_keys, self.new_values = (
            _states(case, heads, device, generator)
            for heads in (shape.q_heads, shape.kv_heads, shape.kv_heads)
        )
        self.last_output = torch.empty(0)

    def attend(self, layer: int, mask: torch.Tensor | None = None) -> torch.Tensor:
        """The new token of one layer: written, then attended with all before it."""
        tokens, blocks = self.case.tokens, self.blocks[layer]
        dispatch.write(blocks, self.new_keys, self.new_values, tokens - 1)
        scale = self.case.shape.head_dim**-0.5
        return dispatch.decode(blocks, Attention(self.query, 0, tokens, scale, mask))[0]

    def step(self) -> None:
        """Every layer, one after the other."""
        for layer in range(self.layers):
            self.last_output = self.attend(layer)

    def masked_step(self) -> None:
        """The same with a mask that hides nothing, as a host passes that has been given one."""
        for layer in range(self.layers):
            self.last_output = self.attend(layer, self.mask)

    def forget_last_token(self) -> None:
        """Poison what a step must write: the new token of the last layer, and its answer."""
        last = self.case.tokens - 1
        blocks = self.blocks[-1]
        ids = blocks.table[:, last // BLOCK_SIZE].long()
        for pool in (blocks.keys, blocks.values):
            pool[ids, :, last % BLOCK_SIZE] = torch.nan
        self.last_output.fill_(torch.nan)

    def answer_in_float64(self, layer: int, row: int, kv_head: int) -> torch.Tensor:
        """What the query heads of one kv head get: `[group, head_dim]`, from the blocks as they are."""
        blocks, tokens = self.blocks[layer], self.case.tokens
        ids = blocks.table[row].long()
        keys, values = (
            pool[ids, kv_head].flatten(0, 1)[:tokens].double() for pool in (blocks.keys, blocks.values)
        )
        group = self.case.shape.q_heads // self.case.shape.kv_heads
        query = self.query[row, kv_head * group : (kv_head + 1) * group, 0].double()
        weights = (query @ keys.T * self.case.shape.head_dim**-0.5).softmax(dim=-1)
        answer: torch.Tensor = weights @ values
        return answer


class DenseStack:
    """As many layers of dense K and V `[batch, kv_heads, tokens, head_dim]`."""

    def __init__(self, paged: PagedStack, device: Device, generator: torch.Generator) -> None:
        case, shape = paged.case, paged.case.shape
        size = (case.batch, shape.kv_heads, case.tokens, shape.head_dim)
        self.case = case
        self.query = paged.query
        self.layers = [
            tuple(
                torch.empty(size, dtype=shape.dtype, device=device.torch_device).normal_(generator=generator)
                for _ in range(2)
            )
            for _ in range(paged.layers)
        ]


def _states(case: Case, heads: int, device: Device, generator: torch.Generator) -> torch.Tensor:
    """As projections leave them: `[batch, heads, 1, head_dim]`, heads and tokens swapped."""
    size = (case.batch, 1, heads, case.shape.head_dim)
    drawn = torch.randn(size, generator=generator, device=device.torch_device)
    return drawn.to(case.shape.dtype).transpose(1, 2)
