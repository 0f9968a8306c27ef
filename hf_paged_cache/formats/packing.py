"""Packing of 4-bit codes into bytes, and rounding of scales.

A row of `dim` codes takes `half = ceil(dim / 2)` bytes. Byte i has code i in its low bits and code `half + i`
in its high bits, so that both halves of a row are runs of channels (a kernel splits q in two runs as well):

```
dim 6:  byte   0      1      2            dim 5:  byte   0      1      2
        bits  3|0    4|1    5|2                   bits  3|0    4|1    -|2        high|low, - is 0
```

Scales and zeros are float16. A scale is rounded up and a zero down, so that no value falls outside of the
range that they span.
"""

from __future__ import annotations

import torch


def nibble_bytes(dim: int) -> int:
    """Bytes of a row of 4-bit codes."""
    return (dim + 1) // 2


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0…15 `[..., dim]`, integers of any kind, as bytes `[..., ceil(dim / 2)]`."""
    half = nibble_bytes(codes.shape[-1])
    low = codes[..., :half].to(torch.uint8)
    high = torch.nn.functional.pad(codes[..., half:].to(torch.uint8), (0, codes.shape[-1] % 2))
    return low | high << 4


def unpack_nibbles(packed: torch.Tensor, dim: int) -> torch.Tensor:
    """The inverse of `pack_nibbles`: uint8 `[..., dim]`."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)[..., :dim]


def scale_up(x: torch.Tensor) -> torch.Tensor:
    """The smallest float16 that is not below x, for x >= 0."""
    near = x.to(torch.float16)
    bits = near.view(torch.int16)
    return torch.where(near.to(x.dtype) < x, bits + 1, bits).view(torch.float16)


def zero_down(x: torch.Tensor) -> torch.Tensor:
    """The largest float16 that is not above x."""
    near = x.to(torch.float16)
    bits = near.view(torch.int16)
    below = torch.where(near > 0, bits - 1, torch.where(near == 0, torch.full_like(bits, -0x7FFF), bits + 1))
    return torch.where(near.to(x.dtype) > x, below, bits).view(torch.float16)


def quantized(
    x: torch.Tensor, low: torch.Tensor, high: torch.Tensor, steps: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Float codes `(x - zero) / scale`, 0…steps, and the float16 scale and zero of ranges `low … high`."""
    zero = zero_down(low)
    scale = scale_up((high - zero.float()) / steps)
    return ((x - zero.float()) * inverse(scale)).round().clamp(0, steps), scale, zero


def inverse(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale in float32, 0 where the scale is 0."""
    wide = scale.float()
    return torch.where(wide > 0, 1.0 / wide, torch.zeros_like(wide))
