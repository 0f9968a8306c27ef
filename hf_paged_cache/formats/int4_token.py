"""4 bits, a scale and a zero per token: how V is stored in 4-bit formats.

The vector of one token and head is rotated; its range is cut into 15 steps:

```
x            0.10  -2.00   0.05   0.90   1.00        (after the rotation)
zero        -2.00, rounded down to float16            scale  3.00 / 15 = 0.20, rounded up
codes          10      0     10     14     15         bytes: 14|10 15|0 -|10 = EA F0 0A (see `packing`)
```

Largest error: half a scale in each rotated channel, which is at most sqrt(n) halves in a channel of x.
Rotated channels beyond the range of float16 saturate; that takes a vector of norm above 65504.
"""

from __future__ import annotations

import torch

from .codec import LARGEST_VALUE, Codec
from .packing import pack_nibbles, quantized, unpack_nibbles
from .rotation import rotate


class Int4Token(Codec):
    """Rotated, asymmetric, one scale and zero per token; parameters `[2, tokens, 1]`, scales first."""

    name = "int4_token"
    kernel_id = 3
    bits = 4
    params_per_token = 2
    is_rotated = True

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes are `(x - zero) / scale`."""
        rotated = rotate(x.float())
        ends = rotated.aminmax(dim=-1, keepdim=True)
        low, high = (end.clamp(-LARGEST_VALUE, LARGEST_VALUE) for end in ends)
        codes, scale, zero = quantized(rotated, low, high, 15)
        return pack_nibbles(codes), torch.stack((scale, zero), dim=-3)

    def decode_stored(self, codes: torch.Tensor, params: torch.Tensor, dim: int) -> torch.Tensor:
        """Zero plus scale times code."""
        scale, zero = params[..., 0, :, :].float(), params[..., 1, :, :].float()
        values: torch.Tensor = unpack_nibbles(codes, dim).float() * scale + zero
        return values
