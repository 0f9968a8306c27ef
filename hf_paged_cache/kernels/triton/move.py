"""Kernels that put K and V into blocks, and copy blocks."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=("table_stride_b", "columns", "new_tokens"))
def write_kernel(
    keys_ptr,
    values_ptr,
    new_keys_ptr,
    new_values_ptr,
    table_ptr,  # int32 [batch, columns]
    lengths_ptr,  # int32 [batch], columns of each row, the new ones included
    offsets_ptr,  # int32 [batch], columns before each row begins, if PADDED
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
    H: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Store new K and V at the end of every row. Grid: (new tokens, batch, tiles of H kv heads).

    Tokens of null blocks, before a row begins and beyond the table are dropped.
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
    block = tl.load(
        table_ptr + b * table_stride_b + column, mask=(position >= 0) & (column < columns), other=-1
    )
    is_stored = h < tl.where(block >= 0, KV_HEADS, 0)  # [H]
    block = tl.maximum(block, 0).to(tl.int64)
    head = h.to(tl.int64)[:, None]

    is_key = is_stored[:, None] & (d[None, :] < HEAD_DIM)
    new_keys_ptr += b * new_k_stride_b + t.to(tl.int64) * new_k_stride_t
    keys = tl.load(new_keys_ptr + head * new_k_stride_h + d[None, :], mask=is_key)
    keys_ptr += block * k_stride_block + slot * K_STRIDE_T
    tl.store(keys_ptr + head * k_stride_h + d[None, :], keys, mask=is_key)

    is_value = is_stored[:, None] & (e[None, :] < V_HEAD_DIM)
    new_values_ptr += b * new_v_stride_b + t.to(tl.int64) * new_v_stride_t
    values = tl.load(new_values_ptr + head * new_v_stride_h + e[None, :], mask=is_value)
    values_ptr += block * v_stride_block + slot * V_STRIDE_T
    tl.store(values_ptr + head * v_stride_h + e[None, :], values, mask=is_value)


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
