"""Kernels that put K and V into blocks, token by token or block by block, and copy blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from .encoders import storable


@triton.jit
def _flag(fault_ptr, bad):
    """Say that some of the rows `[R]` cannot be stored."""
    found = tl.max(bad.to(tl.int32), 0)
    # Nothing is ordered by it: the host reads it after an event of the stream.
    tl.atomic_max(fault_ptr, found, mask=found > 0, sem="relaxed")


@triton.jit
def _new_tokens(new_ptr, strides, b, head, t, is_stored, SIDE: tl.constexpr):
    """New K or V of some heads `[H, D]`."""
    d = tl.arange(0, SIDE.padded)
    new_ptr += b * strides[0] + t.to(tl.int64) * strides[2]
    is_value = is_stored[:, None] & (d[None, :] < SIDE.dim)
    return tl.load(new_ptr + head[:, None] * strides[1] + d[None, :], mask=is_value, other=0.0)


@triton.jit
def _write_plain(x, pool_ptr, strides, block, head, slot, kept, STRIDE_T: tl.constexpr, SIDE: tl.constexpr):
    """Store `[H, D]` as they are."""
    d = tl.arange(0, SIDE.padded)
    pool_ptr += block * strides[0] + slot * STRIDE_T
    is_value = kept[:, None] & (d[None, :] < SIDE.dim)
    tl.store(pool_ptr + head[:, None] * strides[1] + d[None, :], x, mask=is_value)


@triton.jit(
    do_not_specialize=("table_stride_b", "columns", "new_tokens"),
    do_not_specialize_on_alignment=("fault_ptr",),  # 8 bytes of each layer
)
def write_kernel(
    keys_ptr,  # in the model's dtype: a plain pool, or the residual blocks of a quantized layer
    values_ptr,
    records_ptr,  # uint8 [num_blocks, kv_heads, nbytes], if QUANTIZED
    new_keys_ptr,
    new_values_ptr,
    table_ptr,  # int32 [batch, columns]
    lengths_ptr,  # int32 [batch], columns of each row, the new ones included
    offsets_ptr,  # int32 [batch], columns before each row begins, if PADDED
    fault_ptr,  # int32 [2], if CHECK
    k_strides,  # of block and head
    v_strides,
    record_strides,  # the same, in bytes
    new_k_strides,  # of row, head and token
    new_v_strides,
    table_stride_b,
    columns,
    new_tokens,
    KV_HEADS: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,  # a `variants.Side`
    V: tl.constexpr,
    K_STRIDE_T: tl.constexpr,  # in keys and values, where K.row is that of codes if QUANTIZED
    V_STRIDE_T: tl.constexpr,
    PADDED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    RECORDS: tl.constexpr,  # whether tokens are encoded, which a format per token allows
    DENSE: tl.constexpr,  # whether a quantized layer has residual blocks
    CHECK: tl.constexpr,
    STORE_KEYS: tl.constexpr,
    STORE_VALUES: tl.constexpr,
):
    """Store new K and V at the end of every row. Grid: (new tokens, batch, tiles of H kv heads).

    Tokens of null blocks, before a row begins and beyond the table are dropped, and those of records too
    where not RECORDS.
    """
    BLOCK_SIZE: tl.constexpr = K.block_size
    t = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    h = tl.program_id(2) * H + tl.arange(0, H)
    position = tl.load(lengths_ptr + b) - new_tokens + t
    if PADDED:
        position -= tl.load(offsets_ptr + b)
    column = position // BLOCK_SIZE
    slot = position % BLOCK_SIZE
    entry = tl.load(
        table_ptr + b * table_stride_b + column, mask=(position >= 0) & (column < columns), other=-1
    )
    head = h.to(tl.int64)
    dense_block = entry
    if QUANTIZED:
        dense_block = -2 - entry  # see `call.dense_entry`
    is_dense = h < tl.where(dense_block >= 0, KV_HEADS, 0)  # [H]
    dense_block = tl.maximum(dense_block, 0).to(tl.int64)
    if QUANTIZED:
        is_stored = h < tl.where(entry == -1, 0, KV_HEADS)
        is_record = h < tl.where(entry >= 0, KV_HEADS, 0)
        records_ptr += tl.maximum(entry, 0).to(tl.int64) * record_strides[0]
        keys = _new_tokens(new_keys_ptr, new_k_strides, b, head, t, is_stored, K)  # [H, D]
        values = _new_tokens(new_values_ptr, new_v_strides, b, head, t, is_stored, V)  # [H, E]
        if DENSE:
            _write_plain(keys, keys_ptr, k_strides, dense_block, head, slot, is_dense, K_STRIDE_T, K)
            _write_plain(values, values_ptr, v_strides, dense_block, head, slot, is_dense, V_STRIDE_T, V)
        wide_keys, bad_keys = storable(keys.to(tl.float32))
        wide_values, bad_values = storable(values.to(tl.float32))
        if CHECK:
            _flag(fault_ptr, bad_keys)
            _flag(fault_ptr + 1, bad_values)
        if RECORDS:
            record_ptr = records_ptr + head * record_strides[1]  # [H]
            k_params_ptr = (record_ptr + K.params).to(tl.pointer_type(tl.float16))
            v_params_ptr = (record_ptr + V.params).to(tl.pointer_type(tl.float16))
            STORE_KEYS(wide_keys, is_record, record_ptr, k_params_ptr, slot, 0.0, 0.0, K)
            STORE_VALUES(wide_values, is_record, record_ptr + V.codes, v_params_ptr, slot, 0.0, 0.0, V)
    else:
        keys = _new_tokens(new_keys_ptr, new_k_strides, b, head, t, is_dense, K)
        _write_plain(keys, keys_ptr, k_strides, dense_block, head, slot, is_dense, K_STRIDE_T, K)
        values = _new_tokens(new_values_ptr, new_v_strides, b, head, t, is_dense, V)
        _write_plain(values, values_ptr, v_strides, dense_block, head, slot, is_dense, V_STRIDE_T, V)


@triton.jit
def _encode_side(
    source_ptr,  # the block's first token
    stride_t,
    record_ptr,
    fault_ptr,
    T: tl.constexpr,
    SIDE: tl.constexpr,
    CHECK: tl.constexpr,
    PARAMS: tl.constexpr,
    STORE: tl.constexpr,
):
    """Encode K or V of one block and head, T tokens at a time; twice where parameters are the block's."""
    D: tl.constexpr = SIDE.padded
    BLOCK_SIZE: tl.constexpr = SIDE.block_size
    t = tl.arange(0, T)
    d = tl.arange(0, D)
    codes_ptr = record_ptr + SIDE.codes
    params_ptr = (record_ptr + SIDE.params).to(tl.pointer_type(tl.float16))
    new_ptr = source_ptr + t.to(tl.int64)[:, None] * stride_t + d[None, :]
    real = tl.zeros([T], tl.int32)[:, None] + d[None, :] < SIDE.dim
    scale, zero = 0.0, 0.0
    if not SIDE.is_per_token:
        smallest = tl.full([T, D], float("inf"), tl.float32)
        largest = tl.full([T, D], -float("inf"), tl.float32)
        for first in range(0, BLOCK_SIZE, T):
            x = tl.load(new_ptr + tl.cast(first, tl.int64) * stride_t, mask=real, other=0.0)
            x, _ = storable(x.to(tl.float32))
            smallest = tl.minimum(smallest, tl.where(real, x, float("inf")))
            largest = tl.maximum(largest, tl.where(real, x, -float("inf")))
        scale, zero = PARAMS(smallest, largest, params_ptr, SIDE.dim)
    for first in range(0, BLOCK_SIZE, T):
        x = tl.load(new_ptr + tl.cast(first, tl.int64) * stride_t, mask=real, other=0.0)
        x, bad = storable(x.to(tl.float32))
        if CHECK:
            _flag(fault_ptr, bad)
        STORE(x, t < T, codes_ptr, params_ptr, first + t, scale, zero, SIDE)


