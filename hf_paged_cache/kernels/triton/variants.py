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
from .softmax_steps import ADDITIVE_MASK, BOOL_MASK, NO_MASK
from .tiles import HOPPER_SHARED_BYTES, Generation, Tile, choose_tile, padded, power_of_two

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Whether kernels run in Triton's interpreter, on the CPU."""

_COPY_ELEMENTS = 4096
_WRITE_ELEMENTS, _ENCODED_WRITE_ELEMENTS = 4096, 2048
_WRITE_ELEMENTS_PER_THREAD = 8
_ENCODE_ELEMENTS = 4096
_MERGED_SPLITS = 16
_THREE_PROGRAMS_REGISTERS, _ALL_REGISTERS = 168, 255

_COMMON_OPTIONS = {"enable_fp_fusion": True}
"""Of every launch. Tolerances are those of fused multiply-adds, whatever a Triton's default is."""


@dataclass(frozen=True, slots=True)
class PlainLayout:
    """Blocks that hold K and V in the model's dtype, as `RecordFormat` says what quantized ones hold.

    Attributes:
        block_size: Tokens per block.
        head_dim: Of K.
        v_head_dim: Of V.
        k_row: Elements from one token to the next in a block of K.
        v_row: The same in V.
    """

    block_size: int
    head_dim: int
    v_head_dim: int
    k_row: int
    v_row: int


Layout = PlainLayout | RecordFormat


@dataclass(frozen=True, slots=True)
class Side:
    """K or V as a kernel is compiled for it. Kernels that only write do without what stands last.

    Attributes:
        block_size: Tokens per block.
        dim: Head dim.
        row: From one token to the next: elements of a plain pool, bytes of codes.
        codes: Bytes from the record's beginning to the codes; 0 without records.
        params: The same to the parameters.
        steps: Of the rotation, 0 if there is none.
        group_size: Channels that share parameters, in codecs with groups.
        is_per_token: Whether tokens have parameters of their own.
        dtype: What codes become; None without records.
        terms: Of that dtype that make a weight.
        has_zeros: Whether the codec leaves zeros in `acc_zero`.
        has_hidden: Whether stored tokens may be hidden from all queries of a tile by a mask that differs
            between them; without records.
        has_units: Whether queries are brought between 1 and 2, because `dtype` may not hold them.
        precision: As in `Tile`.
        widen: Multiply in float32: the interpreter cannot multiply bfloat16, and cuts where a device rounds.
    """

    block_size: int
    dim: int
    row: int
    codes: int = 0
    params: int = 0
    steps: int = 0
    group_size: int = 1
    is_per_token: bool = True
    dtype: Any = None
    terms: int = 1
    has_zeros: bool = False
    has_hidden: bool = False
    has_units: bool = False
    precision: str = "ieee"
    widen: bool = False

    @property
    def padded(self) -> int:
        """Width of a tile."""
        return padded(self.dim)


@dataclass(frozen=True, slots=True)
class Rules:
    """Which tokens a query sees, and how, as the attention kernel is compiled for it.

    Attributes:
        causal: As in `Attention`, here and below whether there is such a thing.
        window: Sliding window.
        softcap: Soft-capped scores.
        sinks: Attention sinks.
        mask: What `mask_kind` says.
        mask_rows: The mask differs between the queries of a tile.
    """

    causal: bool
    window: bool
    softcap: bool
    sinks: bool
    mask: int
    mask_rows: bool


@dataclass(frozen=True, slots=True)
class _Functions:
    """What kernels get at compile time for one codec; None where it does not occur on that side."""

    store: Any
    score: Any = None
    add: Any = None
    block_params: Any = encoders.block_params_none
    has_zeros: bool = False


_PLAIN = _Functions(None, decoders.score_plain, decoders.add_plain)
_FUNCTIONS = {
    "int8_token": _Functions(encoders.store_int8_token, decoders.score_int8_token, decoders.add_int8_token),
    "fp8_token": _Functions(encoders.store_fp8_token, decoders.score_fp8_token, decoders.add_fp8_token),
    "int4_token": _Functions(encoders.store_int4_token, None, decoders.add_int4_token, has_zeros=True),
    "int4_channel": _Functions(
        encoders.store_int4_channel, decoders.score_int4_channel, None, encoders.block_params_int4_channel
    ),
    "int8_block": _Functions(
        encoders.store_int8_block,
        decoders.score_int8_block,
        decoders.add_int8_block,
        encoders.block_params_int8_block,
        has_zeros=True,
    ),
    "int4_group": _Functions(encoders.store_int4_group, decoders.score_int4_group, decoders.add_int4_group),
}


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
    keys, values = layout.format.keys.name, layout.format.values.name
    if keys not in _FUNCTIONS or _FUNCTIONS[keys].score is None:
        return f"The Triton kernels have no K in {keys}."
    if values not in _FUNCTIONS or _FUNCTIONS[values].add is None:
        return f"The Triton kernels have no V in {values}."
    return None


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
) -> tuple[dict[str, Any], Tile]:
    """Compile-time arguments of `attend_kernel`, and the tile that they are for.

    Args:
        device: Where the kernel will run; it must be the current one.
        dtype: Of queries.
        layout: Of the blocks.
        queries: Query tokens x head group.
        kv_heads: Heads of K and V.
        group: Query heads per kv head.
        rules: What queries see.
    """
    codecs = None if isinstance(layout, PlainLayout) else (layout.format.keys, layout.format.values)
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
    keys, values = (_PLAIN, _PLAIN) if codecs is None else (_FUNCTIONS[codec.name] for codec in codecs)
    return {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        **_read_sides(layout, dtype, tile.precision, rules.mask_rows),
        "RULES": rules,
        "M": tile.queries,
        "N": tile.tokens,
        "MIN_TILES": tile.min_tiles,
        "SCORE": keys.score,
        "ADD": values.add,
        **({} if codecs is None else _register_limit(*codecs, dtype, tile)),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **_COMMON_OPTIONS,
    }, tile


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

    Args:
        layout: Of the blocks.
        kv_heads: Heads of K and V.
        k_stride_t: Elements from one token to the next in blocks in the model's dtype.
        v_stride_t: The same in V.
        dense: Whether a quantized layer has residual blocks.
        check: Whether what cannot be stored is flagged.
    """
    keys, values = _sides(layout)
    stores = (None, None)
    elements = _WRITE_ELEMENTS
    if isinstance(layout, RecordFormat):
        elements = _ENCODED_WRITE_ELEMENTS
        stores = tuple(_FUNCTIONS[c.name].store for c in (layout.format.keys, layout.format.values))
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
    k_functions, v_functions = (_FUNCTIONS[c.name] for c in (layout.format.keys, layout.format.values))
    return {
        "K": keys,
        "V": values,
        "T": min(layout.block_size, max(1, _ENCODE_ELEMENTS // max(keys.padded, values.padded))),
        "SEAL": seal,
        "CHECK": check,
        "K_BLOCK_PARAMS": k_functions.block_params,
        "V_BLOCK_PARAMS": v_functions.block_params,
        "STORE_KEYS": k_functions.store,
        "STORE_VALUES": v_functions.store,
        **_COMMON_OPTIONS,
    }


def copy_constants() -> dict[str, Any]:
    """Compile-time arguments of `copy_kernel`."""
    return {"CHUNK": _COPY_ELEMENTS, **_COMMON_OPTIONS}


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
            has_zeros=_FUNCTIONS[layout.format.values.name].has_zeros,
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
