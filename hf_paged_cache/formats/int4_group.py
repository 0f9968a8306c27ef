"""4 bits, a scale and a zero per group of channels of one token: what stock caches do, to be compared with.

```
group_size 2     x        0.0   1.5 | 60.0  61.5         codes   0  15 |  0  15
                 zeros    0.0       | 60.0               scales  0.1   |  0.1
```

It suits V. In K, a channel that is large in every token takes the range of its whole group, in every token.
Largest error: half a group's scale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hf_paged_cache.errors import PagedCacheError

from .codec import Codec
from .packing import pack_nibbles, quantized, unpack_nibbles


@dataclass(frozen=True)
class Int4Group(Codec):
    """Asymmetric, one scale and zero per group of a token; parameters `[2, tokens, groups]`, scales first."""

    name = "int4_group"
    kernel_id = 6
    bits = 4
    group_size: int = 32

    def with_group_size(self, group_size: int) -> Int4Group:
        """The same codec with groups of that size."""
        return replace(self, group_size=group_size)

    def check(self, dim: int) -> None:
        """Groups must fill a head."""
        if dim % self.group_size:
            divisors = [n for n in range(8, dim + 1) if dim % n == 0]
            raise PagedCacheError(
                f"group_size must divide the head dim, which is {dim}; got {self.group_size}. "
                f"Some that do: {', '.join(map(str, divisors))}"
            )

    def param_shape(self, tokens: int, dim: int) -> tuple[int, ...]:
        """A scale and a zero a group."""
        return (2, tokens, dim // self.group_size)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes are `(x - zero) / scale`."""
        groups = self._groups(x)
        codes, scale, zero = quantized(groups, *groups.aminmax(dim=-1, keepdim=True), 15)
        return pack_nibbles(codes.flatten(-2)), torch.stack((scale[..., 0], zero[..., 0]), dim=-3)

    def decode_stored(self, codes: torch.Tensor, params: torch.Tensor, dim: int) -> torch.Tensor:
        """Zero plus scale times code."""
        groups = self._groups(unpack_nibbles(codes, dim))
        scale, zero = (params[..., i, :, :, None].float() for i in (0, 1))
        values: torch.Tensor = groups * scale + zero
        return values.flatten(-2)

    def _groups(self, x: torch.Tensor) -> torch.Tensor:
        return torch.unflatten(x.float(), -1, (-1, self.group_size))
