"""Rows whose blocks are all there from the start, so that a decode step can be compiled and replayed.

A compiled step runs no Python: it finds tables, lengths and pools where they were when it was traced, and
counts new tokens itself, on the device. So a row gets all its blocks at once, tensors stay in place, and the
host asks for the length when it is asked for it; these are the rules of the static cache of `transformers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Self

import torch

from hf_paged_cache.errors import BackendUnavailable, PagedCacheError
from hf_paged_cache.kernels import dispatch, triton
from hf_paged_cache.kernels.call import LayerBlocks, StaticBlocks

from .layer_group import LayerGroup
from .pool_tensors import PoolShape
from .window_store import WindowStore

if TYPE_CHECKING:
    import weakref

    from hf_paged_cache.host.architectures import LayerSpec

    from .precision import Precision

DEVICES = frozenset({"cuda"})  # device types where compiled steps pay
_COPY_BYTES = 64 << 20  # about as much is copied aside at one time when rows change places


@dataclass(frozen=True, slots=True)
class Reader:
    """The attention module that has read a layer's K and V; a compiler takes a bare reference for it."""

    module: weakref.ref[torch.nn.Module]


class StaticGroup(LayerGroup):
    """A layer group whose rows have `row_blocks` blocks each, whatever they hold.

    It has its store alone, and blocks outside a window stay.
    """

    HAS_FIXED_ROWS = True

    def __init__(
        self, specs: dict[int, LayerSpec], store: WindowStore, precision: Precision, *, row_blocks: int
    ) -> None:
        super().__init__(specs, store, precision, row_blocks=row_blocks)
        self.static_blocks: dict[int, StaticBlocks] = {}  # by layer; what a compiled step reads and writes
        self.readers: dict[int, Reader] = {}  # by layer; what has read it last
        self.vetted: set[int] = set()  # layers whose eager function computes what the kernel does, by a try
        reason = triton.unavailable_reason()
        if reason is not None:
            raise BackendUnavailable(
                f"compile=True needs the Triton kernels: {reason} Make the cache without compile=True."
            )
        import_module("hf_paged_cache.kernels.triton.ops")  # registers what compiled steps call

    def fork(self, store: WindowStore | None = None) -> Self:
        """The same rows for another cache, as in `LayerGroup`, with blocks of their own."""
        assert store is not None, "every static row owns its blocks"
        copied = super().fork(store)
        copied.static_blocks = {}
        copied.readers, copied.vetted = dict(self.readers), set(self.vetted)
        copied._rebuild()
        return copied

    @property
    def capacity_tokens(self) -> int:
        """Tokens that a row can hold."""
        return self.tables.row_blocks * self.block_size

    @property
    def num_tokens(self) -> int:
        """Tokens of every row, as far as the host knows."""
        return self.tables.tokens

    def claim(self, layer_idx: int, shape: PoolShape) -> LayerBlocks:
        """Give a layer its place; BackendUnavailable if the kernels of compiled steps cannot serve it."""
        blocks = super().claim(layer_idx, shape)
        name = dispatch.backend_name(blocks)
        if name != "triton":
            reason = next(each.reason for each in dispatch.explain(blocks) if each.name == "triton")
            raise BackendUnavailable(
                f"compile=True needs the Triton kernels, and layer {layer_idx} would be served by {name!r}: "
                f"{reason} Make the cache without compile=True."
            )
        self._rebuild()
        return blocks

    def start(self, batch: int) -> None:
        """Begin with so many rows, empty, but with all their blocks."""
        self.manager.start(batch)
        reservation = self.manager.reserve(self.capacity_tokens, keep_history=True)
        assert reservation is not None, "a static pool holds all blocks of its rows"
        self.sync_tables()
        self.tables.set_length(0)
        self._rebuild()

    def crop(self, num_tokens: int) -> None:
        """Cut every row down to its first tokens; the blocks stay."""
        self.manager.version += 1
        self.tables.set_length(num_tokens)

    def check_rows(self, count: int) -> None:
        """Raise PagedCacheError unless there are so many rows."""
        if count != self.manager.batch:
            raise PagedCacheError(
                f"with compile=True the number of rows is fixed: there are {self.manager.batch}, and {count} "
                "were asked for. Make the cache without compile=True"
            )

    def reorder(self, row_indices: Sequence[int]) -> None:
        """Copy rows over each other, as many as there are (see `check_rows`).

        A compiled step could not copy a shared block when it writes to one.
        """
        rows = self.manager.tables
        used = -(-self.num_tokens // self.block_size)
        moved = [(source, row) for row, source in enumerate(row_indices) if row != source]
        for pool in self.pools if moved else ():
            # A block is overwritten by the same column of another row only, so columns may go one by one.
            step = max(1, _COPY_BYTES // (pool.tensors.bytes_per_block * len(moved)))
            for first in range(0, used, step):
                columns = slice(first, min(first + step, used))
                pairs = (zip(rows[a].ids[columns], rows[b].ids[columns], strict=True) for a, b in moved)
                pool.tensors.copy_blocks([*chain.from_iterable(pairs)])
        self.manager.version += 1

    def bind_again(self) -> None:
        """As in `LayerGroup`; compiled steps then find other tensors."""
        super().bind_again()
        self._rebuild()

    def _rebuild(self) -> None:
        """Note where everything lies, and that it will stay there."""
        counted: set[torch.device] = set()
        for layer_idx, blocks in self.blocks.items():
            assert blocks.lengths is not None, "static groups keep lengths on every device"
            pool, lengths = self._pools[layer_idx], blocks.lengths.on_device
            place, advances = pool.tensors.layers[layer_idx], lengths.device not in counted
            counted.add(lengths.device)
            static = StaticBlocks(pool.keys, pool.values, place, blocks.table, lengths, advances)
            self.static_blocks[layer_idx] = static
            for tensor in (static.keys, static.values, static.table, lengths):
                torch._dynamo.mark_static_address(tensor)
