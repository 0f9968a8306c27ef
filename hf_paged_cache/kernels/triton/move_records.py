"""Kernels that put K and V into records: token by token, and block by block."""

from __future__ import annotations

import triton
import triton.language as tl

from .encode import storable


@triton.jit
def _flag(fault_ptr, bad):
    """Say that some of the rows `[R]` cannot be stored."""
    found = tl.max(bad.to(tl.int32), 0)
    # Nothing is ordered by it: the host reads it after an event of the stream.
    tl.atomic_max(fault_ptr, found, mask=found > 0, sem="relaxed")


@triton.jit(
    do_not_specialize=("table_stride_b", "columns", "new_tokens"),
    do_not_specialize_on_alignment=("fault_ptr",),  # 8 bytes of each layer
)
def write_records_kernel(
    records_ptr,  # uint8 [num_blocks, kv_heads, nbytes]
    keys_ptr,  # the slots, in the model's dtype
    values_ptr,
    new_keys_ptr,
    new_values_ptr,
    table_ptr,  # int32 [batch, columns]
    lengths_ptr,  # int32 [batch], columns of each row, the new ones included
    offsets_ptr,  # int32 [batch], columns before each row begins, if PADDED
    fault_ptr,  # int32 [2], if CHECK
    stride_block,  # bytes
    stride_h,
    k_stride_block,
    k_stride_h,
    v_stride_block,
    v_stride_h,
    new_k_stride_b,
    new_k_stride_h,
    new_k_stride_t,
    new_v_stride_b,
    new_v_stride_h,
    new_v_stride_t,
    table_stride_b,
    columns,
    new_tokens,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_STRIDE_T: tl.constexpr,
    V_STRIDE_T: tl.constexpr,
    V_CODES: tl.constexpr,
    K_PARAMS: tl.constexpr,
    V_PARAMS: tl.constexpr,
    K_STEPS: tl.constexpr,
    V_STEPS: tl.constexpr,
    K_GROUP_SIZE: tl.constexpr,
    V_GROUP_SIZE: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PADDED: tl.constexpr,
    RECORDS: tl.constexpr,  # whether the format is per token
    DENSE: tl.constexpr,  # whether some blocks are in the model's dtype
    CHECK: tl.constexpr,
    STORE_KEYS: tl.constexpr,
    STORE_VALUES: tl.constexpr,
):
    """Store new K and V at the end of every row. Grid: (new tokens, batch, tiles of H kv heads).

    Tokens of null blocks, before a row begins and beyond the table are dropped, and those of records too
    where not RECORDS.
    """
    t = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    h = tl.program_id(2) * H + tl.arange(0, H)
    d = tl.arange(0, D)
    e = tl.arange(0, E)
    position = tl.load(lengths_ptr + b) - new_tokens + t
    if PADDED:
        position -= tl.load(offsets_ptr + b)
    column = position // BLOCK_SIZE
    slot = position % BLOCK_SIZE
    entry = tl.load(
        table_ptr + b * table_stride_b + column, mask=(position >= 0) & (column < columns), other=-1
    )
    head = h.to(tl.int64)
    is_stored = h < tl.where(entry == -1, 0, KV_HEADS)  # [H]
    is_record = h < tl.where(entry >= 0, KV_HEADS, 0)
    is_dense = h < tl.where(entry < -1, KV_HEADS, 0)
    records_ptr += tl.maximum(entry, 0).to(tl.int64) * stride_block
    dense = tl.maximum(-2 - entry, 0).to(tl.int64)

    new_keys_ptr += b * new_k_stride_b + t.to(tl.int64) * new_k_stride_t
    keys = tl.load(
        new_keys_ptr + head[:, None] * new_k_stride_h + d[None, :],
        mask=is_stored[:, None] & (d[None, :] < HEAD_DIM),
        other=0.0,
    )  # [H, D]
    new_values_ptr += b * new_v_stride_b + t.to(tl.int64) * new_v_stride_t
    values = tl.load(
        new_values_ptr + head[:, None] * new_v_stride_h + e[None, :],
        mask=is_stored[:, None] & (e[None, :] < V_HEAD_DIM),
        other=0.0,
    )  # [H, E]
    if DENSE:
        keys_ptr += dense * k_stride_block + slot * K_STRIDE_T
        is_key = is_dense[:, None] & (d[None, :] < HEAD_DIM)
        tl.store(keys_ptr + head[:, None] * k_stride_h + d[None, :], keys, mask=is_key)
        values_ptr += dense * v_stride_block + slot * V_STRIDE_T
        is_value = is_dense[:, None] & (e[None, :] < V_HEAD_DIM)
        tl.store(values_ptr + head[:, None] * v_stride_h + e[None, :], values, mask=is_value)
    wide_keys, bad_keys = storable(keys.to(tl.float32))
    wide_values, bad_values = storable(values.to(tl.float32))
    if CHECK:
        _flag(fault_ptr, bad_keys)
        _flag(fault_ptr + 1, bad_values)
    if RECORDS:
        record_ptr = records_ptr + head * stride_h  # [H]
        STORE_KEYS(
            wide_keys,
            is_record,
            record_ptr,
            (record_ptr + K_PARAMS).to(tl.pointer_type(tl.float16)),
            slot,
            0.0,
            0.0,
            BLOCK_SIZE,
            HEAD_DIM,
            K_STEPS,
            K_GROUP_SIZE,
        )
        STORE_VALUES(
            wide_values,
            is_record,
            record_ptr + V_CODES,
            (record_ptr + V_PARAMS).to(tl.pointer_type(tl.float16)),
            slot,
            0.0,
            0.0,
            BLOCK_SIZE,
            V_HEAD_DIM,
            V_STEPS,
            V_GROUP_SIZE,
        )


