"""Compile-time arguments of the kernels: the one place that launches take them from.

The ahead-of-time gate goes through launches, and so gets the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal

import torch
import triton.language as tl
from triton.runtime import driver

from hf_paged_cache.formats import Codec, RecordFormat
from hf_paged_cache.formats.rotation import part_size

from . import decoders, encoders
from .attend import ADDITIVE_MASK, BOOL_MASK, NO_MASK
from .tiles import HOPPER_SHARED_BYTES, Generation, Tile, choose_tile, padded, power_of_two

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Whether kernels run in Triton's interpreter, on the CPU."""

_WRITE_ELEMENTS, _ENCODED_WRITE_ELEMENTS = 4096, 2048
_WRITE_ELEMENTS_PER_THREAD = 8
_ENCODE_ELEMENTS = 4096
_MERGED_SPLITS = 16
_THREE_PROGRAMS_REGISTERS, _ALL_REGISTERS = 168, 255

_COMMON_OPTIONS = {"enable_fp_fusion": True}
"""Of every launch. Tolerances are those of fused multiply-adds, whatever a Triton's default is."""


@dataclass(frozen=True, slots=True)
class PlainLayout:
    """Blocks that hold K and V in the model's dtype, as `RecordFormat` says what quantized ones hold."""

    block_size: int
    head_dim: int
    v_head_dim: int
    k_row: int  # elements from one token to the next in a block of K
    v_row: int


Layout = PlainLayout | RecordFormat


@dataclass(frozen=True, slots=True)
class Side:
    """K or V as a kernel is compiled for it. Kernels that only write do without what stands last."""

    block_size: int
    dim: int
    row: int  # from one token to the next: elements of a plain pool, bytes of codes
    codes: int = 0  # bytes from the record's beginning to the codes; 0 without records
    params: int = 0  # the same to the parameters
    steps: int = 0  # of the rotation, 0 if there is none
    group_size: int = 1
    is_per_token: bool = True
    dtype: Any = None  # what codes become; None without records
    terms: int = 1  # of that dtype that make a weight
    has_zeros: bool = False  # whether tokens have zeros apart from their values
    has_hidden: bool = False  # without records: a mask that differs between queries may hide a token from all
    has_units: bool = False  # whether queries are brought between 1 and 2, because `dtype` may not hold them
    precision: str = "ieee"  # as in `Tile`
    widen: bool = False  # to float32: the interpreter cannot multiply bfloat16, and cuts where others round

    @property
    def padded(self) -> int:
        """Width of a tile."""
        return padded(self.dim)


@dataclass(frozen=True, slots=True)
class Rules:
    """Which tokens a query sees, and how, as the attention kernel is compiled for it: see `Attention`."""

    causal: bool
    window: bool  # whether there is one, here and below
    softcap: bool
    sinks: bool
    mask: int  # what `mask_kind` says
    mask_rows: bool  # whether the mask differs between the queries of a tile


_compiled_ahead: set[object] = set()


def is_new(key: object) -> bool:
    """Whether a kind of decode step is met for the first time.

    Then what it will need later is compiled too, and not in the middle of a generation.
    """
    if INTERPRETED or key in _compiled_ahead:
        return False
    _compiled_ahead.add(key)
    return True


def started(kernel: Any, grid: tuple[int, ...], *, compile_only: bool = False) -> Callable[..., object]:
    """What launches a kernel when it is called with arguments, or only compiles it for them."""
    return partial(kernel.warmup, grid=grid) if compile_only else kernel[grid]


def unreadable_reason(layout: RecordFormat) -> str | None:
    """None if there are kernels for both codecs, otherwise a sentence."""
    keys, values = layout.format.keys, layout.format.values
    if _function("score", keys) is None:
        return f"The Triton kernels have no K in {keys.name}."
    if _function("values", values) is None:
        return f"The Triton kernels have no V in {values.name}."
    return None


