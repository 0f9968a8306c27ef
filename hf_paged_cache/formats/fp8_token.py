"""8-bit floats (e4m3), one scale per token.

The vector of one token and head is divided by a scale that makes its largest magnitude 448, the largest that
the type has. Nothing is rotated: a float has its precision relative to each value, not to the largest.

```
x            0.10  -2.00   0.05   0.30
scale        2.00 / 448, rounded up to float16
x / scale    22.4   -448   11.2   67.2
stored         22   -448     11     64        sign, 4 bits of exponent (bias 7), 3 of mantissa: 5B FE 53 68
```

Largest error: 1/16 of the value itself, and scale / 1024 for those so small that they are subnormal.
"""

from __future__ import annotations

import torch

from .codec import Codec
from .packing import inverse, scale_up

LARGEST_CODE = 448.0


class Fp8Token(Codec):
    """float8_e4m3fn, one scale per token; parameters `[1, tokens, 1]`."""

    name = "fp8_token"
    kernel_id = 2
    bits = 8

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes are e4m3, as bytes."""
        wide = x.float()
        scale = scale_up(wide.abs().amax(-1, keepdim=True) / LARGEST_CODE)
        scaled = (wide * inverse(scale)).clamp(-LARGEST_CODE, LARGEST_CODE)
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scale.unsqueeze(-3)

    def decode_stored(self, codes: torch.Tensor, params: torch.Tensor, dim: int) -> torch.Tensor:
        """Scale times the number that the byte is."""
        values: torch.Tensor = codes.view(torch.float8_e4m3fn).float() * params[..., 0, :, :].float()
        return values
