"""Attention over quantized blocks: like `attend`, but K and V are read from records.

Scores and sums are taken of codes, with scales folded in as `formats` says. Where K are rotated the queries
are too, once; where V are rotated the sum is rotated back, once, at the end, or by the merge if there is one.

Blocks of a quantized layer that lie in the model's dtype are attended by `attend_kernel` in a launch of its
own, and `merge_records_kernel` adds up both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attend import PER_STEP_ARGUMENTS, PER_STEP_POINTERS
from .rotation import rotate, unrotate
from .softmax import (
    BOOL_MASK,
    LOG2E,
    NO_MASK,
    hide,
    part_pointers,
    soft_capped,
    store_answer,
    store_part,
    stored_range,
    tokens_in_sight,
    weigh,
)


@triton.jit
def _units(x):
    """For each row the power of two that brings its largest magnitude between 1 and 2."""
    bits = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) & 0x7F800000
    return tl.where(bits == 0, 1.0, bits.to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=PER_STEP_ARGUMENTS, do_not_specialize_on_alignment=PER_STEP_POINTERS)
def attend_records_kernel(
    out_ptr,  # [batch, q_tokens, q_heads, v_head_dim], written if not SPLIT
    lse_ptr,  # float32 [batch, q_heads, q_tokens], the same
    part_ptr,  # float32, written if SPLIT: see `part_pointers`
    query_ptr,
    records_ptr,  # uint8 [num_blocks, kv_heads, nbytes]
    table_ptr,  # int32 [batch, columns]
    lengths_ptr,  # int32 [batch], columns of each row, those before it begins included
    offsets_ptr,  # int32 [batch], columns before each row begins, if PADDED
    mask_ptr,
    sinks_ptr,
    q_stride_b,
    q_stride_h,
    q_stride_t,
    stride_block,  # bytes
    stride_h,
    table_stride_b,
    columns,
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
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_ROW_BYTES: tl.constexpr,
    V_ROW_BYTES: tl.constexpr,
    V_CODES: tl.constexpr,  # bytes from the record's beginning; the codes of K stand there
    K_PARAMS: tl.constexpr,
    V_PARAMS: tl.constexpr,
    K_STEPS: tl.constexpr,  # of the rotation, 0 if there is none
    V_STEPS: tl.constexpr,
    K_GROUP_SIZE: tl.constexpr,
    V_GROUP_SIZE: tl.constexpr,
    K_DTYPE: tl.constexpr,  # codes become
    V_DTYPE: tl.constexpr,
    V_TERMS: tl.constexpr,  # of V_DTYPE that make a weight
    V_ZEROS: tl.constexpr,  # whether V's format leaves zeros in `acc_zero`
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    MIN_TILES: tl.constexpr,
    PADDED: tl.constexpr,
    SPLIT: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    MASK: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    SCORE: tl.constexpr,  # of K's format
    ADD: tl.constexpr,  # of V's format
):
    """Attend the tokens of `[start, length - back)` in records; all else is as in `attend_kernel`."""
    tiles = tl.cdiv(q_tokens * GROUP, M)
    split = tl.program_id(0) % splits
    first_m = tl.program_id(0) // splits % tiles * M
    b = tl.program_id(0) // (splits * tiles * KV_HEADS)
    h = tl.program_id(0) // (splits * tiles) % KV_HEADS
    Q_HEADS: tl.constexpr = KV_HEADS * GROUP

    start, end, mask_start = stored_range(lengths_ptr, offsets_ptr, b, start, back, PADDED)
    m = first_m + tl.arange(0, M)
    query_index = m // GROUP
    q_head = h * GROUP + m % GROUP
    is_query = query_index < q_tokens
    position = end + query_shift + query_index  # [M]

    first_query = end + query_shift + first_m // GROUP
    last_query = end + query_shift + tl.minimum((first_m + M - 1) // GROUP, q_tokens - 1)
    low, high = tokens_in_sight(start, end, first_query, last_query, window, CAUSAL, WINDOW)
    first_tile = low // N
    end_tile = tl.maximum(tl.cdiv(high, N), first_tile)
    if SPLIT:
        per_split = tl.maximum(tl.cdiv(end_tile - first_tile, splits), MIN_TILES)
        first_tile = first_tile + split * per_split
        end_tile = tl.minimum(end_tile, first_tile + per_split)

    d = tl.arange(0, D)
    n = tl.arange(0, N)
    query_offsets = (
        b.to(tl.int64) * q_stride_b + q_head.to(tl.int64) * q_stride_h + query_index.to(tl.int64) * q_stride_t
    )
    query = tl.load(
        query_ptr + query_offsets[:, None] + d[None, :],
        mask=is_query[:, None] & (d[None, :] < HEAD_DIM),
        other=0.0,
    ).to(tl.float32)  # [M, D]
    if K_STEPS > 0:
        query = rotate(query, K_STEPS)
    row_scale = tl.full([M], 1.0, tl.float32) * scale
    if K_DTYPE == tl.float16:  # noqa: SIM300, K_DTYPE is no constant
        unit = _units(query)
        query = (query / unit[:, None]).to(tl.float16)
        row_scale = unit * scale
    records_ptr += h.to(tl.int64) * stride_h
    table_ptr += b.to(tl.int64) * table_stride_b
    mask_ptr += b.to(tl.int64) * mask_stride_b
    mask_offsets = q_head.to(tl.int64) * mask_stride_h + query_index.to(tl.int64) * mask_stride_q  # [M]

    row_max = tl.full([M], -float("inf"), tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, E], tl.float32)
    acc_zero = tl.zeros([M, N], tl.float32)
    for tile in range(first_tile, end_tile):
        first_token = tile * N
        token = first_token + n  # [N]
        column = first_token // BLOCK_SIZE
        block = tl.load(table_ptr + column, mask=column < columns, other=-1)
        stored = (token >= low) & (token < tl.where(block >= 0, high, 0))
        mask_columns = (token - mask_start).to(tl.int64) * mask_stride_t
        given = stored
        if MASK != NO_MASK and not MASK_ROWS:
            given = tl.load(mask_ptr + mask_columns, mask=stored, other=0)
            stored = stored & (given != (0 if MASK == BOOL_MASK else -float("inf")))
        record_ptr = records_ptr + tl.maximum(block, 0).to(tl.int64) * stride_block
        slot = first_token % BLOCK_SIZE

        score = SCORE(
            query,
            record_ptr + slot * K_ROW_BYTES,
            (record_ptr + K_PARAMS).to(tl.pointer_type(tl.float16)),
            slot,
            n,
            stored,
            BLOCK_SIZE,
            HEAD_DIM,
            K_GROUP_SIZE,
            K_DTYPE,
            PRECISION,
        )
        score = score * row_scale[:, None]  # [M, N]
        if SOFTCAP:
            score = soft_capped(score, softcap)
        score, visible = hide(
            score,
            is_query[:, None] & stored[None, :],
            token,
            position,
            given,
            mask_ptr,
            mask_offsets,
            mask_columns,
            window,
            CAUSAL,
            WINDOW,
            MASK,
            MASK_ROWS,
        )
        weight, row_max, row_sum, shrink = weigh(score, row_max, row_sum)

        seen = stored
        if MASK_ROWS:
            # A weight of 0 does not silence a NaN.
            seen = tl.max(visible.to(tl.int32), 0) > 0
        if V_ZEROS:
            acc_zero = acc_zero * shrink[:, None]
        acc, acc_zero = ADD(
            acc * shrink[:, None],
            acc_zero,
            weight,
            seen,
            record_ptr + (V_CODES + slot * V_ROW_BYTES),
            (record_ptr + V_PARAMS).to(tl.pointer_type(tl.float16)),
            slot,
            n,
            stored,
            BLOCK_SIZE,
            V_HEAD_DIM,
            V_GROUP_SIZE,
            V_DTYPE,
            V_TERMS,
            PRECISION,
            WIDEN,
        )
    if V_ZEROS:
        acc += tl.sum(acc_zero, 1)[:, None]

    if SPLIT:
        row = split.to(tl.int64) * part_rows + (b * Q_HEADS + q_head) * q_tokens + query_index  # [M]
        store_part(part_ptr, acc, row_max, row_sum, row, is_query, splits, part_rows, V_HEAD_DIM, E)
    else:
        if V_STEPS > 0:
            acc = unrotate(acc, V_STEPS)
        store_answer(
            out_ptr,
            lse_ptr,
            sinks_ptr,
            acc,
            row_max,
            row_sum,
            b,
            q_head,
            query_index,
            q_tokens,
            is_query,
            Q_HEADS,
            V_HEAD_DIM,
            E,
            SINKS,
        )


@triton.jit
def _largest(part_ptr, splits, rows, row, largest, V_HEAD_DIM: tl.constexpr, S: tl.constexpr):
    """The largest maximum of a row's parts, and of what was given."""
    part_max_ptr, _ = part_pointers(part_ptr, splits, rows, V_HEAD_DIM)
    for first in range(0, splits, S):
        s = first + tl.arange(0, S)
        part_max = tl.load(part_max_ptr + s * rows + row, mask=s < splits, other=-float("inf"))
        largest = tl.maximum(largest, tl.max(part_max, 0))
    return largest


