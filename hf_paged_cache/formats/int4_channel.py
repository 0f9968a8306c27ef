"""4 bits, a scale and a zero per channel: how `int4` stores K.

Some channels of K are large in every token (key biases, slow rotary frequencies), so a channel's values over
one block have a narrower range than a token's values over the channels (KIVI, Liu et al. 2024). Nothing is
rotated, as that would mix the channels again. A block must be full before it can be encoded.

```
           channel 0   channel 1
token 0       60.1       -0.5          zero  60.09375  -0.5       (rounded down to float16)
token 1       60.7        0.1          scale  0.0404    0.1334    (rounded up)
token 2       60.4        1.5
codes       0, 15, 8    0, 4, 15       a byte holds two channels of one token (see `packing`)
```

Largest error: half the channel's scale.
"""

from __future__ import annotations

import torch

from .codec import Codec
from .packing import pack_nibbles, quantized, unpack_nibbles


class Int4Channel(Codec):
    """Asymmetric, one scale and zero per channel of a block; parameters `[2, dim]`, scales first."""

    name = "int4_channel"
    kernel_id = 4
    bits = 4
    is_per_token = False

    def param_shape(self, tokens: int, dim: int) -> tuple[int, ...]:
        """A scale and a zero a channel."""
        return (2, dim)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes are `(x - zero) / scale`."""
        wide = x.float()
        codes, scale, zero = quantized(wide, *wide.aminmax(dim=-2, keepdim=True), 15)
        return pack_nibbles(codes), torch.cat((scale, zero), dim=-2)

    def decode_stored(self, codes: torch.Tensor, params: torch.Tensor, dim: int) -> torch.Tensor:
        """Zero plus scale times code."""
        scale, zero = params[..., :1, :].float(), params[..., 1:, :].float()
        values: torch.Tensor = unpack_nibbles(codes, dim).float() * scale + zero
        return values