@triton.jit(
    do_not_specialize=("table_stride_b", "columns", "end", "start"),
    do_not_specialize_on_alignment=("ids_ptr", "dense_ids_ptr", "offsets_ptr", "fault_ptr"),
)
def encode_kernel(
    records_ptr,  # uint8 [num_blocks, heads, nbytes]
    keys_ptr,  # [rows, heads, tokens, head_dim]
    values_ptr,
    ids_ptr,  # int32 [batch, columns]: the table; [blocks] if SEAL
    dense_ids_ptr,  # int32 [blocks], rows of keys and values, if SEAL
    offsets_ptr,  # int32 [batch], columns before each row begins, if PADDED
    fault_ptr,  # int32 [2], if CHECK
    record_strides,  # of block and head, in bytes
    k_strides,  # of row, head and token
    v_strides,
    table_stride_b,
    columns,
    end,  # of the new tokens' columns
    start,  # column that keys and values begin with
    K: tl.constexpr,  # a `variants.Side`
    V: tl.constexpr,
    T: tl.constexpr,
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
    BLOCK_SIZE: tl.constexpr = K.block_size
    i = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    if SEAL:
        row = tl.load(dense_ids_ptr + i)
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
        keys_ptr += (column * BLOCK_SIZE - start).to(tl.int64) * k_strides[2]
        values_ptr += (column * BLOCK_SIZE - start).to(tl.int64) * v_strides[2]
    keys_ptr += row.to(tl.int64) * k_strides[0] + h * k_strides[1]
    values_ptr += row.to(tl.int64) * v_strides[0] + h * v_strides[1]
    if block >= 0:
        record_ptr = records_ptr + block.to(tl.int64) * record_strides[0] + h * record_strides[1]
        _encode_side(keys_ptr, k_strides[2], record_ptr, fault_ptr, T, K, CHECK, K_BLOCK_PARAMS, STORE_KEYS)
        _encode_side(
            values_ptr, v_strides[2], record_ptr, fault_ptr + 1, T, V, CHECK, V_BLOCK_PARAMS, STORE_VALUES
        )


# Both rows of ids come in one tensor, so that where the second begins depends on their number.
@triton.jit(do_not_specialize_on_alignment=("source_ptr", "target_ptr"))
def copy_kernel(
    pool_ptr,
    source_ptr,  # int32 [copies], block ids
    target_ptr,  # int32 [copies]
    block_elements,
    CHUNK: tl.constexpr,
):
    """Copy whole blocks; no block is both read and written. Grid: (copies, chunks of a block)."""
    copy = tl.program_id(0)
    source = tl.load(source_ptr + copy).to(tl.int64) * block_elements
    target = tl.load(target_ptr + copy).to(tl.int64) * block_elements
    offsets = tl.program_id(1).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    inside = offsets < block_elements
    tl.store(pool_ptr + target + offsets, tl.load(pool_ptr + source + offsets, mask=inside), mask=inside)
