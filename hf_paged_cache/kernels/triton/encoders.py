"""Encoders, which make codes and parameters of values: one small function for each codec.

Steps are those of `formats`, in the same order. Arguments of all `store_*`:
  x: float32 `[R, D]`, rows that are tokens, zero beyond the head dim.
  keep: `[R]`, rows to store.
  codes_ptr, params_ptr: where codes and parameters of the record begin; `[R]` where rows lie in several.
  slot: of the row in its block; `[R]` where rows differ.
  scale, zero: of the block, from the `block_params_*` of codecs that have one; others ignore them.
  SIDE: a `variants.Side`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rotate import rotate

LARGEST_VALUE: tl.constexpr = tl.constexpr(65504.0)
"""As in `formats`."""


@triton.jit
def storable(x):
    """The rows of `x`, zero where one has no scale, and which rows those are `[R]`."""
    bad = tl.max((tl.abs(x) <= LARGEST_VALUE).to(tl.int32) ^ 1, 1) > 0  # not `>`: a NaN is bad too
    return tl.where(bad[:, None], 0.0, x), bad


@triton.jit
def _scale_up(x):
    """The smallest float16 that is not below x."""
    near = x.to(tl.float16)
    bits = near.to(tl.int16, bitcast=True)
    return tl.where(near.to(tl.float32) < x, bits + 1, bits).to(tl.float16, bitcast=True)


@triton.jit
def _zero_down(x):
    """The largest float16 that is not above x."""
    near = x.to(tl.float16)
    bits = near.to(tl.int16, bitcast=True)
    below = tl.where(near > 0.0, bits - 1, tl.where(near == 0.0, -0x7FFF, bits + 1)).to(tl.int16)
    return tl.where(near.to(tl.float32) > x, below, bits).to(tl.float16, bitcast=True)


@triton.jit
def _inverse(scale):
    wide = scale.to(tl.float32)
    return tl.where(wide > 0.0, tl.div_rn(1.0, tl.where(wide > 0.0, wide, 1.0)), 0.0)


@triton.jit
def _scale_and_zero(smallest, largest, STEPS: tl.constexpr):
    """Float16 scale and zero that span a range in so many steps, cut to what float16 holds.

    Only what is rotated can reach beyond: values are storable, sums of many of the largest are not.
    """
    smallest, largest = tl.maximum(smallest, -LARGEST_VALUE), tl.minimum(largest, LARGEST_VALUE)
    zero = _zero_down(smallest)
    return _scale_up(tl.div_rn(largest - zero.to(tl.float32), STEPS)), zero


@triton.jit
def _rounded(x):
    """The nearest integers, to even where two are as near; of magnitudes below 2**22."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000  # 1.5 * 2**23


@triton.jit
def _codes(x, scale, zero, MOST: tl.constexpr):
    scaled = (x - zero.to(tl.float32)) * _inverse(scale)
    return _rounded(tl.minimum(tl.maximum(scaled, 0.0), MOST))


@triton.jit
def _store_bytes(codes_ptr, slot, codes, keep, DIM: tl.constexpr):
    d = tl.arange(0, codes.shape[1])
    rows = codes_ptr + slot * DIM + tl.zeros([codes.shape[0]], tl.int32)
    tl.store(rows[:, None] + d[None, :], (codes & 0xFF).to(tl.uint8), mask=keep[:, None] & (d[None, :] < DIM))


