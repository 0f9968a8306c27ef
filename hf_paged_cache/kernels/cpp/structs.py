"""The structs of abi.h by the same names, field by field, and a layer's blocks as one of them."""

from __future__ import annotations

import ctypes
import struct
from ctypes import c_double, c_int64
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from hf_paged_cache.formats import RecordFormat
    from hf_paged_cache.formats.record import Side as SideName
    from hf_paged_cache.kernels.call import LayerBlocks

MAX_BLOCK_SIZE = 256
"""Tokens per block that the kernel has room for."""

ELEMENT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.bool: 3}


def _integers(names: str) -> tuple[tuple[str, type[c_int64]], ...]:
    return tuple((name, c_int64) for name in names.split())


class Strided(ctypes.Structure):
    """Tokens of any strides; `outer` is a block, or a row of the batch."""

    _fields_ = _integers("data outer_stride head_stride token_stride")


class Side(ctypes.Structure):
    """K, or V, of one layer, and how they lie in a record."""

    _fields_ = (("pool", Strided), *_integers("dim codec codes params group_size"))


class Records(ctypes.Structure):
    """The records of one layer."""

    _fields_ = _integers("data num_records block_stride head_stride bytes")


class Blocks(ctypes.Structure):
    """One layer's blocks."""

    _fields_ = (
        ("keys", Side),
        ("values", Side),
        *_integers("table offsets element_type num_blocks batch max_blocks kv_heads block_size"),
        ("records", Records),
    )


class Call(ctypes.Structure):
    """One attention call."""

    _fields_ = (
        ("query", Strided),
        *_integers("q_heads q_tokens out lse start end"),
        ("scale", c_double),
        ("softcap", c_double),
        *_integers("sinks window causal first_query mask mask_type"),
        *_integers("mask_batch_stride mask_head_stride mask_query_stride mask_token_stride threads"),
    )


class Tokens(ctypes.Structure):
    """Tokens to write, or room for those that are gathered."""

    _fields_ = (("keys", Strided), ("values", Strided), *_integers("tokens start threads"))


def packer(kind: type[ctypes.Structure]) -> Callable[..., bytes]:
    """A function from a struct's numbers to its bytes, in a fraction of the time that ctypes takes.

    The numbers of a struct within it stand in its place.
    """
    return struct.Struct(f"={_codes(kind)}").pack


def _codes(kind: Any) -> str:
    scalars = {c_int64: "q", c_double: "d"}
    return scalars[kind] if kind in scalars else "".join(_codes(field) for _, field in kind._fields_)


def unsupported_reason(blocks: LayerBlocks) -> str | None:
    """None when the library takes these blocks, otherwise a sentence."""
    keys, values, table, records, layout = (
        blocks.keys,
        blocks.values,
        blocks.table,
        blocks.records,
        blocks.layout,
    )
    for name, tensor in {"keys": keys, "values": values, "table": table, "records": records}.items():
        if tensor is not None and tensor.device.type != "cpu":
            return f"The C++ kernel reads CPU memory; {name} are on {tensor.device}."
    if keys.dtype not in ELEMENT_TYPES or keys.dtype == torch.bool or values.dtype != keys.dtype:
        wanted, got = "float32, bfloat16 or float16 blocks", f"{keys.dtype} and {values.dtype}"
    elif keys.stride(-1) != 1 or values.stride(-1) != 1:
        wanted, got = "blocks whose rows of head_dim elements are contiguous", f"{keys.stride()} as strides"
    elif blocks.block_size > MAX_BLOCK_SIZE:
        wanted, got = f"blocks of up to {MAX_BLOCK_SIZE} tokens", str(blocks.block_size)
    elif table.dtype != torch.int32 or not table.is_contiguous():
        wanted, got = "a contiguous int32 table", f"{table.dtype} with strides {table.stride()}"
    elif records is None or layout is None:
        return None
    elif unknown := [one.name for one in (layout.format.keys, layout.format.values) if one.kernel_id == 0]:
        return f"The C++ kernel does not know the codec {unknown[0]!r}."
    elif records.dtype != torch.uint8 or records.stride(-1) != 1:
        wanted, got = "contiguous bytes as records", f"{records.dtype} with strides {records.stride()}"
    else:
        return None
    return f"The C++ kernel takes {wanted}, not {got}."


def blocks_struct(blocks: LayerBlocks) -> bytes:
    """The struct of blocks that are supported; holds good until a tensor of theirs is replaced."""
    keys, values, records, offsets = blocks.keys, blocks.values, blocks.records, blocks.offsets
    layout = None if records is None else blocks.layout
    batch, max_blocks = blocks.table.shape
    if values.shape[:3] != keys.shape[:3]:
        raise AssertionError(
            f"keys {tuple(keys.shape)} and values {tuple(values.shape)} are not of the same blocks"
        )
    if offsets is not None and (
        offsets.shape != (batch,) or offsets.dtype != torch.int32 or not offsets.is_contiguous()
    ):
        raise AssertionError(f"offsets {tuple(offsets.shape)} {offsets.dtype} are not int32 of {batch} rows")
    of_records = Records()
    if records is not None and layout is not None:
        shape = (layout.block_size, layout.head_dim, layout.v_head_dim)
        if shape != (*keys.shape[2:], values.shape[3]) or records.shape[1:] != (keys.shape[1], layout.nbytes):
            raise AssertionError(
                f"records {tuple(records.shape)} of {layout} do not belong to keys {tuple(keys.shape)} and "
                f"values {tuple(values.shape)}"
            )
        of_records = Records(records.data_ptr(), *records.shape[:1], *records.stride()[:2], layout.nbytes)
    packed = Blocks(
        keys=_side(keys, "keys", layout),
        values=_side(values, "values", layout),
        table=blocks.table.data_ptr(),
        offsets=0 if offsets is None else offsets.data_ptr(),
        element_type=ELEMENT_TYPES[keys.dtype],
        num_blocks=keys.shape[0],
        batch=batch,
        max_blocks=max_blocks,
        kv_heads=keys.shape[1],
        block_size=keys.shape[2],
        records=of_records,
    )
    return bytes(packed)


def _side(pool: torch.Tensor, name: SideName, layout: RecordFormat | None) -> Side:
    strided = (pool.data_ptr(), *pool.stride()[:3])
    if layout is None:
        return Side(strided, pool.shape[3])
    codec, (codes, params) = layout.codec(name), layout.offsets(name)
    return Side(strided, pool.shape[3], codec.kernel_id, codes, params, codec.group_size)
