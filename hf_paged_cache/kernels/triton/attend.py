"""Attention over stored blocks, plain or quantized, and over dense K and V read as blocks of one row each.

Work is split over programs: each has one row, one kv head, one tile of queries, one split of the tokens.

```
                        tokens of a row, as far as they are in sight
                        |  N  |  N  |  N  |  N  |  N  |  N  |    a tile of tokens lies in one block
queries of the      M   | program 0 | program 1 | program 2 |
head's group        M   | program 3 | program 4 | program 5 |    three splits
                              |           |           |
                              sums of values, maxima, sums of weights -> merge_kernel, a program each query
```

A tile holds the queries of the whole head group, so that K and V are read once for all of them (as in
grouped-query decoding kernels since Flash-Decoding, Dao et al. 2023); the softmax is taken online (Milakov &
Gimelshein 2018). Without splits a program has the whole answer, and nothing is merged.

How K and V are stored is known to `SCORE` and `VALUES`, functions out of `decoders`. Over records, scores and
sums are taken of codes, with scales folded in. Where K are rotated the queries are too, once; where V are
rotated the sum is rotated back, once, at the end, or by the merge if there is one. The residual blocks of a
quantized layer, which lie in the model's dtype, have a launch of their own (COLUMNS), whose sums the merge
adds up too.

Letters: `b` row, `h` kv head; in a tile `m` query (`[M]`), `n` token (`[N]`), `d` dim of K (`[D]`), `e` of V
(`[E]`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rotate import rotate, unrotate

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)

NO_MASK: tl.constexpr = tl.constexpr(0)
BOOL_MASK: tl.constexpr = tl.constexpr(1)
ADDITIVE_MASK: tl.constexpr = tl.constexpr(2)

# Numbers that change from step to step, and pointers whose alignment does: compiling for the values they
# happen to have would compile again and again.
_PER_STEP_ARGUMENTS = (
    *("table_stride_b", "columns", "columns_stride_b", "columns_used"),
    *("mask_stride_b", "mask_stride_h", "mask_stride_q"),
    *("q_tokens", "splits", "part_rows", "start", "back", "query_shift"),
)


@triton.jit
def _part_pointers(part_ptr, splits, rows, V_HEAD_DIM: tl.constexpr):
    """Where the maxima of the scores, and where the sums of the weights begin in what splits leave.

    That is one piece of memory: sums of values, not yet divided, `[splits, rows, v_head_dim]`; maxima
    `[splits, rows]`; sums of weights `[splits, rows]`. A row is a query of a head of the batch.
    """
    maxima = part_ptr + tl.cast(splits, tl.int64) * rows * V_HEAD_DIM
    return maxima, maxima + tl.cast(splits, tl.int64) * rows


@triton.jit
def _units(x):
    """For each row the power of two that brings its largest magnitude between 1 and 2."""
    bits = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) & 0x7F800000
    return tl.where(bits == 0, 1.0, bits.to(tl.float32, bitcast=True))


@triton.jit
def _soft_capped(score, softcap):
    """`softcap * tanh(score / softcap)`, accurate for small scores too, where 1 - exp(-2x) would cancel."""
    x = score / softcap
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - e) / (1.0 + e)
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return softcap * tl.where(tl.abs(x) < 0.1, near, tl.where(x < 0.0, -far, far))


@triton.jit
def _online_update(score, row_max, row_sum):
    """A step of the online softmax: weights, the new maxima and sums, and the factor of what came before."""
    new_max = tl.maximum(row_max, tl.max(score, 1))
    base = tl.where(new_max == -float("inf"), 0.0, new_max)
    weight = tl.exp2((score - base[:, None]) * LOG2E)
    shrink = tl.exp2((row_max - base) * LOG2E)
    row_sum = row_sum * shrink + tl.sum(weight, 1)
    return weight, new_max, row_sum, shrink


@triton.jit
def _weighted_sum(acc, weight, values, V: tl.constexpr):
    """`acc + weight @ values`, weights as a sum of so many terms of the values' dtype."""
    if V.widen:
        acc = tl.dot(weight, values.to(tl.float32), acc, input_precision=V.precision)
    else:
        TERMS: tl.constexpr = V.terms
        for _ in tl.static_range(TERMS):
            term = weight.to(values.dtype)
            acc = tl.dot(term, values, acc, input_precision=V.precision)
            weight = weight - term.to(tl.float32)
    return acc


