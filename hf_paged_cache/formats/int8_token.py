"""8 bits, one scale per token: the default of 8-bit formats.

The vector of one token and head is rotated, and divided by a scale that makes its largest magnitude 127:

```
x            0.10  -2.00   0.05   0.30        (after the rotation)
scale        2.00 / 127, rounded up to float16
codes           6   -127      3     19        int8, as bytes 06 81 03 13
```

Largest error: half a scale in each rotated channel, which is at most sqrt(n) halves in a channel of x.
"""

from __future__ import annotations

import torch

from .codec import Codec
from .packing import inverse, scale_up
from .rotation import rotate


class Int8Token(Codec):
    """Rotated, symmetric, one scale per token; parameters `[1, tokens, 1]`."""

    name = "int8_token"
    kernel_id = 1
    bits = 8
    is_rotated = True

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes are int8, as bytes."""
        rotated = rotate(x.float())
        scale = scale_up(rotated.abs().amax(-1, keepdim=True) / 127)
        codes = (rotated * inverse(scale)).round().clamp(-127, 127).to(torch.int8)
        return codes.view(torch.uint8), scale.unsqueeze(-3)

    def decode_stored(self, codes: torch.Tensor, params: torch.Tensor, dim: int) -> torch.Tensor:
        """Scale times code."""
        values: torch.Tensor = codes.view(torch.int8).float() * params[..., 0, :, :].float()
        return values
