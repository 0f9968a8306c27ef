"""The rotation that spreads what sticks out in a few channels over all of them.

A vector x of K or V is stored as `H (signs * x) / sqrt(n)`, H being the Hadamard matrix of the n channels of
a part. This is orthogonal, so that q·k does not change when both are rotated, and a weighted sum of rotated V
needs to be rotated back only once. (QuaRot, Ashkboos et al. 2024; the transform is the fast Walsh-Hadamard
one.)

Fixed signs keep a constant vector from falling into one channel. The sign of channel i, with bits b0, b1,
..., is the parity of b0 b1 + b2 b3 + ...: no function is farther from all rows of a Hadamard matrix (it is
bent, Rothaus 1976), so a constant is spread evenly over the channels.

Channels are rotated in parts of n, the largest power of two that divides the head dim:

```
head_dim  64 80 96 97 128 192 256
n         64 16 32  1 128  64 256      (1: nothing is rotated)
```

All kernels take the same steps in the same order (n = 8, lines are sums and differences of two):

```
signs * x  ->  pairs (0,1)(2,3)(4,5)(6,7)  ->  (0,2)(1,3)(4,6)(5,7)  ->  (0,4)(1,5)(2,6)(3,7)  ->  / sqrt(n)
```
"""

from __future__ import annotations

from functools import lru_cache

import torch


def part_size(dim: int) -> int:
    """The n of a head dim: the largest power of two that divides it."""
    return dim & -dim


@lru_cache(maxsize=64)
def signs(dim: int) -> tuple[int, ...]:
    """1 or -1 for each channel; all 1 where nothing is rotated."""
    if part_size(dim) == 1:
        return (1,) * dim
    return tuple(-1 if (i & i >> 1 & 0x5555).bit_count() & 1 else 1 for i in range(dim))


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotate vectors `[..., dim]`; the result is float32 (float64 for float64)."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return _transform(x * _signs_like(x))


def unrotate(x: torch.Tensor) -> torch.Tensor:
    """The inverse of `rotate`."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return _transform(x) * _signs_like(x)


def _transform(x: torch.Tensor) -> torch.Tensor:
    dim = x.shape[-1]
    n = part_size(dim)
    step = 1
    while step < n:
        pairs = torch.unflatten(x, -1, (dim // (2 * step), 2, step))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        step *= 2
    return x.mul(n**-0.5)


def _signs_like(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(signs(x.shape[-1]), dtype=x.dtype, device=x.device)