@triton.jit(do_not_specialize=_PER_STEP_ARGUMENTS, do_not_specialize_on_alignment=("mask_ptr",))
def attend_kernel(
    out_ptr,  # [batch, q_tokens, q_heads, v_head_dim], written if not SPLIT
    lse_ptr,  # float32 [batch, q_heads, q_tokens], the same
    part_ptr,  # float32, written if SPLIT: see `_part_pointers`
    query_ptr,
    keys_ptr,  # a plain pool, or uint8 records [num_blocks, kv_heads, nbytes]
    values_ptr,  # the same; the records once more
    table_ptr,  # int32 [batch, columns]
    lengths_ptr,  # int32 [batch], columns of each row, those before it begins included
    offsets_ptr,  # int32 [batch], columns before each row begins, if PADDED
    mask_ptr,
    sinks_ptr,
    columns_ptr,  # int32 [batch, columns_used], the table's columns to attend, -1 past the last, if COLUMNS
    q_strides,  # of row, head and token
    k_strides,  # of block and head
    v_strides,
    table_stride_b,
    columns,
    columns_stride_b,
    columns_used,
    mask_stride_b,
    mask_stride_h,
    mask_stride_q,
    mask_stride_t,
    q_tokens,
    splits,
    part_rows,  # batch * q_heads * q_tokens
    start,  # first column attended; column 0 of the mask
    back,  # tokens at the end of each row that are not attended
    query_shift,  # query i stands at position end + query_shift + i
    window,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,  # a `variants.Side`
    V: tl.constexpr,
    RULES: tl.constexpr,  # `variants.Rules`
    M: tl.constexpr,
    N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    COLUMNS: tl.constexpr,  # whether only some columns are attended, of residual blocks of a quantized layer
    PADDED: tl.constexpr,
    SPLIT: tl.constexpr,
    SCORE: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Attend tokens `[start, length - back)` of every row.

    Grid: batch * kv_heads * query tiles * splits, in this order, in one dimension, because the others end at
    65535. Tokens beyond the range, of null blocks, or hidden from the whole tile are never part of a sum,
    whatever lies there.
    """
    tiles = tl.cdiv(q_tokens * GROUP, M)
    split = tl.program_id(0) % splits
    first_m = tl.program_id(0) // splits % tiles * M
    b = tl.program_id(0) // (splits * tiles * KV_HEADS)
    h = tl.program_id(0) // (splits * tiles) % KV_HEADS
    Q_HEADS: tl.constexpr = KV_HEADS * GROUP
    BLOCK_SIZE: tl.constexpr = K.block_size
    D: tl.constexpr = K.padded
    E: tl.constexpr = V.padded
    HIDDEN: tl.constexpr = 0 if RULES.mask == BOOL_MASK else -float("inf")

    end = tl.load(lengths_ptr + b) - back
    mask_start = start  # where column 0 of the mask would be stored, below 0 where the row begins later
    if PADDED:
        offset = tl.load(offsets_ptr + b)
        end -= offset
        mask_start -= offset
        start = tl.maximum(mask_start, 0)
    m = first_m + tl.arange(0, M)
    query_index = m // GROUP
    q_head = h * GROUP + m % GROUP
    is_query = query_index < q_tokens
    position = end + query_shift + query_index  # [M]

    first_query = end + query_shift + first_m // GROUP
    last_query = end + query_shift + tl.minimum((first_m + M - 1) // GROUP, q_tokens - 1)
    low, high = start, end  # what any query may see
    if RULES.window:
        low = tl.maximum(low, first_query - window + 1)
    if RULES.causal:
        high = tl.minimum(high, last_query + 1)
    if COLUMNS:
        first_tile, end_tile = 0, columns_used * (BLOCK_SIZE // N)
    else:
        first_tile = low // N
        end_tile = tl.maximum(tl.cdiv(high, N), first_tile)
    if SPLIT:
        per_split = tl.maximum(tl.cdiv(end_tile - first_tile, splits), MIN_TILES)
        first_tile = first_tile + split * per_split
        end_tile = tl.minimum(end_tile, first_tile + per_split)

    d = tl.arange(0, D)
    n = tl.arange(0, N)
    query_offsets = (
        b.to(tl.int64) * q_strides[0]
        + q_head.to(tl.int64) * q_strides[1]
        + query_index.to(tl.int64) * q_strides[2]
    )
    query = tl.load(
        query_ptr + query_offsets[:, None] + d[None, :],
        mask=is_query[:, None] & (d[None, :] < K.dim),
        other=0.0,
    )  # [M, D]
    row_scale = tl.full([M], 1.0, tl.float32) * scale
    if K.steps > 0:
        query = rotate(query.to(tl.float32), K.steps)
    if K.has_units:
        query = query.to(tl.float32)
        unit = _units(query)
        query = (query / unit[:, None]).to(K.dtype)
        row_scale = unit * scale
    if V.codes > 0:  # K and V lie in one record
        values_ptr, v_strides = keys_ptr, k_strides
    keys_ptr += h.to(tl.int64) * k_strides[1]
    values_ptr += h.to(tl.int64) * v_strides[1]
    table_ptr += b.to(tl.int64) * table_stride_b
    columns_ptr += b * columns_stride_b
    mask_ptr += b.to(tl.int64) * mask_stride_b
    mask_offsets = q_head.to(tl.int64) * mask_stride_h + query_index.to(tl.int64) * mask_stride_q  # [M]

    row_max = tl.full([M], -float("inf"), tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, E], tl.float32)
    acc_zero = tl.zeros([M, N], tl.float32)
    for tile in range(first_tile, end_tile):
        first_token = tile * N
        if COLUMNS:
            used = tl.load(columns_ptr + first_token // BLOCK_SIZE)
            first_token = used * BLOCK_SIZE + first_token % BLOCK_SIZE
        token = first_token + n  # [N]
        column = first_token // BLOCK_SIZE
        is_there = column < columns
        if COLUMNS:
            is_there = is_there & (used >= 0)
        block = tl.load(table_ptr + column, mask=is_there, other=-1)
        if COLUMNS:
            block = -2 - block  # see `call.dense_entry`
        stored = (token >= low) & (token < tl.where(block >= 0, high, 0))
        mask_columns = (token - mask_start).to(tl.int64) * mask_stride_t
        if RULES.mask != NO_MASK and not RULES.mask_rows:
            tile_mask = tl.load(mask_ptr + mask_columns, mask=stored, other=0)
            # What the mask hides from all is not read either.
            stored = stored & (tile_mask != HIDDEN)
        # The offsets of a tile stay the same from tile to tile, only where it begins is 64 bits wide.
        block = tl.maximum(block, 0).to(tl.int64)
        slot = first_token % BLOCK_SIZE
        if BLOCK_SIZE > 65536:  # dense K and V: a row is one block
            slot = slot.to(tl.int64)

        block_ptr = keys_ptr + block * k_strides[0]
        codes_ptr = block_ptr + (K.codes + slot * K.row)
        params_ptr = (block_ptr + K.params).to(tl.pointer_type(tl.float16))
        score = SCORE(query, codes_ptr, params_ptr, slot, n, stored, K) * row_scale[:, None]  # [M, N]
        if RULES.softcap:
            score = _soft_capped(score, softcap)
        visible = is_query[:, None] & stored[None, :]
        if RULES.causal:
            visible = visible & (token[None, :] <= position[:, None])
        if RULES.window:
            visible = visible & (token[None, :] > position[:, None] - window)
        if RULES.mask_rows:
            mask = tl.load(mask_ptr + mask_offsets[:, None] + mask_columns[None, :], mask=visible, other=0)
            visible = visible & (mask != HIDDEN)
            if RULES.mask == ADDITIVE_MASK:
                score = score + mask.to(tl.float32)
        elif RULES.mask == ADDITIVE_MASK:
            score = score + tile_mask.to(tl.float32)[None, :]
        score = tl.where(visible, score, -float("inf"))
        weight, row_max, row_sum, shrink = _online_update(score, row_max, row_sum)

        any_visible = stored
        if RULES.mask_rows:
            any_visible = tl.max(visible.to(tl.int32), 0) > 0
        block_ptr = values_ptr + block * v_strides[0]
        codes_ptr = block_ptr + (V.codes + slot * V.row)
        params_ptr = (block_ptr + V.params).to(tl.pointer_type(tl.float16))
        values, scales, zeros = VALUES(any_visible, codes_ptr, params_ptr, slot, n, stored, V)
        if V.has_zeros:
            acc_zero = acc_zero * shrink[:, None] + weight * zeros[None, :]
        acc = _weighted_sum(acc * shrink[:, None], weight * scales[None, :], values, V)
    if V.has_zeros:
        acc += tl.sum(acc_zero, 1)[:, None]

    e = tl.arange(0, E)
    is_value = e[None, :] < V.dim
    if SPLIT:
        row = split.to(tl.int64) * part_rows + (b * Q_HEADS + q_head) * q_tokens + query_index  # [M]
        part_max_ptr, part_sum_ptr = _part_pointers(part_ptr, splits, part_rows, V.dim)
        tl.store(part_max_ptr + row, row_max, mask=is_query)
        tl.store(part_sum_ptr + row, row_sum, mask=is_query)
        written = is_query & (row_sum != 0.0)
        tl.store(part_ptr + row[:, None] * V.dim + e[None, :], acc, mask=written[:, None] & is_value)
    else:
        if V.steps > 0:
            acc = unrotate(acc, V.steps)
        if RULES.sinks:
            sink = tl.load(sinks_ptr + q_head).to(tl.float32)
            new_max = tl.maximum(row_max, sink)
            shrink = tl.exp2((row_max - new_max) * LOG2E)
            row_sum = row_sum * shrink + tl.exp2((sink - new_max) * LOG2E)
            acc = acc * shrink[:, None]
            row_max = new_max
        nothing = row_sum == 0.0
        out = acc / tl.where(nothing, 1.0, row_sum)[:, None]
        lse = tl.where(nothing, -float("inf"), row_max + tl.log2(row_sum) / LOG2E)
        out_row = (b.to(tl.int64) * q_tokens + query_index) * Q_HEADS + q_head
        out_ptrs = out_ptr + out_row[:, None] * V.dim + e[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_query[:, None] & is_value)
        lse_row = (b * Q_HEADS + q_head).to(tl.int64) * q_tokens + query_index
        tl.store(lse_ptr + lse_row, lse, mask=is_query)


@triton.jit
def _largest(part_ptr, splits, rows, row, largest, V_HEAD_DIM: tl.constexpr, S: tl.constexpr):
    """The largest maximum of a row's parts, and of what was given."""
    part_max_ptr, _ = _part_pointers(part_ptr, splits, rows, V_HEAD_DIM)
    for first in range(0, splits, S):
        s = first + tl.arange(0, S)
        part_max = tl.load(part_max_ptr + s * rows + row, mask=s < splits, other=-float("inf"))
        largest = tl.maximum(largest, tl.max(part_max, 0))
    return largest


@triton.jit
def _summed(part_ptr, splits, rows, row, base, V_HEAD_DIM: tl.constexpr, E: tl.constexpr, S: tl.constexpr):
    """Sums of values `[E]` and of weights of a row's parts."""
    part_max_ptr, part_sum_ptr = _part_pointers(part_ptr, splits, rows, V_HEAD_DIM)
    e = tl.arange(0, E)
    acc = tl.zeros([E], tl.float32)
    total = 0.0
    for first in range(0, splits, S):
        s = first + tl.arange(0, S)
        part_max = tl.load(part_max_ptr + s * rows + row, mask=s < splits, other=-float("inf"))
        part_sum = tl.load(part_sum_ptr + s * rows + row, mask=s < splits, other=0.0)
        weight = tl.exp2((part_max - base) * LOG2E)
        part = tl.load(
            part_ptr + (s * rows + row)[:, None] * V_HEAD_DIM + e[None, :],
            mask=(part_sum != 0.0)[:, None] & (e[None, :] < V_HEAD_DIM),
            other=0.0,
        )  # [S, E]
        total += tl.sum(weight * part_sum, 0)
        acc += tl.sum(weight[:, None] * part, 0)
    return acc, total


@triton.jit(do_not_specialize=("q_tokens", "splits", "dense_splits"))
def merge_kernel(
    out_ptr,  # [batch, q_tokens, q_heads, v_head_dim]
    lse_ptr,  # float32 [batch, q_heads, q_tokens]
    part_ptr,
    dense_part_ptr,  # of tokens in residual blocks, if QUANTIZED
    sinks_ptr,
    q_tokens,
    splits,
    dense_splits,
    Q_HEADS: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    V_STEPS: tl.constexpr,  # of the rotation of tokens in records
    E: tl.constexpr,
    S: tl.constexpr,
    SINKS: tl.constexpr,
    QUANTIZED: tl.constexpr,
):
    """Add up what splits left, rotated back where it is rotated. Grid: (q_heads * q_tokens, batch).

    Maximum and sum are kept apart, and not as one log-sum-exp, because a mask of finfo.min swallows log(n).
    """
    b = tl.program_id(1)
    q_head = tl.program_id(0) // q_tokens
    query_index = tl.program_id(0) % q_tokens
    row = b.to(tl.int64) * Q_HEADS * q_tokens + tl.program_id(0)
    rows = tl.num_programs(1).to(tl.int64) * Q_HEADS * q_tokens

    largest = -float("inf")
    if SINKS:
        sink = tl.load(sinks_ptr + q_head).to(tl.float32)
        largest = sink
    largest = _largest(part_ptr, splits, rows, row, largest, V_HEAD_DIM, S)
    if QUANTIZED:
        largest = _largest(dense_part_ptr, dense_splits, rows, row, largest, V_HEAD_DIM, S)
    base = tl.where(largest == -float("inf"), 0.0, largest)

    acc, total = _summed(part_ptr, splits, rows, row, base, V_HEAD_DIM, E, S)
    if V_STEPS > 0:
        acc = tl.reshape(unrotate(acc[None, :], V_STEPS), [E])
    if QUANTIZED:
        dense_acc, dense_total = _summed(dense_part_ptr, dense_splits, rows, row, base, V_HEAD_DIM, E, S)
        acc += dense_acc
        total += dense_total
    if SINKS:
        total += tl.exp2((sink - base) * LOG2E)

    nothing = total == 0.0
    out = acc / tl.where(nothing, 1.0, total)
    lse = tl.where(nothing, -float("inf"), base + tl.log2(total) / LOG2E)
    e = tl.arange(0, E)
    out_row = (b.to(tl.int64) * q_tokens + query_index) * Q_HEADS + q_head
    tl.store(out_ptr + out_row * V_HEAD_DIM + e, out.to(out_ptr.dtype.element_ty), mask=e < V_HEAD_DIM)
    tl.store(lse_ptr + row, lse)