def _function(step: Literal["store", "block_params", "score", "values"], codec: Codec | None) -> Any:
    """The function of that name for a codec, or for plain pools if it is None; None if there is none."""
    module = encoders if step in ("store", "block_params") else decoders
    return getattr(module, f"{step}_{'plain' if codec is None else codec.name}", None)


def mask_kind(mask: torch.Tensor | None) -> int:
    """Which kind of mask the attention kernel is compiled for."""
    if mask is None:
        return int(NO_MASK.value)
    return int(BOOL_MASK.value if mask.dtype in (torch.bool, torch.uint8) else ADDITIVE_MASK.value)


def generation() -> Generation:
    """The kind of the current device."""
    if INTERPRETED:
        return "ampere"
    active = driver.active
    if active.get_current_target().backend != "cuda":
        return "amd"
    properties = active.utils.get_device_properties(active.get_current_device())
    return "ampere" if properties["max_shared_mem"] < HOPPER_SHARED_BYTES else "hopper"


@lru_cache(maxsize=1024)
def attend_constants(
    *,
    device: torch.device,
    dtype: torch.dtype,
    layout: Layout,
    queries: int,
    kv_heads: int,
    group: int,
    rules: Rules,
) -> dict[str, Any]:
    """Compile-time arguments of `attend_kernel` on the current device.

    `dtype` is that of queries, of which there are `queries`: query tokens x head group.
    """
    codecs = None if isinstance(layout, PlainLayout) else (layout.format.keys, layout.format.values)
    keys, values = codecs or (None, None)
    tile = choose_tile(
        queries=queries,
        head_dim=layout.head_dim,
        v_head_dim=layout.v_head_dim,
        itemsize=dtype.itemsize,
        block_size=layout.block_size,
        is_masked=rules.mask != NO_MASK.value,
        mask_rows=rules.mask_rows,
        generation=generation(),
        code_bits=codecs and (codecs[0].bits, codecs[1].bits),
    )
    return {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        **_read_sides(layout, dtype, tile.precision, rules.mask_rows),
        "RULES": rules,
        "M": tile.queries,
        "N": tile.tokens,
        "MIN_TILES": tile.min_tiles,
        "SCORE": _function("score", keys),
        "VALUES": _function("values", values),
        **({} if codecs is None else _register_limit(*codecs, dtype, tile)),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **_COMMON_OPTIONS,
    }


@lru_cache(maxsize=256)
def merge_constants(*, q_heads: int, layout: Layout, sinks: bool) -> dict[str, Any]:
    """Compile-time arguments of `merge_kernel`."""
    return {
        "Q_HEADS": q_heads,
        "V_HEAD_DIM": layout.v_head_dim,
        "V_STEPS": _sides(layout)[1].steps,
        "E": padded(layout.v_head_dim),
        "S": _MERGED_SPLITS,
        "SINKS": sinks,
        "QUANTIZED": isinstance(layout, RecordFormat),
        **_COMMON_OPTIONS,
    }