@triton.jit
def _summed(part_ptr, splits, rows, row, base, V_HEAD_DIM: tl.constexpr, E: tl.constexpr, S: tl.constexpr):
    """Sums of values `[1, E]` and of weights of a row's parts."""
    part_max_ptr, part_sum_ptr = part_pointers(part_ptr, splits, rows, V_HEAD_DIM)
    e = tl.arange(0, E)
    acc = tl.zeros([1, E], tl.float32)
    total = 0.0
    for first in range(0, splits, S):
        s = first + tl.arange(0, S)
        part_max = tl.load(part_max_ptr + s * rows + row, mask=s < splits, other=-float("inf"))
        part_sum = tl.load(part_sum_ptr + s * rows + row, mask=s < splits, other=0.0)
        saw = part_sum != 0.0
        weight = tl.exp2((part_max - base) * LOG2E)
        part = tl.load(
            part_ptr + (s * rows + row)[:, None] * V_HEAD_DIM + e[None, :],
            mask=saw[:, None] & (e[None, :] < V_HEAD_DIM),
            other=0.0,
        )  # [S, E]
        total += tl.sum(weight * part_sum, 0)
        acc += tl.sum(weight[:, None] * part, 0, keep_dims=True)
    return acc, total


@triton.jit(do_not_specialize=("q_tokens", "splits", "dense_splits"))
def merge_records_kernel(
    out_ptr,  # [batch, q_tokens, q_heads, v_head_dim]
    lse_ptr,  # float32 [batch, q_heads, q_tokens]
    part_ptr,  # of tokens in records
    dense_part_ptr,  # of tokens in the model's dtype
    sinks_ptr,
    q_tokens,
    splits,
    dense_splits,
    Q_HEADS: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    V_STEPS: tl.constexpr,
    E: tl.constexpr,
    S: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Add up what splits left, rotated back where it is rotated. Grid: (q_heads * q_tokens, batch)."""
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
    largest = _largest(dense_part_ptr, dense_splits, rows, row, largest, V_HEAD_DIM, S)
    base = tl.where(largest == -float("inf"), 0.0, largest)

    acc, total = _summed(part_ptr, splits, rows, row, base, V_HEAD_DIM, E, S)
    if V_STEPS > 0:
        acc = unrotate(acc, V_STEPS)
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
    tl.store(
        out_ptr + out_row * V_HEAD_DIM + e[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=e[None, :] < V_HEAD_DIM,
    )
    tl.store(lse_ptr + row, lse)
