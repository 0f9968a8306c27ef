"""Compile-time arguments of the kernels: the one place that launches take them from.

The ahead-of-time gate goes through launches, and so gets the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from triton.runtime import driver

from .attend import ADDITIVE_MASK, BOOL_MASK, NO_MASK
from .formats import load_plain
from .tiles import HOPPER_SHARED_BYTES, Generation, Tile, choose_tile, padded, power_of_two

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Whether kernels run in Triton's interpreter, on the CPU."""

_COPY_ELEMENTS = 4096
_WRITE_ELEMENTS = 4096
_WRITE_ELEMENTS_PER_THREAD = 8
_MERGED_SPLITS = 16

COMMON_OPTIONS = {"enable_fp_fusion": True}
"""Of every launch. Tolerances are those of fused multiply-adds, whatever a Triton's default is."""


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
    rows: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    v_head_dim: int,
    block_size: int,
    k_stride_t: int,
    v_stride_t: int,
    causal: bool,
    window: bool,
    softcap: bool,
    sinks: bool,
    mask: int,
    mask_rows: bool,
) -> tuple[dict[str, Any], Tile]:
    """Compile-time arguments of `attend_kernel`, all but SPLIT, and the tile that they are for.

    Args:
        device: Where the kernel will run; it must be the current one.
        dtype: Of blocks and queries.
        rows: Query tokens x head group.
        kv_heads: Heads of K and V.
        group: Query heads per kv head.
        head_dim: Of K.
        v_head_dim: Of V.
        block_size: Tokens per block.
        k_stride_t: Elements from one token to the next in a block of K.
        v_stride_t: The same in V.
        causal: As in `Attention`, here and below whether there is such a thing.
        window: Sliding window.
        softcap: Soft-capped scores.
        sinks: Attention sinks.
        mask: What `mask_kind` says.
        mask_rows: The mask differs between heads or queries.
    """
    tile = choose_tile(
        rows=rows,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        itemsize=dtype.itemsize,
        block_size=block_size,
        is_masked=mask != NO_MASK.value,
        mask_rows=mask_rows,
        generation=generation(),
    )
    return {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "V_HEAD_DIM": v_head_dim,
        "BLOCK_SIZE": block_size,
        "K_STRIDE_T": k_stride_t,
        "V_STRIDE_T": v_stride_t,
        "M": tile.queries,
        "N": tile.tokens,
        "D": padded(head_dim),
        "E": padded(v_head_dim),
        "MIN_TILES": tile.min_tiles,
        "CAUSAL": causal,
        "WINDOW": window,
        "SOFTCAP": softcap,
        "SINKS": sinks,
        "MASK": mask,
        "MASK_ROWS": mask_rows,
        "PRECISION": tile.precision,
        "WIDEN": INTERPRETED and dtype == torch.bfloat16,
        "LOAD_KEYS": load_plain,
        "LOAD_VALUES": load_plain,
        **COMMON_OPTIONS,
    }, tile


def merge_constants(*, q_heads: int, v_head_dim: int, sinks: bool) -> dict[str, Any]:
    """Compile-time arguments of `merge_kernel`."""
    return {
        "Q_HEADS": q_heads,
        "V_HEAD_DIM": v_head_dim,
        "E": padded(v_head_dim),
        "S": _MERGED_SPLITS,
        "SINKS": sinks,
        **COMMON_OPTIONS,
    }


@lru_cache(maxsize=256)
def write_constants(
    *, kv_heads: int, head_dim: int, v_head_dim: int, block_size: int, k_stride_t: int, v_stride_t: int
) -> dict[str, Any]:
    """Compile-time arguments of `write_kernel`, and its warps: no more than have 16 bytes a thread."""
    heads = min(power_of_two(kv_heads), max(1, _WRITE_ELEMENTS // padded(max(head_dim, v_head_dim))))
    threads = heads * padded(min(head_dim, v_head_dim)) // _WRITE_ELEMENTS_PER_THREAD
    return {
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "V_HEAD_DIM": v_head_dim,
        "BLOCK_SIZE": block_size,
        "K_STRIDE_T": k_stride_t,
        "V_STRIDE_T": v_stride_t,
        "H": heads,
        "D": padded(head_dim),
        "E": padded(v_head_dim),
        "num_warps": max(1, min(4, threads // (64 if generation() == "amd" else 32))),
        **COMMON_OPTIONS,
    }


def copy_constants() -> dict[str, Any]:
    """Compile-time arguments of `copy_kernel`."""
    return {"CHUNK": _COPY_ELEMENTS, **COMMON_OPTIONS}
