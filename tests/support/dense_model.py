"""What a `PagedCache` should hold after any operation, in plain tensors: no blocks, tables or kernels.

Every token of every row is kept as it came until it becomes bytes. Then it may be anything within the bound
that its codec states; what the cache says is taken over, and from then on it must stay that to the bit. So a
value that moves when nothing was encoded is found, however little it moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from hf_paged_cache.formats import Codec, KVFormat
from hf_paged_cache.formats.int8_token import Int8Token

from .error_bounds import error_bound

_ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}


class Blocks(NamedTuple):
    """Blocks of the layers of one window.

    Attributes:
        size: Tokens per block.
        sinks: First blocks of a row that quantized layers keep as they came.
        residual: Newest blocks that they keep; 0 where tokens become bytes at once.
    """

    size: int
    sinks: int
    residual: int


@dataclass(frozen=True)
class Layout:
    """How a cache was made.

    Attributes:
        windows: Of each layer, None for all tokens.
        formats: Of each layer, None for the model's dtype.
        blocks: Of each window.
        is_guarded: Keys of 4 bits may be stored in int8 instead.
    """

    windows: tuple[int | None, ...]
    formats: tuple[KVFormat | None, ...]
    blocks: Mapping[int | None, Blocks]
    is_guarded: bool = False

    def error_bound(self, codec: Codec, x: torch.Tensor) -> torch.Tensor:
        """The most that x may change when it becomes bytes and is read again."""
        wide = x.float()
        bound = error_bound(codec, wide).expand_as(wide)
        if self.is_guarded and codec.bits == 4:
            bound = torch.maximum(bound, error_bound(Int8Token(), wide))
        if x.dtype != torch.float32:  # it is rounded to the model's dtype, each value by its own size
            return bound + (wide.abs() + bound) * _ROUNDING[x.dtype]
        return bound + _ROUNDING[x.dtype] * wide.abs().amax()


@dataclass
class DenseModel:
    """The rows of one cache.

    Attributes:
        layout: How the cache was made.
        batch: Rows, 0 if there are none.
        sides: K and V `[layers, batch, kv_heads, tokens, head_dim]`.
        sealed: Window -> columns of blocks that are bytes, where formats take whole blocks.
        stored: Window -> for each column of blocks whether its tokens are kept.
        record_past: Windows keep what they would drop.
    """

    layout: Layout
    batch: int = 0
    sides: list[torch.Tensor] = field(default_factory=list)
    sealed: dict[int | None, set[int]] = field(default_factory=dict)
    stored: dict[int, list[bool]] = field(default_factory=dict)
    record_past: bool = False
    _encoded: dict[tuple[int, int], list[tuple[int, torch.Tensor]]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Length of every row."""
        return self.sides[0].shape[3] if self.batch else 0

    # --- what is done to the cache --------------------------------------------------------------------------

    def begin(self, new_tokens: int, *, keeps_history: bool = False) -> None:
        """A forward brings so many tokens: what it does to the history, whether or not it goes through."""
        start = self.tokens
        for window, (size, sinks, residual) in self.layout.blocks.items():
            last = (start + new_tokens - 1) // size
            if residual:
                sealed = self.sealed.setdefault(window, set())
                for column in range(sinks, min(last - residual + 1, start // size)):
                    if column not in sealed:
                        sealed.add(column)
                        self._encode(window, column * size, (column + 1) * size)
                if start % size:
                    sealed.discard(start // size)
            if window is None:
                continue
            kept = self.stored.setdefault(window, [])
            left = 0
            if not (self.record_past or keeps_history):
                self._leave(window)
                left = max(0, start + new_tokens - window + 1) // size
            kept += [column >= left for column in range(len(kept), last + 1)]

    def write(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """That forward has given every layer K and V `[layers, batch, kv_heads, tokens, head_dim]`."""
        start = self.tokens
        self.sides = [
            torch.cat((old[:, :, :, :start], new), 3)
            for old, new in zip(self.sides or (keys, values), (keys, values), strict=True)
        ]
        self.batch = keys.shape[1]
        end = start + keys.shape[3]
        for window, (size, sinks, residual) in self.layout.blocks.items():
            if residual:
                for column in range(max(sinks, -(-start // size)), (end - 1) // size - residual + 1):
                    self.sealed.setdefault(window, set()).add(column)
                    self._encode(window, column * size, (column + 1) * size)
            elif max(start, sinks * size) < end:
                self._encode(window, max(start, sinks * size), end)

    def take_back(self) -> None:
        """That forward has failed."""
        if self.tokens:
            self._cut(self.tokens)
        else:
            self._forget()

    def can_crop(self, count: int) -> bool:
        """Whether windows still have what they would need."""
        length = self.tokens - count
        sizes = {window: blocks.size for window, blocks in self.layout.blocks.items()}
        return (
            not count
            or length <= 0
            or all(
                all(kept[max(0, length - window + 1) // sizes[window] : -(-length // sizes[window])])
                for window, kept in self.stored.items()
            )
        )

    def crop(self, count: int) -> None:
        """The last tokens were forgotten."""
        if self.tokens and count >= self.tokens:
            self._forget()
        elif self.tokens and count:
            self._cut(self.tokens - count)
        for window in self.stored if self.record_past else ():
            self._leave(window)

    def reorder(self, rows: Sequence[int]) -> None:
        """Rows were replaced by copies of these."""
        if self.batch:
            self.sides = [side[:, list(rows)] for side in self.sides]
            self.batch = len(rows)

    def reset(self) -> None:
        """All was forgotten."""
        self._forget()
        self.record_past = False

    def copy(self) -> DenseModel:
        """The rows of a copy of the cache."""
        assert not self._encoded, "a cache is compared before it is copied"
        return DenseModel(
            self.layout,
            self.batch,
            [side.clone() for side in self.sides],
            {window: {*sealed} for window, sealed in self.sealed.items()},
            {window: kept.copy() for window, kept in self.stored.items()},
            self.record_past,
        )

    # --- what the cache should say --------------------------------------------------------------------------

    def check_layer(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """K and V `[batch, kv_heads, tokens, head_dim]` of a layer, all tokens that it keeps.

        What became bytes since the last look is taken over from them.
        """
        is_kept = self._is_kept(layer)
        for side, got in enumerate((keys, values)):
            want = self.sides[side][layer]
            assert got.shape == want.shape
            assert got.dtype == want.dtype
            encoded = self._encoded.pop((layer, side), [])
            if is_kept is not None:
                got = torch.where(is_kept[:, None], got, want)
            if torch.equal(got, want):
                continue
            allowed = torch.zeros_like(want, dtype=torch.float32)
            for first, bound in encoded:
                room = allowed[:, :, first : first + bound.shape[2]]
                room += bound[:, :, : room.shape[2]]
            error = (got.float() - want.float()).abs()
            is_wrong = ~(error <= allowed)
            assert not is_wrong.any(), (
                f"layer {layer}, {'KV'[side]}, (row, head, token, channel) {is_wrong.nonzero()[0].tolist()}: "
                f"off by {error[is_wrong][0]:.3g}, {allowed[is_wrong][0]:.3g} is allowed, of "
                f"{int(is_wrong.sum())} values"
            )
            want.copy_(got)

    def visible(self, layer: int) -> list[torch.Tensor]:
        """K and V that the newest query of a layer sees as they should be stored, with its own token."""
        return [side[layer][:, :, self.first_visible(layer, self.tokens) :] for side in self.sides]

    def first_visible(self, layer: int, tokens: int) -> int:
        """First token that a query after so many sees."""
        window = self.layout.windows[layer]
        return 0 if window is None else max(0, tokens - window + 1)

    # --- inside ---------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self.batch, self.sides = 0, []
        self.sealed.clear()
        self.stored.clear()
        self._encoded.clear()

    def _cut(self, length: int) -> None:
        columns = {window: -(-length // blocks.size) for window, blocks in self.layout.blocks.items()}
        self.sides = [side[:, :, :, :length] for side in self.sides]
        for window, sealed in self.sealed.items():
            sealed &= set(range(columns[window]))
        self.stored = {window: kept[: columns[window]] for window, kept in self.stored.items()}

    def _leave(self, window: int) -> None:
        """What a window does not reach any more is dropped, in whole blocks."""
        kept = self.stored[window]
        left = min(len(kept), max(0, self.tokens - window + 1) // self.layout.blocks[window].size)
        kept[:left] = [False] * left

    def _encode(self, window: int | None, start: int, end: int) -> None:
        for layer, layer_format in enumerate(self.layout.formats):
            if self.layout.windows[layer] != window:
                continue
            for side, codec in enumerate(
                () if layer_format is None else (layer_format.keys, layer_format.values)
            ):
                bound = self.layout.error_bound(codec, self.sides[side][layer][:, :, start:end])
                self._encoded.setdefault((layer, side), []).append((start, bound))

    def _is_kept(self, layer: int) -> torch.Tensor | None:
        """Boolean `[tokens]`; None if all are."""
        window = self.layout.windows[layer]
        kept = [True] if window is None else self.stored[window]
        if all(kept):
            return None
        return torch.tensor(kept).repeat_interleave(self.layout.blocks[window].size)[: self.tokens]
