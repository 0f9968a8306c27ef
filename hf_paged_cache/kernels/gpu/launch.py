"""From tensors to kernel launches. Nothing here waits for the device.

Launches per layer and decode step: `write`, `attend`, and where a row's tokens are split `merge`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from .attend import attend_kernel, merge_kernel
from .move import copy_kernel, write_kernel
from .tiles import choose_splits
from .variants import (
    INTERPRETED,
    attend_constants,
    copy_constants,
    mask_kind,
    merge_constants,
    write_constants,
)

_INTERPRETED_PROCESSORS = 8
_DENSE_BLOCK_SIZE = 1 << 30
"""Dense K and V are read as one block a row, which no row outgrows."""


def write(
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
) -> None:
    """Store new tokens at the end of every row.

    Args:
        keys: `[num_blocks, kv_heads, block_size, head_dim]`, changed in place.
        values: `[num_blocks, kv_heads, block_size, v_head_dim]`, changed in place.
        table: int32 `[batch, columns]`.
        lengths: int32 `[batch]`: tokens of each row, the new ones included.
        new_keys: `[batch, kv_heads, new_tokens, head_dim]`.
        new_values: `[batch, kv_heads, new_tokens, v_head_dim]`.
    """
    batch, kv_heads, new_tokens, _ = new_keys.shape
    new_keys, new_values = _last_contiguous(new_keys), _last_contiguous(new_values)
    constants = write_constants(
        kv_heads=kv_heads,
        head_dim=keys.shape[3],
        v_head_dim=values.shape[3],
        block_size=keys.shape[2],
        k_stride_t=keys.stride(2),
        v_stride_t=values.stride(2),
    )
    grid = (new_tokens, batch, -(-kv_heads // constants["H"]))
    with _on(keys.device):
        write_kernel[grid](
            keys,
            values,
            new_keys,
            new_values,
            table,
            lengths,
            keys.stride(0),
            keys.stride(1),
            values.stride(0),
            values.stride(1),
            *new_keys.stride()[:3],
            *new_values.stride()[:3],
            table.stride(0),
            table.shape[1],
            new_tokens,
            **constants,
        )


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    tokens: int,
    scale: float,
    start: int = 0,
    back: int = 0,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    queries_are_last: bool = True,
    block_size: int | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend the tokens `[start, length - back)` of every row; rows may differ in length.

    Args:
        query: `[batch, q_heads, q_tokens, head_dim]`.
        keys: `[num_blocks, kv_heads, block_size, head_dim]`.
        values: `[num_blocks, kv_heads, block_size, v_head_dim]`.
        table: int32 `[batch, columns]`; columns past the end of a row may hold anything.
        lengths: int32 `[batch]`: tokens stored of each row.
        tokens: Upper bound of the lengths, which decides on splits.
        scale: Factor on q·k.
        start: First token attended.
        back: Tokens at the end of each row that are left out.
        mask: None, or broadcastable to `[batch, q_heads, q_tokens, tokens]`, boolean or additive. Column 0 is
            token `start`, and there may be more columns than tokens.
        causal: Query i sees stored positions <= its own.
        window: None, or query at position p sees only positions > p - window.
        softcap: None, or c: score = c * tanh(score / c).
        sinks: None, or `[q_heads]`: a logit per head in the denominator only.
        queries_are_last: Query i stands at position `length - back - q_tokens + i`, otherwise at `length -
            back + i`.
        block_size: Tokens per block where that is not what the keys' shape says.
        splits: Programs that share a row's tokens, where another number than the best is wanted.

    Returns:
        `[batch, q_tokens, q_heads, v_head_dim]` in the query's dtype; float32 `[batch, q_heads, q_tokens]`,
        the natural log of the denominators, sinks included.
    """
    batch, q_heads, q_tokens, head_dim = query.shape
    kv_heads, v_head_dim = keys.shape[1], values.shape[3]
    query = _last_contiguous(query)
    mask, mask_rows = _mask_of(mask, batch, q_heads, q_tokens)
    with _on(query.device):
        constants, tile = attend_constants(
            device=query.device,
            dtype=keys.dtype,
            rows=q_tokens * (q_heads // kv_heads),
            kv_heads=kv_heads,
            group=q_heads // kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            block_size=block_size or keys.shape[2],
            k_stride_t=keys.stride(2),
            v_stride_t=values.stride(2),
            causal=causal,
            window=window is not None,
            softcap=softcap is not None,
            sinks=sinks is not None,
            mask=mask_kind(mask),
            mask_rows=mask_rows,
        )
    programs = batch * kv_heads * -(-q_tokens * (q_heads // kv_heads) // tile.queries)
    if splits is None:
        seen = tokens - start if window is None else min(tokens - start, window + q_tokens)
        splits = choose_splits(programs, seen, _processors(query.device))
    # The interpreter cuts bfloat16 where a device rounds, so there torch rounds.
    out_dtype = torch.float32 if INTERPRETED else query.dtype
    out = query.new_empty(batch, q_tokens, q_heads, v_head_dim, dtype=out_dtype)
    lse = query.new_empty(batch, q_heads, q_tokens, dtype=torch.float32)
    part = lse  # not touched without splits
    if splits > 1:
        part = lse.new_empty(splits * batch * q_heads * q_tokens * (v_head_dim + 2))
    with _on(query.device):
        attend_kernel[(programs * splits,)](
            out,
            lse,
            part,
            query,
            keys,
            values,
            table,
            lengths,
            lse if mask is None else mask,
            lse if sinks is None else sinks,
            *query.stride()[:3],
            keys.stride(0),
            keys.stride(1),
            values.stride(0),
            values.stride(1),
            table.stride(0),
            table.shape[1],
            *((0, 0, 0, 0) if mask is None else mask.stride()),
            q_tokens,
            splits,
            batch * q_heads * q_tokens,
            start,
            back,
            -q_tokens if queries_are_last else 0,
            window or 0,
            scale,
            softcap or 0.0,
            SPLIT=splits > 1,
            **constants,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if splits > 1:
            merge_kernel[(q_heads * q_tokens, batch)](
                out,
                lse,
                part,
                lse if sinks is None else sinks,
                q_tokens,
                splits,
                **merge_constants(q_heads=q_heads, v_head_dim=v_head_dim, sinks=sinks is not None),
            )
    return (out.to(query.dtype) if INTERPRETED else out), lse


def attend_dense(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend dense K and V `[batch, kv_heads, tokens, head_dim]`; all else is as in `attend`."""
    batch, _, tokens, _ = keys.shape
    rows = torch.arange(batch, dtype=torch.int32, device=keys.device)
    lengths = torch.full_like(rows, tokens)
    keys, values = _last_contiguous(keys), _last_contiguous(values)
    return attend(
        query, keys, values, rows[:, None], lengths, tokens=tokens, block_size=_DENSE_BLOCK_SIZE, **options
    )


def copy_blocks(pool: torch.Tensor, src: list[int], dst: list[int]) -> None:
    """Copy whole blocks inside a contiguous pool; no block is both in `src` and in `dst`."""
    ids = device_ids([src, dst], pool.device)
    constants = copy_constants()
    with _on(pool.device):
        copy_kernel[(len(src), -(-pool.stride(0) // constants["CHUNK"]))](
            pool, ids[0], ids[1], pool.stride(0), **constants
        )


def device_ids(ids: list[list[int]], device: torch.device) -> torch.Tensor:
    """Integers as an int32 tensor, sent without waiting for the device."""
    tensor = torch.tensor(ids, dtype=torch.int32, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)


def _mask_of(
    mask: torch.Tensor | None, batch: int, q_heads: int, q_tokens: int
) -> tuple[torch.Tensor | None, bool]:
    """The mask as the kernel reads it, and whether it differs between heads or queries."""
    if mask is None:
        return None, False
    mask = mask[(None,) * (4 - mask.dim())]
    differs = mask.shape[1] > 1 or mask.shape[2] > 1
    if mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    elif mask.dtype == torch.float64:
        mask = mask.float()
    if mask.shape[3] == 1:
        mask = mask.expand(-1, -1, -1, 2)  # a stride of 0, as in other dims that are broadcast
    return mask.expand(batch, q_heads, q_tokens, -1), differs


def _last_contiguous(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Kernels are launched on the current device, which need not be the one that holds the blocks."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)
