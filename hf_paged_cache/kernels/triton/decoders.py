"""Decoders, by which the attention kernel reads K and V: one small function for each codec and side.

The kernel gets its functions and a `variants.Side` for each at compile time, so a format costs no branch and
needs no kernel of its own; a plain pool is a codec whose load is plain.

Codes become floats exactly: in float16 for the scores, in bfloat16 where weights are folded with scales that
float16 may not hold, in float32 where the model is. What codes have to be multiplied with is folded into what
they are multiplied by, where that is smaller than a tile:

```
one scale a token    score[m, n] * scale[n]    weight[m, n] * scale[n]
one zero a token                               sum over n of weight[m, n] * zero[n], added to every channel
one scale a channel  K * scale[d], which is exact but for 2**-12 of it
one zero a channel   sum over d of q[m, d] * zero[d], added to the scores of a block
```
"""

from __future__ import annotations

import triton
import triton.language as tl

WITH_ZEROS = ("int4_token", "int8_block")
"""Codecs of V whose tokens have zeros apart from their values."""


# In which order offsets are added decides on registers: loads of values and of bytes each have their best.
@triton.jit
def _load_plain(codes_ptr, n, stored, SIDE: tl.constexpr):
    """Values of a plain pool `[N, D]`, 0 where nothing may be read."""
    d = tl.arange(0, SIDE.padded)
    offsets = n[:, None] * SIDE.row + d[None, :]
    return tl.load(codes_ptr + offsets, mask=stored[:, None] & (d[None, :] < SIDE.dim), other=0.0)


@triton.jit
def _load_bytes(codes_ptr, n, stored, SIDE: tl.constexpr):
    """Codes of a byte, uint8 `[N, D]`, 0 where nothing may be read."""
    d = tl.arange(0, SIDE.padded)
    return tl.load(
        codes_ptr + n[:, None] * SIDE.row + d[None, :],
        mask=stored[:, None] & (d[None, :] < SIDE.dim),
        other=0,
    )


