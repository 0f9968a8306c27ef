"""The structs of abi.h by the same names, field by field, and a layer's blocks as one of them."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hf_paged_cache.formats import RecordFormat
    from hf_paged_cache.formats.record import Side as SideName
    from hf_paged_cache.kernels.call import LayerBlocks

MAX_BLOCK_SIZE = 256
"""Tokens per block that the kernel has room for."""

_ELEMENT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Strided(ctypes.Structure):
    """Tokens of any strides; `outer` is a block, or a row of the batch."""

    _fields_ = (
        ("data", c_int64),
        ("outer_stride", c_int64),
        ("head_stride", c_int64),
        ("token_stride", c_int64),
    )


class Side(ctypes.Structure):
    """K, or V, of one layer, and how they lie in a record."""

    _fields_ = (
        ("pool", Strided),
        ("dim", c_int64),
        ("codec", c_int64),
        ("codes", c_int64),
        ("params", c_int64),
        ("group_size", c_int64),
    )


class Records(ctypes.Structure):
    """The records of one layer."""

    _fields_ = (
        ("data", c_int64),
        ("num_records", c_int64),
        ("block_stride", c_int64),
        ("head_stride", c_int64),
        ("bytes", c_int64),
    )


class Blocks(ctypes.Structure):
    """One layer's blocks."""

    _fields_ = (
        ("keys", Side),
        ("values", Side),
        ("table", c_int64),
        ("offsets", c_int64),
        ("element_type", c_int64),
        ("num_blocks", c_int64),
        ("batch", c_int64),
        ("max_blocks", c_int64),
        ("kv_heads", c_int64),
        ("block_size", c_int64),
        ("records", Records),
    )


class Call(ctypes.Structure):
    """One attention call."""

    _fields_ = (
        ("query", Strided),
        ("q_heads", c_int64),
        ("q_tokens", c_int64),
        ("out", c_int64),
        ("lse", c_int64),
        ("start", c_int64),
        ("end", c_int64),
        ("scale", c_double),
        ("softcap", c_double),
        ("sinks", c_int64),
        ("window", c_int64),
        ("causal", c_int64),
        ("first_query", c_int64),
        ("mask", c_int64),
        ("mask_type", c_int64),
        ("mask_batch_stride", c_int64),
        ("mask_head_stride", c_int64),
        ("mask_query_stride", c_int64),
        ("mask_token_stride", c_int64),
        ("threads", c_int64),
    )


class Tokens(ctypes.Structure):
    """Tokens to write, or room for those that are gathered."""

    _fields_ = (
        ("keys", Strided),
        ("values", Strided),
        ("tokens", c_int64),
        ("start", c_int64),
        ("threads", c_int64),
    )


def unsupported_reason(blocks: LayerBlocks) -> str | None:
    """None when the library takes these blocks, otherwise a sentence."""
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


def blocks_struct(blocks: LayerBlocks) -> Blocks:
    """The struct of blocks that are supported; holds good until a tensor of theirs is replaced."""
    keys, values, offsets = blocks.keys, blocks.values, blocks.offsets
    if values.shape[:3] != keys.shape[:3]:
        raise AssertionError(
            f"keys {tuple(keys.shape)} and values {tuple(values.shape)} are not of the same blocks"
        )
    num_blocks, kv_heads, block_size, _ = keys.shape
    batch, max_blocks = blocks.table.shape
    if offsets is not None and (
        offsets.shape != (batch,) or offsets.dtype != torch.int32 or not offsets.is_contiguous()
    ):
        raise AssertionError(f"offsets {tuple(offsets.shape)} {offsets.dtype} are not int32 of {batch} rows")
    records, form = blocks.records, blocks.form
    if records is None or form is None:
        form, of_records = None, Records()
    else:
        _check_records(records, form, keys, values)
        of_records = Records(records.data_ptr(), *records.shape[:1], *records.stride()[:2], form.nbytes)
    return Blocks(
        keys=_side(keys, "keys", form),
        values=_side(values, "values", form),
        table=blocks.table.data_ptr(),
        offsets=0 if offsets is None else offsets.data_ptr(),
        element_type=_ELEMENT_TYPES[keys.dtype],
        num_blocks=num_blocks,
        batch=batch,
        max_blocks=max_blocks,
        kv_heads=kv_heads,
        block_size=block_size,
        records=of_records,
    )


def _check_records(
    records: torch.Tensor, form: RecordFormat, keys: torch.Tensor, values: torch.Tensor
) -> None:
    shape = (form.block_size, form.head_dim, form.v_head_dim)
    if shape != (*keys.shape[2:], values.shape[3]) or records.shape[1:] != (keys.shape[1], form.nbytes):
        raise AssertionError(
            f"records {tuple(records.shape)} of {form} do not belong to keys {tuple(keys.shape)} and "
            f"values {tuple(values.shape)}"
        )


def _side(pool: torch.Tensor, name: SideName, form: RecordFormat | None) -> Side:
    strided = (pool.data_ptr(), *pool.stride()[:3])
    if form is None:
        return Side(strided, pool.shape[3])
    codec, (codes, params) = form.codec(name), form.offsets(name)
    return Side(strided, pool.shape[3], codec.kernel_id, codes, params, codec.group_size)