@triton.jit
def _store_nibbles(codes_ptr, slot, codes, keep, DIM: tl.constexpr):
    R: tl.constexpr = codes.shape[0]
    D: tl.constexpr = codes.shape[1]
    HALF: tl.constexpr = (DIM + 1) // 2
    i = tl.arange(0, D // 2)
    if DIM == D:
        low, high = tl.split(tl.permute(tl.reshape(codes, [R, 2, D // 2]), (0, 2, 1)))
    else:
        low = tl.gather(codes, tl.broadcast_to(i[None, :], [R, D // 2]), 1)
        high = tl.gather(codes, tl.broadcast_to(tl.minimum(HALF + i, D - 1)[None, :], [R, D // 2]), 1)
        high = tl.where((HALF + i < DIM)[None, :], high, 0)
    rows = codes_ptr + slot * HALF + tl.zeros([R], tl.int32)
    tl.store(
        rows[:, None] + i[None, :], (low | (high << 4)).to(tl.uint8), mask=keep[:, None] & (i[None, :] < HALF)
    )


@triton.jit
def _store_params(params_ptr, slot, params, keep):
    tl.store(params_ptr + slot + tl.zeros([keep.shape[0]], tl.int32), params, mask=keep)


@triton.jit
def store_int8_token(x, keep, codes_ptr, params_ptr, slot, scale, zero, SIDE: tl.constexpr):
    """Rotated int8, a scale a token."""
    if SIDE.steps > 0:
        x = rotate(x, SIDE.steps)
    scale = _scale_up(tl.div_rn(tl.max(tl.abs(x), 1), 127.0))
    scaled = x * _inverse(scale)[:, None]
    codes = _rounded(tl.minimum(tl.maximum(scaled, -127.0), 127.0))
    _store_bytes(codes_ptr, slot, codes, keep, SIDE.dim)
    _store_params(params_ptr, slot, scale, keep)


@triton.jit
def store_fp8_token(x, keep, codes_ptr, params_ptr, slot, scale, zero, SIDE: tl.constexpr):
    """e4m3, a scale a token."""
    scale = _scale_up(tl.div_rn(tl.max(tl.abs(x), 1), 448.0))
    scaled = x * _inverse(scale)[:, None]
    size = tl.minimum(tl.abs(scaled), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)  # bias 127 becomes 7
    codes = tl.where(size < 0.015625, _rounded(size * 512.0), normal)  # below 2**-6 steps of 2**-9
    codes = codes | tl.where(scaled.to(tl.int32, bitcast=True) < 0, 0x80, 0)
    _store_bytes(codes_ptr, slot, codes, keep, SIDE.dim)
    _store_params(params_ptr, slot, scale, keep)


@triton.jit
def store_int4_token(x, keep, codes_ptr, params_ptr, slot, scale, zero, SIDE: tl.constexpr):
    """Rotated nibbles, a scale and a zero a token."""
    if SIDE.steps > 0:
        x = rotate(x, SIDE.steps)
    real = (tl.arange(0, x.shape[1]) < SIDE.dim)[None, :]
    smallest = tl.min(tl.where(real, x, float("inf")), 1)
    largest = tl.max(tl.where(real, x, -float("inf")), 1)
    scale, zero = _scale_and_zero(smallest, largest, 15.0)
    _store_nibbles(codes_ptr, slot, _codes(x, scale[:, None], zero[:, None], 15.0), keep, SIDE.dim)
    _store_params(params_ptr, slot, scale, keep)
    _store_params(params_ptr + SIDE.block_size, slot, zero, keep)


@triton.jit
def store_int4_group(x, keep, codes_ptr, params_ptr, slot, scale, zero, SIDE: tl.constexpr):
    """Nibbles, a scale and a zero a group of a token."""
    R: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    GROUP_SIZE: tl.constexpr = SIDE.group_size
    GROUPS: tl.constexpr = SIDE.dim // GROUP_SIZE
    ZEROS: tl.constexpr = SIDE.block_size * GROUPS
    rows = params_ptr + slot * GROUPS + tl.zeros([R], tl.int32)
    if (GROUP_SIZE & (GROUP_SIZE - 1)) == 0 and GROUP_SIZE <= D:
        G: tl.constexpr = D // GROUP_SIZE
        g = tl.arange(0, G)
        groups = tl.reshape(x, [R, G, GROUP_SIZE])
        scale, zero = _scale_and_zero(tl.min(groups, 2), tl.max(groups, 2), 15.0)
        codes = tl.reshape(_codes(groups, scale[:, :, None], zero[:, :, None], 15.0), [R, D])
        exists = keep[:, None] & (g[None, :] < GROUPS)
        tl.store(rows[:, None] + g[None, :], scale, mask=exists)
        tl.store(rows[:, None] + (ZEROS + g)[None, :], zero, mask=exists)
    else:
        d = tl.arange(0, D)
        codes = tl.zeros([R, D], tl.int32)
        for group in range(GROUPS):
            member = (d // GROUP_SIZE == group)[None, :]
            smallest = tl.min(tl.where(member, x, float("inf")), 1)
            largest = tl.max(tl.where(member, x, -float("inf")), 1)
            scale_g, zero_g = _scale_and_zero(smallest, largest, 15.0)
            codes = tl.where(member, _codes(x, scale_g[:, None], zero_g[:, None], 15.0), codes)
            tl.store(rows + group, scale_g, mask=keep)
            tl.store(rows + ZEROS + group, zero_g, mask=keep)
    _store_nibbles(codes_ptr, slot, codes, keep, SIDE.dim)


@triton.jit
def store_int4_channel(x, keep, codes_ptr, params_ptr, slot, scale, zero, SIDE: tl.constexpr):
    """Nibbles, a scale and a zero a channel of a block."""
    _store_nibbles(codes_ptr, slot, _codes(x, scale, zero, 15.0), keep, SIDE.dim)


@triton.jit
def store_int8_block(x, keep, codes_ptr, params_ptr, slot, scale, zero, SIDE: tl.constexpr):
    """Bytes, a scale and a zero a block."""
    _store_bytes(codes_ptr, slot, _codes(x, scale, zero, 255.0), keep, SIDE.dim)


# Parameters of whole blocks: from the smallest and the largest values `[R, D]` among every R-th token,
# infinite beyond the head dim. They store scale and zero and return them `[1, D]` or `[1, 1]`.


@triton.jit
def block_params_int4_channel(smallest, largest, params_ptr, DIM: tl.constexpr):
    """A scale and a zero a channel."""
    d = tl.arange(0, smallest.shape[1])[None, :]
    smallest, largest = tl.min(smallest, 0, keep_dims=True), tl.max(largest, 0, keep_dims=True)
    scale, zero = _scale_and_zero(tl.where(d < DIM, smallest, 0.0), tl.where(d < DIM, largest, 0.0), 15.0)
    tl.store(params_ptr + d, scale, mask=d < DIM)
    tl.store(params_ptr + DIM + d, zero, mask=d < DIM)
    return scale, zero


@triton.jit
def block_params_int8_block(smallest, largest, params_ptr, DIM: tl.constexpr):
    """A scale and a zero."""
    smallest = tl.min(tl.min(smallest, 0, keep_dims=True), 1, keep_dims=True)
    largest = tl.max(tl.max(largest, 0, keep_dims=True), 1, keep_dims=True)
    scale, zero = _scale_and_zero(smallest, largest, 255.0)
    tl.store(params_ptr + tl.zeros([1, 1], tl.int32), scale)
    tl.store(params_ptr + 1 + tl.zeros([1, 1], tl.int32), zero)
    return scale, zero
