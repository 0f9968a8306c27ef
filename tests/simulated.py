"""What a quantised cache should answer, without blocks, tables or kernels.

A `DynamicCache` of the host that keeps every token of every row densely, passes it through the format's plain
torch when it should have become bytes, and hands attention what it should see. Written from the rules, not
from the code under test:

- per token: tokens are bytes at once;
- per block: the first block and the newest one stay as they came; a full block becomes bytes with the next
  token after it; full blocks of one forward that others follow in it do at once; a write into a cropped block
  of bytes starts from what the bytes say;
- one query sees its own K and V as they are stored, several see each other's as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from hf_paged_cache.formats import KVFormat


class SimulatedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer. `keys` and `values` are what is stored, decoded."""

    def __init__(self, form: KVFormat, block_size: int, sink_blocks: int, residual_blocks: int) -> None:
        super().__init__()
        self.form = form
        self.block_size = block_size
        self.sink_blocks = sink_blocks
        self.residual_blocks = residual_blocks
        self.sealed: set[int] = set()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.get_seq_length()
        if not start:
            self.sealed.clear()
        end, size = start + key_states.shape[2], self.block_size
        last = (end - 1) // size
        if self.residual_blocks:
            for column in range(self.sink_blocks, min(last - self.residual_blocks + 1, start // size)):
                self._seal(column)
            if start % size:
                self.sealed.discard(start // size)
        super().update(key_states, value_states, *args, **kwargs)
        assert self.keys is not None and self.values is not None  # noqa: PT018
        self.keys, self.values = self.keys.clone(), self.values.clone()
        for column in range(max(self.sink_blocks, -(-start // size)), last + 1):
            if self.residual_blocks and column <= last - self.residual_blocks:
                self._seal(column)
        if not self.residual_blocks:
            for column in range(max(self.sink_blocks, start // size), last + 1):
                self._encode(max(start, column * size), min(end, (column + 1) * size))
        if key_states.shape[2] == 1:
            return self.keys, self.values
        return (
            torch.cat((self.keys[:, :, :start], key_states), 2),
            torch.cat((self.values[:, :, :start], value_states), 2),
        )

    def crop(self, max_length: int) -> None:
        super().crop(max_length)
        self.sealed = {c for c in self.sealed if c * self.block_size < self.get_seq_length()}

    def _seal(self, column: int) -> None:
        if column not in self.sealed:
            self.sealed.add(column)
            self._encode(column * self.block_size, (column + 1) * self.block_size)

    def _encode(self, start: int, end: int) -> None:
        for codec, x in ((self.form.keys, self.keys), (self.form.values, self.values)):
            assert x is not None
            part = x[:, :, start:end]
            x[:, :, start:end] = codec.decode(*codec.encode(part), part.shape[-1]).to(x.dtype)


def simulated_cache(
    model: Any, form: KVFormat, *, block_size: int, sink_blocks: int, residual_blocks: int
) -> DynamicCache:
    """A cache of simulated layers; windows are left to the masks of the model."""
    cache = DynamicCache(config=model.config)
    cache.layers = [
        SimulatedLayer(form, block_size, sink_blocks, residual_blocks) for _ in range(len(cache.layers))
    ]
    return cache
