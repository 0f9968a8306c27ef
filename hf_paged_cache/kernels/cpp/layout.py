"""What the library is told of a layer's blocks: the struct `Blocks` of abi.h, packed."""

from __future__ import annotations

import struct

import torch

from hf_paged_cache.formats import Codec
from hf_paged_cache.kernels.call import LayerBlocks

MAX_BLOCK_SIZE = 256
"""Tokens per block that the kernel has room for."""

_ELEMENT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# Field by field: K, V and table; their strides; shapes; records; how K lie in one; how V do; offsets.
_BLOCKS = struct.Struct("=3q 1q 3q 3q 6q 1q 5q 4q 4q 1q")
_NO_RECORDS = (0,) * 13


def unsupported_reason(blocks: LayerBlocks) -> str | None:
    """None when the library can be told of these blocks, otherwise a sentence."""
    keys, values, table = blocks.keys, blocks.values, blocks.table
    for name, tensor in (("keys", keys), ("values", values), ("table", table)):
        if tensor.device.type != "cpu":
            return f"The C++ kernel reads CPU memory; {name} are on {tensor.device}."
    if keys.dtype not in _ELEMENT_TYPES or values.dtype != keys.dtype:
        return (
            f"The C++ kernel takes float32, bfloat16 or float16 blocks, not {keys.dtype} and {values.dtype}."
        )
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        return "The C++ kernel takes blocks whose rows of head_dim elements are contiguous."
    if blocks.block_size > MAX_BLOCK_SIZE:
        return f"The C++ kernel takes blocks of up to {MAX_BLOCK_SIZE} tokens, not {blocks.block_size}."
    if table.dtype != torch.int32 or not table.is_contiguous():
        return (
            f"The C++ kernel takes a contiguous int32 table, not {table.dtype} with strides {table.stride()}."
        )
    return _unsupported_records(blocks)


def _unsupported_records(blocks: LayerBlocks) -> str | None:
    records, form = blocks.records, blocks.form
    if records is None or form is None:
        return None
    for codec in (form.format.keys, form.format.values):
        if codec.kernel_id == 0:
            return f"The C++ kernel does not know the codec {codec.name!r}."
    if records.dtype != torch.uint8 or records.device.type != "cpu" or records.stride(-1) != 1:
        return (
            f"The C++ kernel takes contiguous bytes in CPU memory, not {records.dtype} on {records.device}."
        )
    return None


def pack(blocks: LayerBlocks) -> bytes:
    """The struct of blocks that are supported; holds good until a tensor of theirs is replaced."""
    keys, values, table = blocks.keys, blocks.values, blocks.table
    if values.shape[:3] != keys.shape[:3]:
        raise AssertionError(
            f"keys {tuple(keys.shape)} and values {tuple(values.shape)} are not of the same blocks"
        )
    num_blocks, kv_heads, block_size, head_dim = keys.shape
    batch, max_blocks = table.shape
    offsets = blocks.offsets
    if offsets is not None and (
        offsets.shape != (batch,) or offsets.dtype != torch.int32 or not offsets.is_contiguous()
    ):
        raise AssertionError(f"offsets {tuple(offsets.shape)} {offsets.dtype} are not int32 of {batch} rows")
    return _BLOCKS.pack(
        *(keys.data_ptr(), values.data_ptr(), table.data_ptr(), num_blocks),
        *(*keys.stride()[:3], *values.stride()[:3]),
        *(batch, max_blocks, kv_heads, block_size, head_dim, values.shape[3], _ELEMENT_TYPES[keys.dtype]),
        *_records_fields(blocks),
        0 if offsets is None else offsets.data_ptr(),
    )


def _records_fields(blocks: LayerBlocks) -> tuple[int, ...]:
    """Where the records are, and how K and V lie in one."""
    records, form = blocks.records, blocks.form
    if records is None or form is None:
        return _NO_RECORDS
    block_size, head_dim = blocks.keys.shape[2:]
    if (form.block_size, form.head_dim, form.v_head_dim) != (
        block_size,
        head_dim,
        blocks.values.shape[3],
    ) or (records.shape[1:] != (blocks.keys.shape[1], form.nbytes)):
        raise AssertionError(
            f"records {tuple(records.shape)} of {form} do not belong to keys {tuple(blocks.keys.shape)} and "
            f"values {tuple(blocks.values.shape)}"
        )
    return (
        *(records.data_ptr(), records.shape[0], records.stride(0), records.stride(1), form.nbytes),
        *_part_fields(form.format.keys, form.key_codes, form.key_params),
        *_part_fields(form.format.values, form.value_codes, form.value_params),
    )


def _part_fields(codec: Codec, codes: int, params: int) -> tuple[int, int, int, int]:
    return codec.kernel_id, codes, params, codec.group_size
