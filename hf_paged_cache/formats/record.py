"""A block's record: K and V of one block, layer and head as one run of bytes.

```
| codes of K       | codes of V       | parameters of K | parameters of V |
  block_size rows    block_size rows    float16           float16           each part begins at 16 bytes
```

One run, so that a kernel reads one place in memory and a block moves between tiers in one copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from .codec import Codec

Side = Literal["keys", "values"]
_SIDES: tuple[Side, Side] = ("keys", "values")
_ALIGNMENT = 16


@dataclass(frozen=True)
class KVFormat:
    """How K and how V are stored, whatever the shapes."""

    name: str  # what `kv_cache_dtype` calls it
    keys: Codec
    values: Codec

    @property
    def is_per_token(self) -> bool:
        """Whether tokens can be encoded as they come; otherwise blocks are, when they are full."""
        return self.keys.is_per_token and self.values.is_per_token

    def bind(self, block_size: int, head_dim: int, v_head_dim: int) -> RecordFormat:
        """The records of blocks of that shape; PagedCacheError if the format cannot store such heads."""
        self.keys.check(head_dim)
        self.values.check(v_head_dim)
        return RecordFormat(self, block_size, head_dim, v_head_dim)


@dataclass(frozen=True)
class RecordFormat:
    """The records of one block shape: where their parts lie, and how to fill and read them in plain torch.

    Records are uint8 `[..., nbytes]` with contiguous bytes, any strides before.
    """

    format: KVFormat
    block_size: int  # tokens
    head_dim: int  # of K
    v_head_dim: int

    @cached_property
    def _edges(self) -> list[int]:
        """Bytes where the parts begin, in the order of the picture above, and where the record ends."""
        sizes = [self.block_size * self.codec(side).row_bytes(self.dim(side)) for side in _SIDES]
        sizes += [self._param_bytes(side) for side in _SIDES]
        return list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))

    @property
    def nbytes(self) -> int:
        """Bytes of a record."""
        return self._edges[-1]

    def _param_bytes(self, side: Side) -> int:
        return 2 * prod(self.codec(side).param_shape(self.block_size, self.dim(side)))

    def codec(self, side: Side) -> Codec:
        """The codec of K or V."""
        return self.format.keys if side == "keys" else self.format.values

    def dim(self, side: Side) -> int:
        """The head dim of K or V."""
        return self.head_dim if side == "keys" else self.v_head_dim

    def offsets(self, side: Side) -> tuple[int, int]:
        """Bytes where the codes and the parameters of K or V begin."""
        place = _SIDES.index(side)
        return self._edges[place], self._edges[place + 2]

    def parts(self, records: torch.Tensor, side: Side) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes `[..., block_size, row_bytes]` and parameters of K or V, as views of the records."""
        codec, dim = self.codec(side), self.dim(side)
        codes_at, params_at = self.offsets(side)
        shape = (self.block_size, codec.row_bytes(dim))
        codes = records[..., codes_at : codes_at + prod(shape)]
        params = records[..., params_at : params_at + self._param_bytes(side)].view(torch.float16)
        param_shape = codec.param_shape(self.block_size, dim)
        return torch.unflatten(codes, -1, shape), torch.unflatten(params, -1, param_shape)

    def encode(self, keys: torch.Tensor, values: torch.Tensor, records: torch.Tensor) -> None:
        """Fill records with full blocks, K and V of shape `[..., block_size, dim]`."""
        for side, x in zip(_SIDES, (keys, values), strict=True):
            for part, new in zip(self.parts(records, side), self.codec(side).encode(x), strict=True):
                part.copy_(new)

    def first_tokens(self, records: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        """Copies of records `[blocks, ..., nbytes]` with nothing left but the first `held` `[blocks]` tokens.

        All else is zero, what lies between the parts too. Parameters of a block as a whole stay: they are
        needed as they are, and are the extremes of the tokens that it was encoded with.
        """
        copies = torch.zeros_like(records)
        for side in _SIDES:
            (codes, params), (old_codes, old_params) = self.parts(copies, side), self.parts(records, side)
            codes.copy_(blank_beyond(old_codes, held))
            params.copy_(blank_beyond(old_params, held) if self.codec(side).is_per_token else old_params)
            params[held == 0] = 0
        return copies

    def encode_tokens(
        self, keys: torch.Tensor, values: torch.Tensor, records: torch.Tensor, first: int
    ) -> None:
        """Put tokens, `[..., tokens, dim]`, into slots `first, ...` of records whose format is per token."""
        assert self.format.is_per_token, f"{self.format.name} encodes full blocks only"
        for side, x in zip(_SIDES, (keys, values), strict=True):
            for part, new in zip(self.parts(records, side), self.codec(side).encode(x), strict=True):
                part[..., first : first + x.shape[-2], :] = new

    def decode(self, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 K `[..., block_size, head_dim]` and V of records; arbitrary in slots never filled."""
        keys = self.format.keys.decode(*self.parts(records, "keys"), self.head_dim)
        return keys, self.format.values.decode(*self.parts(records, "values"), self.v_head_dim)


def blank_beyond(blocks: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """Copies of blocks `[blocks, ..., block_size, width]` zero after the first `held` `[blocks]` tokens."""
    size = blocks.shape[-2]
    beyond = torch.arange(size, device=blocks.device) >= held.to(blocks.device)[:, None]
    return blocks.masked_fill(beyond.view(len(held), *[1] * (blocks.dim() - 3), size, 1), 0)