@triton.jit
def _encode_side(
    source_ptr,  # the block's first token
    stride_t,
    codes_ptr,
    params_ptr,
    fault_ptr,
    T: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    STEPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    CHECK: tl.constexpr,
    PARAMS: tl.constexpr,
    STORE: tl.constexpr,
):
    """Encode K or V of one block and head, T tokens at a time; twice where parameters are the block's."""
    t = tl.arange(0, T)
    d = tl.arange(0, D)
    new_keys_ptr = source_ptr + t.to(tl.int64)[:, None] * stride_t + d[None, :]
    real = tl.zeros([T], tl.int32)[:, None] + d[None, :] < DIM
    scale, zero = 0.0, 0.0
    if not PER_TOKEN:
        smallest = tl.full([T, D], float("inf"), tl.float32)
        largest = tl.full([T, D], -float("inf"), tl.float32)
        for first in range(0, BLOCK_SIZE, T):
            x = tl.load(new_keys_ptr + tl.cast(first, tl.int64) * stride_t, mask=real, other=0.0)
            x, _ = storable(x.to(tl.float32))
            smallest = tl.minimum(smallest, tl.where(real, x, float("inf")))
            largest = tl.maximum(largest, tl.where(real, x, -float("inf")))
        scale, zero = PARAMS(smallest, largest, params_ptr, DIM)
    for first in range(0, BLOCK_SIZE, T):
        x = tl.load(new_keys_ptr + tl.cast(first, tl.int64) * stride_t, mask=real, other=0.0)
        x, bad = storable(x.to(tl.float32))
        if CHECK:
            _flag(fault_ptr, bad)
        STORE(
            x,
            t < T,
            codes_ptr,
            params_ptr,
            first + t,
            scale,
            zero,
            BLOCK_SIZE,
            DIM,
            STEPS,
            GROUP_SIZE,
        )


@triton.jit(
    do_not_specialize=("table_stride_b", "columns", "end", "start"),
    do_not_specialize_on_alignment=("ids_ptr", "slots_ptr", "offsets_ptr", "fault_ptr"),
)
def encode_records_kernel(
    records_ptr,  # uint8 [num_blocks, heads, nbytes]
    keys_ptr,  # [rows, heads, tokens, head_dim]
    values_ptr,
    ids_ptr,  # int32 [batch, columns]: the table; [blocks] if SEAL
    slots_ptr,  # int32 [blocks], rows of keys and values, if SEAL
    offsets_ptr,  # int32 [batch], columns before each row begins, if PADDED
    fault_ptr,  # int32 [2], if CHECK
    stride_block,  # bytes
    stride_h,
    k_stride_b,
    k_stride_h,
    k_stride_t,
    v_stride_b,
    v_stride_h,
    v_stride_t,
    table_stride_b,
    columns,
    end,  # of the new tokens' columns
    start,  # column that keys and values begin with
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    V_CODES: tl.constexpr,
    K_PARAMS: tl.constexpr,
    V_PARAMS: tl.constexpr,
    K_STEPS: tl.constexpr,
    V_STEPS: tl.constexpr,
    K_GROUP_SIZE: tl.constexpr,
    V_GROUP_SIZE: tl.constexpr,
    K_PER_TOKEN: tl.constexpr,
    V_PER_TOKEN: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PADDED: tl.constexpr,
    SEAL: tl.constexpr,
    CHECK: tl.constexpr,
    K_BLOCK_PARAMS: tl.constexpr,
    V_BLOCK_PARAMS: tl.constexpr,
    STORE_KEYS: tl.constexpr,
    STORE_VALUES: tl.constexpr,
):
    """Encode full blocks: those that new tokens `[start, end)` of a row fill, or sealed ones.

    Grid: (blocks, heads, batch, or 1 if SEAL).
    """
    i = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    if SEAL:
        row = tl.load(slots_ptr + i)
        block = tl.load(ids_ptr + i)
    else:
        row = tl.program_id(2)
        if PADDED:
            offset = tl.load(offsets_ptr + row)
            start -= offset
            end -= offset
        column = tl.cdiv(tl.maximum(start, 0), BLOCK_SIZE) + i
        is_whole = (column < columns) & ((column + 1) * BLOCK_SIZE <= end)
        block = tl.load(ids_ptr + row.to(tl.int64) * table_stride_b + column, mask=is_whole, other=-1)
        keys_ptr += (column * BLOCK_SIZE - start).to(tl.int64) * k_stride_t
        values_ptr += (column * BLOCK_SIZE - start).to(tl.int64) * v_stride_t
    keys_ptr += row.to(tl.int64) * k_stride_b + h * k_stride_h
    values_ptr += row.to(tl.int64) * v_stride_b + h * v_stride_h
    if block >= 0:
        record_ptr = records_ptr + block.to(tl.int64) * stride_block + h * stride_h
        _encode_side(
            keys_ptr,
            k_stride_t,
            record_ptr,
            (record_ptr + K_PARAMS).to(tl.pointer_type(tl.float16)),
            fault_ptr,
            T,
            D,
            BLOCK_SIZE,
            HEAD_DIM,
            K_STEPS,
            K_GROUP_SIZE,
            K_PER_TOKEN,
            CHECK,
            K_BLOCK_PARAMS,
            STORE_KEYS,
        )
        _encode_side(
            values_ptr,
            v_stride_t,
            record_ptr + V_CODES,
            (record_ptr + V_PARAMS).to(tl.pointer_type(tl.float16)),
            fault_ptr + 1,
            T,
            E,
            BLOCK_SIZE,
            V_HEAD_DIM,
            V_STEPS,
            V_GROUP_SIZE,
            V_PER_TOKEN,
            CHECK,
            V_BLOCK_PARAMS,
            STORE_VALUES,
        )