@triton.jit
def _load_words(codes_ptr, n, stored, ROW: tl.constexpr, D: tl.constexpr):
    """Rows of bytes, uint8 `[N, D]`, 0 where nothing may be read; four at a time where rows are words.

    Sums over tokens want other tokens in a thread than loads do. From bytes Triton would get there byte by
    byte; what has been unpacked goes through shared memory in one piece, as bfloat16.
    """
    if ROW % 4 == 0:
        w = tl.arange(0, D // 4)
        words = tl.load(
            codes_ptr.to(tl.pointer_type(tl.uint32)) + n[:, None] * (ROW // 4) + w[None, :],
            mask=stored[:, None] & (w[None, :] < ROW // 4),
            other=0,
        )
        even = tl.join(words.to(tl.uint8), (words >> 16).to(tl.uint8))  # bytes 0 and 2
        odd = tl.join((words >> 8).to(tl.uint8), (words >> 24).to(tl.uint8))
        codes = tl.reshape(tl.join(even, odd), [n.shape[0], D])
    else:
        d = tl.arange(0, D)
        codes = tl.load(
            codes_ptr + n[:, None] * ROW + d[None, :], mask=stored[:, None] & (d[None, :] < ROW), other=0
        )
    return codes


@triton.jit
def _load_nibbles(codes_ptr, n, stored, SIDE: tl.constexpr):
    """Codes of half a byte, uint8 `[N, D]`, 0 where nothing may be read."""
    D: tl.constexpr = SIDE.padded
    HALF: tl.constexpr = SIDE.row
    d = tl.arange(0, D)
    if SIDE.dim == D:
        packed = _load_words(codes_ptr, n, stored, HALF, HALF)
        pairs = tl.join(packed & 15, packed >> 4)  # [N, HALF, 2]
        codes = tl.reshape(tl.permute(pairs, (0, 2, 1)), [n.shape[0], D])
    else:
        # Halves of such heads are no tiles, so that each byte is loaded once for each of its channels.
        RUN: tl.constexpr = HALF & -HALF
        i = tl.max_contiguous(tl.multiple_of(tl.where(d < HALF, d, d - HALF), RUN), RUN)
        packed = tl.load(
            codes_ptr + n[:, None] * HALF + i[None, :],
            mask=stored[:, None] & (d[None, :] < SIDE.dim),
            other=0,
        )
        codes = tl.where((d < HALF)[None, :], packed & 15, packed >> 4)
    return codes


@triton.jit
def _widened(codes, BIAS: tl.constexpr, DTYPE: tl.constexpr):
    """Codes 0…255 less BIAS, exactly. Or-ing them into a float's last bits is faster than conversions."""
    if DTYPE == tl.float16:  # noqa: SIM300, DTYPE is no constant
        bits = codes.to(tl.uint16) | 0x6400  # 1024 + code
        wide = bits.to(tl.float16, bitcast=True) - (1024.0 + BIAS)
    else:
        bits = codes.to(tl.uint32) | 0x4B000000  # 2**23 + code
        wide = (bits.to(tl.float32, bitcast=True) - (8388608.0 + BIAS)).to(DTYPE)
    return wide


@triton.jit
def _signed(codes, DTYPE: tl.constexpr):
    """Bytes that are int8."""
    return _widened(codes ^ 0x80, 128.0, DTYPE)


FP8_UNIT: tl.constexpr = tl.constexpr(256.0)


@triton.jit
def _fp8(codes, DTYPE: tl.constexpr):
    """Bytes that are e4m3, over `FP8_UNIT`: so its bits are those of a float16, subnormals included."""
    wide = codes.to(tl.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True).to(DTYPE)


@triton.jit
def _param(params_ptr, n, stored):
    """One float16 for each token, as float32 `[N]`."""
    return tl.load(params_ptr + n, mask=stored, other=0.0).to(tl.float32)


@triton.jit
def _load_groups(codes_ptr, params_ptr, slot, n, stored, SIDE: tl.constexpr):
    """Values of `int4_group`, float32 `[N, D]`."""
    codes = _widened(_load_nibbles(codes_ptr, n, stored, SIDE), 0.0, tl.float32)
    N: tl.constexpr = codes.shape[0]
    D: tl.constexpr = codes.shape[1]
    GROUP_SIZE: tl.constexpr = SIDE.group_size
    GROUPS: tl.constexpr = SIDE.dim // GROUP_SIZE
    zeros_ptr = params_ptr + SIDE.block_size * GROUPS
    if (GROUP_SIZE & (GROUP_SIZE - 1)) == 0 and GROUP_SIZE <= D:
        G: tl.constexpr = D // GROUP_SIZE
        g = tl.arange(0, G)
        offsets = (slot + n)[:, None] * GROUPS + g[None, :]
        exists = stored[:, None] & (g[None, :] < GROUPS)
        scale = tl.load(params_ptr + offsets, mask=exists, other=0.0).to(tl.float32)
        zero = tl.load(zeros_ptr + offsets, mask=exists, other=0.0).to(tl.float32)
        groups = tl.reshape(codes, [N, G, GROUP_SIZE])
        values = tl.reshape(groups * scale[:, :, None] + zero[:, :, None], [N, D])
    else:
        d = tl.arange(0, D)
        offsets = (slot + n)[:, None] * GROUPS + (d // GROUP_SIZE)[None, :]
        exists = stored[:, None] & (d[None, :] < SIDE.dim)
        scale = tl.load(params_ptr + offsets, mask=exists, other=0.0).to(tl.float32)
        zero = tl.load(zeros_ptr + offsets, mask=exists, other=0.0).to(tl.float32)
        values = codes * scale + zero
    return values


# Scores. Arguments of all `score_*`:
#   query: `[M, D]` in the dtype of keys, rotated where they are; else it is what the model gave, exactly.
#   codes_ptr, params_ptr: where the codes of the tile and the parameters of the block begin.
#   slot: of the tile's first token in its block. n: `[N]`, tokens from there. stored: `[N]`.
# They return q·k, float32 `[M, N]`, arbitrary where nothing is stored.


@triton.jit
def _product(query, keys, K: tl.constexpr):
    """`query @ keys.T`, in float32 where the interpreter cannot multiply bfloat16, and cuts."""
    if K.widen:
        query, keys = query.to(tl.float32), keys.to(tl.float32)
    score = tl.zeros([query.shape[0], keys.shape[0]], tl.float32)
    return tl.dot(query, tl.trans(keys), score, input_precision=K.precision)


@triton.jit
def score_plain(query, codes_ptr, params_ptr, slot, n, stored, K: tl.constexpr):
    """The model's dtype."""
    return _product(query, _load_plain(codes_ptr, n, stored, K), K)


@triton.jit
def score_int8_token(query, codes_ptr, params_ptr, slot, n, stored, K: tl.constexpr):
    """Rotated int8, a scale a token."""
    score = _product(query, _signed(_load_bytes(codes_ptr, n, stored, K), K.dtype), K)
    return score * _param(params_ptr + slot, n, stored)[None, :]


@triton.jit
def score_fp8_token(query, codes_ptr, params_ptr, slot, n, stored, K: tl.constexpr):
    """e4m3, a scale a token."""
    score = _product(query, _fp8(_load_bytes(codes_ptr, n, stored, K), K.dtype), K)
    return score * (_param(params_ptr + slot, n, stored) * FP8_UNIT)[None, :]


@triton.jit
def score_int8_block(query, codes_ptr, params_ptr, slot, n, stored, K: tl.constexpr):
    """Bytes, a scale and a zero a block."""
    score = _product(query, _widened(_load_bytes(codes_ptr, n, stored, K), 0.0, K.dtype), K)
    scale, zero = tl.load(params_ptr).to(tl.float32), tl.load(params_ptr + 1).to(tl.float32)
    return score * scale + (tl.sum(query.to(tl.float32), 1) * zero)[:, None]


@triton.jit
def score_int4_channel(query, codes_ptr, params_ptr, slot, n, stored, K: tl.constexpr):
    """Nibbles, a scale and a zero a channel of a block."""
    d = tl.arange(0, K.padded)
    scale = tl.load(params_ptr + d, mask=d < K.dim, other=0.0)
    zero = tl.load(params_ptr + K.dim + d, mask=d < K.dim, other=0.0).to(tl.float32)
    # Half a scale, because 15 of the largest would leave float16.
    codes = _widened(_load_nibbles(codes_ptr, n, stored, K), 0.0, K.dtype)
    score = _product(query, codes * (scale.to(K.dtype) * 0.5)[None, :], K)
    return score * 2.0 + tl.sum(query.to(tl.float32) * zero[None, :], 1)[:, None]


@triton.jit
def score_int4_group(query, codes_ptr, params_ptr, slot, n, stored, K: tl.constexpr):
    """Nibbles, a scale and a zero a group of a token."""
    keys = _load_groups(codes_ptr, params_ptr, slot, n, stored, K)
    return _product(query, (keys * 0.5).to(K.dtype), K) * 2.0


# Values. Arguments of all `values_*`, besides those of `score_*`:
#   visible: `[N]`, whether any query of the tile sees a token; the same as `stored` if not V.has_hidden.
# They return what weights are summed with, `[N, E]`, and what weights are multiplied by before that, and what
# is added times the weight to all channels, both `[N]`: the scales and zeros of tokens, 0 where not visible.


@triton.jit
def values_plain(visible, codes_ptr, params_ptr, slot, n, stored, V: tl.constexpr):
    """The model's dtype."""
    values = _load_plain(codes_ptr, n, stored, V)
    if V.has_hidden:
        # A weight of 0 does not silence a NaN.
        values = tl.where(visible[:, None], values, 0.0)
    return values, tl.full([n.shape[0]], 1.0, tl.float32), 0.0


@triton.jit
def values_int8_token(visible, codes_ptr, params_ptr, slot, n, stored, V: tl.constexpr):
    """Rotated int8, a scale a token."""
    values = _signed(_load_words(codes_ptr, n, stored, V.row, V.padded), V.dtype)
    return values, tl.where(visible, _param(params_ptr + slot, n, stored), 0.0), 0.0


@triton.jit
def values_fp8_token(visible, codes_ptr, params_ptr, slot, n, stored, V: tl.constexpr):
    """e4m3, a scale a token."""
    values = _fp8(_load_words(codes_ptr, n, stored, V.row, V.padded), V.dtype)
    return values, tl.where(visible, _param(params_ptr + slot, n, stored) * FP8_UNIT, 0.0), 0.0


@triton.jit
def values_int4_token(visible, codes_ptr, params_ptr, slot, n, stored, V: tl.constexpr):
    """Rotated nibbles, a scale and a zero a token."""
    values = _widened(_load_nibbles(codes_ptr, n, stored, V), 0.0, V.dtype)
    scale = tl.where(visible, _param(params_ptr + slot, n, stored), 0.0)
    return values, scale, tl.where(visible, _param(params_ptr + V.block_size + slot, n, stored), 0.0)


@triton.jit
def values_int8_block(visible, codes_ptr, params_ptr, slot, n, stored, V: tl.constexpr):
    """Bytes, a scale and a zero a block."""
    values = _widened(_load_words(codes_ptr, n, stored, V.row, V.padded), 0.0, V.dtype)
    scale = tl.where(visible, tl.load(params_ptr).to(tl.float32), 0.0)
    return values, scale, tl.where(visible, tl.load(params_ptr + 1).to(tl.float32), 0.0)


@triton.jit
def values_int4_group(visible, codes_ptr, params_ptr, slot, n, stored, V: tl.constexpr):
    """Nibbles, a scale and a zero a group of a token."""
    values = _load_groups(codes_ptr, params_ptr, slot, n, stored, V)
    values = tl.where(visible[:, None], values * 0.5, 0.0).to(V.dtype)
    return values, tl.full([n.shape[0]], 2.0, tl.float32), 0.0
