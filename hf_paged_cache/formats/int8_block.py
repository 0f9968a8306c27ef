"""8 bits, one scale and zero for a whole block and head: what textbooks show, here to be compared with.

```
block        [[0.0, 1.0], [2.0, 10.2]]     zero 0.0, scale 10.2 / 255 = 0.04 (rounded up to float16)
codes        [[  0,  25], [ 50,  255]]
```

One large value costs all others their precision. Largest error: half a scale.
"""

from __future__ import annotations

import torch

from .codec import Codec
from .packing import quantized


class Int8Block(Codec):
    """Asymmetric, one scale and zero per block; parameters `[2]`, the scale first."""

    name = "int8_block"
    kernel_id = 5
    bits = 8
    is_per_token = False

    def param_shape(self, tokens: int, dim: int) -> tuple[int, ...]:
        """A scale and a zero."""
        return (2,)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes are `(x - zero) / scale`, 0…255."""
        wide = x.float()
        low, high = wide.amin((-2, -1), keepdim=True), wide.amax((-2, -1), keepdim=True)
        codes, scale, zero = quantized(wide, low, high, 255)
        return codes.to(torch.uint8), torch.cat((scale, zero), dim=-1)[..., 0, :]

    def decode_stored(self, codes: torch.Tensor, params: torch.Tensor, dim: int) -> torch.Tensor:
        """Zero plus scale times code."""
        return codes.float() * params[..., 0, None, None].float() + params[..., 1, None, None].float()
