"""What a quantized cache should answer, without blocks, tables or kernels.

A `DynamicCache` of the host that keeps every token of every row densely, passes it through the format's plain
torch when it should have become bytes, and hands attention what it should see. Written from the rules, not
from the code under test:

- per token: tokens are bytes at once;
- per block: the first block and the newest one stay as they came; a full block becomes bytes with the next
  token after it; full blocks of one forward that others follow in it do at once; a write into a cropped block
  of bytes starts from what the bytes say;
- a row's blocks are counted from its first token after the padding, so that it is stored as if it were alone;
- one query sees its own K and V as they are stored, several see each other's as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from hf_paged_cache.formats import KVFormat


class SimulatedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer. `keys` and `values` are what is stored, decoded."""

    def __init__(
        self,
        layer_format: KVFormat,
        block_size: int,
        sink_blocks: int,
        residual_blocks: int,
        padding: Sequence[int],
    ) -> None:
        super().__init__()
        self.layer_format = layer_format
        self.block_size = block_size
        self.sink_blocks = sink_blocks
        self.residual_blocks = residual_blocks
        self.padding = padding
        self.sealed: set[tuple[int, int]] = set()
        """Row and column of blocks that are bytes."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.get_seq_length()
        if not start:
            self.sealed.clear()
        end = start + key_states.shape[2]
        own = [
            (row, max(0, start - padding), end - padding)
            for row, padding in enumerate(self._padding_of(len(key_states)))
            if end > padding
        ]
        for span in own if self.residual_blocks else ():
            self._seal_before(*span)
        super().update(key_states, value_states, *args, **kwargs)
        assert self.keys is not None and self.values is not None  # noqa: PT018
        self.keys, self.values = self.keys.clone(), self.values.clone()
        for span in own:
            self._encode_new(*span)
        if key_states.shape[2] == 1:
            return self.keys, self.values
        return (
            torch.cat((self.keys[:, :, :start], key_states), 2),
            torch.cat((self.values[:, :, :start], value_states), 2),
        )

    def crop(self, max_length: int) -> None:
        super().crop(max_length)
        assert self.keys is not None
        padding, held = self._padding_of(len(self.keys)), self.get_seq_length()
        self.sealed = {(r, c) for r, c in self.sealed if c * self.block_size < held - padding[r]}

    def _padding_of(self, rows: int) -> list[int]:
        """Leading padding of every row: of a prompt's beams, that of the prompt."""
        return [n for n in self.padding for _ in range(rows // len(self.padding))]

    def _seal_before(self, row: int, start: int, end: int) -> None:
        """What becomes bytes of a row's tokens before `start` when those up to `end` come."""
        size = self.block_size
        for column in range(
            self.sink_blocks, min((end - 1) // size - self.residual_blocks + 1, start // size)
        ):
            self._seal(row, column)
        if start % size:
            self.sealed.discard((row, start // size))

    def _encode_new(self, row: int, start: int, end: int) -> None:
        """What becomes bytes of a row's new tokens."""
        size = self.block_size
        last = (end - 1) // size
        if self.residual_blocks:
            for column in range(max(self.sink_blocks, -(-start // size)), last - self.residual_blocks + 1):
                self._seal(row, column)
        else:
            for column in range(max(self.sink_blocks, start // size), last + 1):
                self._encode(row, max(start, column * size), min(end, (column + 1) * size))

    def _seal(self, row: int, column: int) -> None:
        if (row, column) not in self.sealed:
            self.sealed.add((row, column))
            self._encode(row, column * self.block_size, (column + 1) * self.block_size)

    def _encode(self, row: int, start: int, end: int) -> None:
        for codec, x in ((self.layer_format.keys, self.keys), (self.layer_format.values, self.values)):
            assert x is not None
            padding = self._padding_of(len(x))[row]
            part = x[row : row + 1, :, padding + start : padding + end]
            part[:] = codec.decode(*codec.encode(part), part.shape[-1]).to(x.dtype)


def simulated_cache(
    model: Any,
    layer_format: KVFormat,
    *,
    block_size: int,
    sink_blocks: int,
    residual_blocks: int,
    padding: Sequence[int] = (0,),
) -> DynamicCache:
    """A cache of simulated layers; windows are left to the masks of the model.

    Args:
        padding: Of every prompt, how many tokens its row begins with that are none.
    """
    cache = DynamicCache(config=model.config)
    cache.layers = [
        SimulatedLayer(layer_format, block_size, sink_blocks, residual_blocks, padding)
        for _ in range(len(cache.layers))
    ]
    return cache