@lru_cache(maxsize=256)
def write_constants(
    *, layout: Layout, kv_heads: int, k_stride_t: int, v_stride_t: int, dense: bool, check: bool
) -> dict[str, Any]:
    """Compile-time arguments of `write_kernel`, and its warps: no more than have 16 bytes a thread.

    Strides are those of blocks in the model's dtype; `dense` says whether a quantized layer has any.
    """
    keys, values = _sides(layout)
    stores = (None, None)
    elements = _WRITE_ELEMENTS
    if isinstance(layout, RecordFormat):
        elements = _ENCODED_WRITE_ELEMENTS
        stores = _function("store", layout.format.keys), _function("store", layout.format.values)
    heads = min(power_of_two(kv_heads), max(1, elements // max(keys.padded, values.padded)))
    threads = heads * min(keys.padded, values.padded) // _WRITE_ELEMENTS_PER_THREAD
    return {
        "KV_HEADS": kv_heads,
        "H": heads,
        "K": keys,
        "V": values,
        "K_STRIDE_T": k_stride_t,
        "V_STRIDE_T": v_stride_t,
        "QUANTIZED": isinstance(layout, RecordFormat),
        "RECORDS": isinstance(layout, RecordFormat) and layout.format.is_per_token,
        "DENSE": dense,
        "CHECK": check,
        "STORE_KEYS": stores[0],
        "STORE_VALUES": stores[1],
        "num_warps": max(1, min(4, threads // (64 if generation() == "amd" else 32))),
        **_COMMON_OPTIONS,
    }


@lru_cache(maxsize=256)
def encode_constants(*, layout: RecordFormat, seal: bool, check: bool) -> dict[str, Any]:
    """Compile-time arguments of `encode_kernel`."""
    keys, values = _sides(layout)
    k_codec, v_codec = layout.format.keys, layout.format.values
    return {
        "K": keys,
        "V": values,
        "T": min(layout.block_size, max(1, _ENCODE_ELEMENTS // max(keys.padded, values.padded))),
        "SEAL": seal,
        "CHECK": check,
        "K_BLOCK_PARAMS": _function("block_params", k_codec),
        "V_BLOCK_PARAMS": _function("block_params", v_codec),
        "STORE_KEYS": _function("store", k_codec),
        "STORE_VALUES": _function("store", v_codec),
        **_COMMON_OPTIONS,
    }


def _register_limit(keys: Codec, values: Codec, dtype: torch.dtype, tile: Tile) -> dict[str, int]:
    """Left alone, NVIDIA's compiler spills a few registers to stay at 128, where more change nothing."""
    if INTERPRETED or generation() == "amd" or dtype == torch.float32:
        return {}
    if min(keys.bits, values.bits) == 4:
        return {"maxnreg": _ALL_REGISTERS} if tile.queries == 16 and keys.bits == 4 else {}
    return {"maxnreg": _THREE_PROGRAMS_REGISTERS if tile.queries == 16 else _ALL_REGISTERS}


def _sides(layout: Layout) -> tuple[Side, Side]:
    """Where K and V are, for kernels that write them."""
    if isinstance(layout, PlainLayout):
        return (
            Side(layout.block_size, layout.head_dim, layout.k_row),
            Side(layout.block_size, layout.v_head_dim, layout.v_row),
        )
    return _side(layout, "keys"), _side(layout, "values")


def _side(layout: RecordFormat, name: Literal["keys", "values"]) -> Side:
    codec, dim = layout.codec(name), layout.dim(name)
    codes, params = layout.offsets(name)
    return Side(
        block_size=layout.block_size,
        dim=dim,
        row=codec.row_bytes(dim),
        codes=codes,
        params=params,
        steps=part_size(dim).bit_length() - 1 if codec.is_rotated else 0,
        group_size=codec.group_size,
        is_per_token=codec.is_per_token,
    )


def _read_sides(layout: Layout, dtype: torch.dtype, precision: str, mask_rows: bool) -> dict[str, Side]:
    """K and V for the kernel that reads them."""
    keys, values = (replace(side, precision=precision) for side in _sides(layout))
    if isinstance(layout, PlainLayout):
        widen = INTERPRETED and dtype == torch.bfloat16
        return {"K": replace(keys, widen=widen), "V": replace(values, widen=widen, has_hidden=mask_rows)}
    is_half = dtype != torch.float32
    v_dtype, v_terms = _weights(dtype, layout.format.values)
    return {
        "K": replace(keys, dtype=tl.float16 if is_half else tl.float32, has_units=is_half),
        "V": replace(
            values,
            dtype=v_dtype,
            terms=v_terms,
            has_zeros=layout.format.values.name in decoders.WITH_ZEROS,
            widen=INTERPRETED and v_dtype == tl.bfloat16,
        ),
    }


def _weights(dtype: torch.dtype, values: Codec) -> tuple[Any, int]:
    """What codes of V become, and terms of it that make a weight.

    A weight times a scale may leave float16, but not bfloat16, which has 8 bits; float16 models want more.
    """
    if dtype == torch.float32:
        return tl.float32, 1
    if values.group_size > 1:
        return tl.float16, 1
    return tl.bfloat16, 1 if dtype == torch.bfloat16 else 2
