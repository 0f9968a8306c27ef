"""The rotation of `formats.rotation` (a Hadamard transform) on tiles in registers.

Each step takes pairs of neighbours apart and puts their sums before their differences. So channels change
places: the lowest bit of their number becomes the highest. After a step for each bit all are back.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _signs(D: tl.constexpr):
    """1 or -1 for each channel, as `formats.rotation.signs` has them."""
    channel = tl.arange(0, D)
    pairs = channel & (channel >> 1) & 0x5555  # b0 b1, b2 b3, ...; their parity is the sign
    pairs = pairs ^ (pairs >> 8)
    pairs = pairs ^ (pairs >> 4)
    pairs = pairs ^ (pairs >> 2)
    return 1.0 - 2.0 * (pairs & 1).to(tl.float32)


@triton.jit
def _transform(x, STEPS: tl.constexpr):
    R: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    PARTS: tl.constexpr = R * D >> STEPS
    for _ in tl.static_range(STEPS):
        a, b = tl.split(tl.reshape(x, [PARTS, 1 << (STEPS - 1), 2]))
        x = tl.permute(tl.join(a + b, a - b), (0, 2, 1))
    return tl.reshape(x, [R, D]) * (2.0 ** (-0.5 * STEPS))


@triton.jit
def rotate(x, STEPS: tl.constexpr):
    """Rotate float32 `[rows, D]`, in parts of `2 ** STEPS` channels."""
    return _transform(x * _signs(x.shape[1])[None, :], STEPS)


@triton.jit
def unrotate(x, STEPS: tl.constexpr):
    """The inverse of `rotate`."""
    return _transform(x, STEPS) * _signs(x.shape[1])[None, :]
