"""Compile-time arguments of the kernels of quantized blocks, as `variants` has those of the others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl

from hf_paged_cache.formats import Codec, RecordFormat
from hf_paged_cache.formats.record import Side
from hf_paged_cache.formats.rotation import part_size

from . import encode, formats
from .attend import NO_MASK
from .tiles import Tile, choose_record_tile, padded, power_of_two
from .variants import COMMON_OPTIONS, INTERPRETED, generation

_WRITE_ELEMENTS = 2048
_WRITE_ELEMENTS_PER_THREAD = 8
_ENCODE_ELEMENTS = 4096
_MERGED_SPLITS = 16
_THREE_PROGRAMS_REGISTERS, _ALL_REGISTERS = 168, 255


@dataclass(frozen=True, slots=True)
class _Functions:
    """What kernels get at compile time for one codec; None where it does not occur on that side."""

    store: Any
    score: Any = None
    add: Any = None
    block_params: Any = encode.block_params_none
    has_zeros: bool = False


_FUNCTIONS = {
    "int8_token": _Functions(encode.store_int8_token, formats.score_int8_token, formats.add_int8_token),
    "fp8_token": _Functions(encode.store_fp8_token, formats.score_fp8_token, formats.add_fp8_token),
    "int4_token": _Functions(encode.store_int4_token, None, formats.add_int4_token, has_zeros=True),
    "int4_channel": _Functions(
        encode.store_int4_channel, formats.score_int4_channel, None, encode.block_params_int4_channel
    ),
    "int8_block": _Functions(
        encode.store_int8_block,
        formats.score_int8_block,
        formats.add_int8_block,
        encode.block_params_int8_block,
        has_zeros=True,
    ),
    "int4_group": _Functions(encode.store_int4_group, formats.score_int4_group, formats.add_int4_group),
}


def unreadable_reason(form: RecordFormat) -> str | None:
    """None if there are kernels for both codecs, otherwise a sentence."""
    keys, values = form.format.keys.name, form.format.values.name
    if keys not in _FUNCTIONS or _FUNCTIONS[keys].score is None:
        return f"The Triton kernels have no K in {keys}."
    if values not in _FUNCTIONS or _FUNCTIONS[values].add is None:
        return f"The Triton kernels have no V in {values}."
    return None


@lru_cache(maxsize=1024)
def attend_records_constants(
    *,
    device: torch.device,
    dtype: torch.dtype,
    form: RecordFormat,
    rows: int,
    kv_heads: int,
    group: int,
    causal: bool,
    window: bool,
    softcap: bool,
    sinks: bool,
    mask: int,
    mask_rows: bool,
) -> tuple[dict[str, Any], Tile]:
    """Compile-time arguments of `attend_records_kernel`, all but SPLIT, and the tile that they are for.

    Args:
        device: Where the kernel will run; it must be the current one.
        dtype: Of queries.
        form: Of the records.
        rows: Query tokens x head group.
        kv_heads: Heads of K and V.
        group: Query heads per kv head.
        causal: As in `Attention`, here and below whether there is such a thing.
        window: Sliding window.
        softcap: Soft-capped scores.
        sinks: Attention sinks.
        mask: What `mask_kind` says.
        mask_rows: The mask differs between heads or queries.
    """
    keys, values = form.format.keys, form.format.values
    tile = choose_record_tile(
        rows=rows,
        head_dim=form.head_dim,
        v_head_dim=form.v_head_dim,
        itemsize=dtype.itemsize,
        code_bits=(keys.bits, values.bits),
        block_size=form.block_size,
        is_masked=mask != NO_MASK.value,
        mask_rows=mask_rows,
        generation=generation(),
    )
    v_dtype, v_terms = _weights(dtype, values)
    return {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD_DIM": form.head_dim,
        "V_HEAD_DIM": form.v_head_dim,
        "BLOCK_SIZE": form.block_size,
        "K_ROW_BYTES": keys.row_bytes(form.head_dim),
        "V_ROW_BYTES": values.row_bytes(form.v_head_dim),
        **_layout(form),
        "K_DTYPE": tl.float32 if dtype == torch.float32 else tl.float16,
        "V_DTYPE": v_dtype,
        "V_TERMS": v_terms,
        "V_ZEROS": _FUNCTIONS[values.name].has_zeros,
        "M": tile.queries,
        "N": tile.tokens,
        "D": padded(form.head_dim),
        "E": padded(form.v_head_dim),
        "MIN_TILES": tile.min_tiles,
        "CAUSAL": causal,
        "WINDOW": window,
        "SOFTCAP": softcap,
        "SINKS": sinks,
        "MASK": mask,
        "MASK_ROWS": mask_rows,
        "PRECISION": tile.precision,
        "WIDEN": INTERPRETED and v_dtype == tl.bfloat16,
        "SCORE": _FUNCTIONS[keys.name].score,
        "ADD": _FUNCTIONS[values.name].add,
        **_register_limit(keys, values, dtype, tile),
        **COMMON_OPTIONS,
    }, tile


def merge_records_constants(*, q_heads: int, form: RecordFormat, sinks: bool) -> dict[str, Any]:
    """Compile-time arguments of `merge_records_kernel`."""
    return {
        "Q_HEADS": q_heads,
        "V_HEAD_DIM": form.v_head_dim,
        "V_STEPS": _steps(form, "values"),
        "E": padded(form.v_head_dim),
        "S": _MERGED_SPLITS,
        "SINKS": sinks,
        **COMMON_OPTIONS,
    }


@lru_cache(maxsize=256)
def write_records_constants(
    *, form: RecordFormat, kv_heads: int, k_stride_t: int, v_stride_t: int, dense: bool, check: bool
) -> dict[str, Any]:
    """Compile-time arguments of `write_records_kernel`, and its warps."""
    widest = padded(max(form.head_dim, form.v_head_dim))
    heads = min(power_of_two(kv_heads), max(1, _WRITE_ELEMENTS // widest))
    threads = heads * padded(min(form.head_dim, form.v_head_dim)) // _WRITE_ELEMENTS_PER_THREAD
    return {
        "KV_HEADS": kv_heads,
        "HEAD_DIM": form.head_dim,
        "V_HEAD_DIM": form.v_head_dim,
        "BLOCK_SIZE": form.block_size,
        "K_STRIDE_T": k_stride_t,
        "V_STRIDE_T": v_stride_t,
        **_layout(form),
        "H": heads,
        "D": padded(form.head_dim),
        "E": padded(form.v_head_dim),
        "RECORDS": form.format.is_per_token,
        "DENSE": dense,
        "CHECK": check,
        "STORE_KEYS": _FUNCTIONS[form.format.keys.name].store,
        "STORE_VALUES": _FUNCTIONS[form.format.values.name].store,
        "num_warps": max(1, min(4, threads // (64 if generation() == "amd" else 32))),
        **COMMON_OPTIONS,
    }


@lru_cache(maxsize=256)
def encode_records_constants(*, form: RecordFormat, seal: bool, check: bool) -> dict[str, Any]:
    """Compile-time arguments of `encode_records_kernel`."""
    keys, values = form.format.keys, form.format.values
    tokens = max(1, _ENCODE_ELEMENTS // padded(max(form.head_dim, form.v_head_dim)))
    return {
        "HEAD_DIM": form.head_dim,
        "V_HEAD_DIM": form.v_head_dim,
        "BLOCK_SIZE": form.block_size,
        **_layout(form),
        "K_PER_TOKEN": keys.is_per_token,
        "V_PER_TOKEN": values.is_per_token,
        "T": min(form.block_size, tokens),
        "D": padded(form.head_dim),
        "E": padded(form.v_head_dim),
        "SEAL": seal,
        "CHECK": check,
        "K_BLOCK_PARAMS": _FUNCTIONS[keys.name].block_params,
        "V_BLOCK_PARAMS": _FUNCTIONS[values.name].block_params,
        "STORE_KEYS": _FUNCTIONS[keys.name].store,
        "STORE_VALUES": _FUNCTIONS[values.name].store,
        **COMMON_OPTIONS,
    }


def _register_limit(keys: Codec, values: Codec, dtype: torch.dtype, tile: Tile) -> dict[str, int]:
    """Left alone, NVIDIA's compiler spills a few registers to stay at 128, where more change nothing."""
    if INTERPRETED or generation() == "amd" or dtype == torch.float32:
        return {}
    if min(keys.bits, values.bits) == 4:
        return {"maxnreg": _ALL_REGISTERS} if tile.queries == 16 and keys.bits == 4 else {}
    return {"maxnreg": _THREE_PROGRAMS_REGISTERS if tile.queries == 16 else _ALL_REGISTERS}


def _layout(form: RecordFormat) -> dict[str, Any]:
    """Where things are in a record, and how they are transformed."""
    return {
        "V_CODES": form.value_codes,
        "K_PARAMS": form.key_params,
        "V_PARAMS": form.value_params,
        "K_STEPS": _steps(form, "keys"),
        "V_STEPS": _steps(form, "values"),
        "K_GROUP_SIZE": form.format.keys.group_size,
        "V_GROUP_SIZE": form.format.values.group_size,
    }


def _steps(form: RecordFormat, side: Side) -> int:
    """Steps of the rotation."""
    return part_size(form.dim(side)).bit_length() - 1 if form.codec(side).is_rotated else 0


def _weights(dtype: torch.dtype, values: Codec) -> tuple[Any, int]:
    """What codes of V become, and terms of it that make a weight.

    A weight times a scale may leave float16, but not bfloat16, which has 8 bits; float16 models want more.
    """
    if dtype == torch.float32:
        return tl.float32, 1
    if values.group_size > 1:
        return tl.float16, 1
    return tl.bfloat16, 1 if dtype == torch.bfloat16 else 2
