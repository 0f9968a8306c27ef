"""Attention over stored blocks, and over dense K and V read as blocks of one row each.

One program has one row, one kv head, one tile of queries and one split of the tokens. A tile holds the
queries of the whole head group, so that K and V are read once for all of them (as in grouped-query decoding
kernels since Flash-Decoding, Dao et al. 2023); the softmax is taken online (Milakov & Gimelshein 2018). With
several splits every program leaves its sums in scratch, and `merge_kernel` adds them up.

Letters: `b` row, `h` kv head; in a tile `m` query (`[M]`), `n` token (`[N]`), `d` dim of K (`[D]`), `e` of V
(`[E]`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .formats import product
from .softmax import (
    ADDITIVE_MASK,
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

__all__ = [
    "ADDITIVE_MASK",
    "BOOL_MASK",
    "NO_MASK",
    "PER_STEP_ARGUMENTS",
    "PER_STEP_POINTERS",
    "attend_kernel",
    "merge_kernel",
]

# Numbers that change from step to step, and pointers whose alignment does: compiling for the values they
# happen to have would compile again and again.
PER_STEP_ARGUMENTS = (
    "table_stride_b",
    "columns",
    "mask_stride_b",
    "mask_stride_h",
    "mask_stride_q",
    "q_tokens",
    "splits",
    "part_rows",
    "start",
    "back",
    "query_shift",
)
PER_STEP_POINTERS = ("mask_ptr",)


@triton.jit(
    do_not_specialize=(*PER_STEP_ARGUMENTS, "columns_stride_b", "columns_used"),
    do_not_specialize_on_alignment=PER_STEP_POINTERS,
)
def attend_kernel(
    out_ptr,  # [batch, q_tokens, q_heads, v_head_dim], written if not SPLIT
    lse_ptr,  # float32 [batch, q_heads, q_tokens], the same
    part_ptr,  # float32, written if SPLIT: see `part_pointers`
    query_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,  # int32 [batch, columns]
    lengths_ptr,  # int32 [batch], columns of each row, those before it begins included
    offsets_ptr,  # int32 [batch], columns before each row begins, if PADDED
    mask_ptr,
    sinks_ptr,
    q_stride_b,
    q_stride_h,
    q_stride_t,
    k_stride_block,
    k_stride_h,
    v_stride_block,
    v_stride_h,
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
    columns_ptr,  # int32 [batch, columns_used], the table's columns to attend, -1 past the last, if COLUMNS
    columns_stride_b,
    columns_used,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_STRIDE_T: tl.constexpr,
    V_STRIDE_T: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    MIN_TILES: tl.constexpr,
    COLUMNS: tl.constexpr,  # whether only some columns are attended: dense blocks of a quantized layer
    PADDED: tl.constexpr,
    SPLIT: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    MASK: tl.constexpr,
    MASK_ROWS: tl.constexpr,  # whether the mask differs between the queries of a tile
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    LOAD_KEYS: tl.constexpr,
    LOAD_VALUES: tl.constexpr,
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

    start, end, mask_start = stored_range(lengths_ptr, offsets_ptr, b, start, back, PADDED)
    m = first_m + tl.arange(0, M)
    query_index = m // GROUP
    q_head = h * GROUP + m % GROUP
    is_query = query_index < q_tokens
    position = end + query_shift + query_index  # [M]

    first_query = end + query_shift + first_m // GROUP
    last_query = end + query_shift + tl.minimum((first_m + M - 1) // GROUP, q_tokens - 1)
    low, high = tokens_in_sight(start, end, first_query, last_query, window, CAUSAL, WINDOW)
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
    e = tl.arange(0, E)
    n = tl.arange(0, N)
    query_offsets = (
        b.to(tl.int64) * q_stride_b + q_head.to(tl.int64) * q_stride_h + query_index.to(tl.int64) * q_stride_t
    )
    query = tl.load(
        query_ptr + query_offsets[:, None] + d[None, :],
        mask=is_query[:, None] & (d[None, :] < HEAD_DIM),
        other=0.0,
    )  # [M, D]
    keys_ptr += h.to(tl.int64) * k_stride_h
    values_ptr += h.to(tl.int64) * v_stride_h
    table_ptr += b.to(tl.int64) * table_stride_b
    columns_ptr += b * columns_stride_b
    mask_ptr += b.to(tl.int64) * mask_stride_b
    mask_offsets = q_head.to(tl.int64) * mask_stride_h + query_index.to(tl.int64) * mask_stride_q  # [M]

    row_max = tl.full([M], -float("inf"), tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, E], tl.float32)
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
            block = -2 - block  # see `problem.dense_entry`
        stored = (token >= low) & (token < tl.where(block >= 0, high, 0))
        mask_columns = (token - mask_start).to(tl.int64) * mask_stride_t
        given = stored
        if MASK != NO_MASK and not MASK_ROWS:
            given = tl.load(mask_ptr + mask_columns, mask=stored, other=0)
            # What the mask hides from all is not read either.
            stored = stored & (given != (0 if MASK == BOOL_MASK else -float("inf")))
        # The offsets of a tile stay the same from tile to tile, only where it begins is 64 bits wide.
        block = tl.maximum(block, 0).to(tl.int64)
        slot = (first_token % BLOCK_SIZE).to(tl.int64)

        keys = LOAD_KEYS(
            keys_ptr + (block * k_stride_block + slot * K_STRIDE_T),
            n[:, None] * K_STRIDE_T + d[None, :],
            stored[:, None] & (d[None, :] < HEAD_DIM),
        )  # [N, D]
        score = tl.zeros([M, N], tl.float32)
        score = product(query, tl.trans(keys), score, PRECISION, WIDEN) * scale  # [M, N]
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

        values = LOAD_VALUES(
            values_ptr + (block * v_stride_block + slot * V_STRIDE_T),
            n[:, None] * V_STRIDE_T + e[None, :],
            stored[:, None] & (e[None, :] < V_HEAD_DIM),
        )  # [N, E]
        if MASK_ROWS:
            # A weight of 0 does not silence a NaN.
            seen = tl.max(visible.to(tl.int32), 0) > 0
            values = tl.where(seen[:, None], values, 0.0)
        acc = product(weight, values, acc * shrink[:, None], PRECISION, WIDEN)

    if SPLIT:
        row = split.to(tl.int64) * part_rows + (b * Q_HEADS + q_head) * q_tokens + query_index  # [M]
        store_part(part_ptr, acc, row_max, row_sum, row, is_query, splits, part_rows, V_HEAD_DIM, E)
    else:
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


@triton.jit(do_not_specialize=("q_tokens", "splits"))
def merge_kernel(
    out_ptr,  # [batch, q_tokens, q_heads, v_head_dim]
    lse_ptr,  # float32 [batch, q_heads, q_tokens]
    part_ptr,
    sinks_ptr,
    q_tokens,
    splits,
    Q_HEADS: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    E: tl.constexpr,
    S: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Add up what the splits left. Grid: (q_heads * q_tokens, batch).

    Maximum and sum are kept apart, and not as one log-sum-exp, because a mask of finfo.min swallows log(n).
    """
    b = tl.program_id(1)
    q_head = tl.program_id(0) // q_tokens
    query_index = tl.program_id(0) % q_tokens
    row = b.to(tl.int64) * Q_HEADS * q_tokens + tl.program_id(0)
    rows = tl.num_programs(1).to(tl.int64) * Q_HEADS * q_tokens
    part_max_ptr, part_sum_ptr = part_pointers(part_ptr, splits, rows, V_HEAD_DIM)
    e = tl.arange(0, E)

    total_max = -float("inf")
    if SINKS:
        sink = tl.load(sinks_ptr + q_head).to(tl.float32)
        total_max = sink
    for first in range(0, splits, S):
        s = first + tl.arange(0, S)
        part_max = tl.load(part_max_ptr + s * rows + row, mask=s < splits, other=-float("inf"))
        total_max = tl.maximum(total_max, tl.max(part_max, 0))
    base = tl.where(total_max == -float("inf"), 0.0, total_max)

    total_sum = 0.0
    if SINKS:
        total_sum = tl.exp2((sink - base) * LOG2E)
    acc = tl.zeros([E], tl.float32)
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
        total_sum += tl.sum(weight * part_sum, 0)
        acc += tl.sum(weight[:, None] * part, 0)

    nothing = total_sum == 0.0
    out = acc / tl.where(nothing, 1.0, total_sum)
    lse = tl.where(nothing, -float("inf"), base + tl.log2(total_sum) / LOG2E)
    out_row = (b.to(tl.int64) * q_tokens + query_index) * Q_HEADS + q_head
    tl.store(out_ptr + out_row * V_HEAD_DIM + e, out.to(out_ptr.dtype.element_ty), mask=e < V_HEAD_DIM)
    tl.store(lse_ptr + row, lse)
