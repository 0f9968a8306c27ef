"""From tensors to kernel launches. Nothing here waits for the device.

Launches per layer and decode step: `write`, `attend`, and where a row's tokens are split `merge`.
"""

from __future__ import annotations

from typing import Any

import torch

from .attend import attend_kernel, merge_kernel
from .move import copy_kernel, write_kernel
from .question import Question, last_contiguous, mask_of, on, processors
from .tiles import DECODE_QUERIES, Tile, choose_splits
from .variants import (
    INTERPRETED,
    attend_constants,
    copy_constants,
    is_new,
    merge_constants,
    started,
    write_constants,
)

__all__ = [
    "INTERPRETED",
    "attend",
    "attend_blocks",
    "attend_constants",
    "attend_dense",
    "copy_blocks",
    "device_ids",
    "write",
]

_DENSE_BLOCK_SIZE = 1 << 30
"""Dense K and V are read as one block a row, which no row outgrows."""


def write(
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    *,
    offsets: torch.Tensor | None = None,
) -> None:
    """Store new tokens at the end of every row.

    Args:
        keys: `[num_blocks, kv_heads, block_size, head_dim]`, changed in place.
        values: `[num_blocks, kv_heads, block_size, v_head_dim]`, changed in place.
        table: int32 `[batch, columns]`.
        lengths: int32 `[batch]`: tokens of each row, the new ones included.
        new_keys: `[batch, kv_heads, new_tokens, head_dim]`.
        new_values: `[batch, kv_heads, new_tokens, v_head_dim]`.
        offsets: None, or int32 `[batch]`: see `LayerBlocks`.
    """
    batch, kv_heads, new_tokens, _ = new_keys.shape
    new_keys, new_values = last_contiguous(new_keys), last_contiguous(new_values)
    constants = write_constants(
        kv_heads=kv_heads,
        head_dim=keys.shape[3],
        v_head_dim=values.shape[3],
        block_size=keys.shape[2],
        k_stride_t=keys.stride(2),
        v_stride_t=values.stride(2),
    )
    grid = (new_tokens, batch, -(-kv_heads // constants["H"]))
    with on(keys.device):
        write_kernel[grid](
            keys,
            values,
            new_keys,
            new_values,
            table,
            lengths,
            lengths if offsets is None else offsets,
            keys.stride(0),
            keys.stride(1),
            values.stride(0),
            values.stride(1),
            *new_keys.stride()[:3],
            *new_values.stride()[:3],
            table.stride(0),
            table.shape[1],
            new_tokens,
            PADDED=offsets is not None,
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
    offsets: torch.Tensor | None = None,
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
        lengths: int32 `[batch]`: columns of each row, those before it begins included.
        tokens: Upper bound of the lengths, which decides on splits.
        scale: Factor on q·k.
        offsets: None, or int32 `[batch]`: see `LayerBlocks`.
        start: First column attended.
        back: Columns at the end of each row that are left out.
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
    query = last_contiguous(query)
    mask, mask_rows = mask_of(mask, query.shape[0], query.shape[1], query.shape[2])
    question = Question(
        query, table, lengths, offsets, start, back, scale, mask, mask_rows, causal, window, softcap, sinks,
        queries_are_last,
    )  # fmt: skip
    with on(query.device):
        constants, tile = question.constants(keys, values, block_size or keys.shape[2])
        may_split = splits is None
        if splits is None:
            programs = question.programs(keys.shape[1], tile)
            splits = choose_splits(programs, question.seen(tokens), processors(query.device))
        out, lse = question.answers(values.shape[3])
        part = question.scratch(splits, values.shape[3]) if splits > 1 else lse  # not touched without splits
        is_short = (
            may_split and splits == 1 and tile.queries == DECODE_QUERIES and is_new((id(constants), "split"))
        )
        for compile_only in (True, False) if is_short else (False,):
            parts = 2 if compile_only else splits
            attend_blocks(
                question, keys, values, constants, tile, out, lse, part, parts, compile_only=compile_only
            )
            if parts == 1:
                continue
            started(merge_kernel, question.merge_grid, compile_only=compile_only)(
                out,
                lse,
                part,
                lse if sinks is None else sinks,
                query.shape[2],
                parts,
                **merge_constants(
                    q_heads=query.shape[1], v_head_dim=values.shape[3], sinks=sinks is not None
                ),
            )
    return question.rounded(out), lse


def attend_blocks(
    question: Question,
    keys: torch.Tensor,
    values: torch.Tensor,
    constants: dict[str, Any],
    tile: Tile,
    out: torch.Tensor,
    lse: torch.Tensor,
    part: torch.Tensor,
    splits: int,
    *,
    columns: torch.Tensor | None = None,
    as_part: bool | None = None,
    compile_only: bool = False,
) -> None:
    """Launch `attend_kernel` on the current device.

    Args:
        question: What is asked.
        keys: As in `attend`.
        values: As in `attend`.
        constants: Compile-time arguments.
        tile: What they are for.
        out: Written, and `lse`, if this is the whole answer.
        lse: See `out`.
        part: Written otherwise.
        splits: Programs that share a row's tokens.
        columns: int32 `[batch or 1, columns]`, of each row the only columns of the table to attend, -1 past
            the last: entries of slots, see `dense_entry`; others are passed over.
        as_part: Whether this is not the whole answer; None: if there are splits.
        compile_only: Launch nothing.
    """
    q = question
    grid = (q.programs(keys.shape[1], tile) * splits,)
    started(attend_kernel, grid, compile_only=compile_only)(
        out,
        lse,
        part,
        q.query,
        keys,
        values,
        q.table,
        q.lengths,
        q.lengths if q.offsets is None else q.offsets,
        lse if q.mask is None else q.mask,
        lse if q.sinks is None else q.sinks,
        *q.query.stride()[:3],
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        q.table.stride(0),
        q.table.shape[1],
        *q.numbers(splits),
        q.table if columns is None else columns,
        0 if columns is None or columns.shape[0] == 1 else columns.stride(0),
        0 if columns is None else columns.shape[1],
        COLUMNS=columns is not None,
        PADDED=q.offsets is not None,
        SPLIT=splits > 1 if as_part is None else as_part,
        **constants,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def attend_dense(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend dense K and V `[batch, kv_heads, tokens, head_dim]`; all else is as in `attend`."""
    batch, _, tokens, _ = keys.shape
    rows = torch.arange(batch, dtype=torch.int32, device=keys.device)
    lengths = torch.full_like(rows, tokens)
    keys, values = last_contiguous(keys), last_contiguous(values)
    return attend(
        query, keys, values, rows[:, None], lengths, tokens=tokens, block_size=_DENSE_BLOCK_SIZE, **options
    )


def copy_blocks(pool: torch.Tensor, src: list[int], dst: list[int]) -> None:
    """Copy whole blocks inside a contiguous pool; no block is both in `src` and in `dst`."""
    ids = device_ids([src, dst], pool.device)
    constants = copy_constants()
    with on(pool.device):
        copy_kernel[(len(src), -(-pool.stride(0) // constants["CHUNK"]))](
            pool, ids[0], ids[1], pool.stride(0), **constants
        )


def device_ids(ids: list[list[int]], device: torch.device) -> torch.Tensor:
    """Integers as an int32 tensor, sent without waiting for the device."""
    tensor = torch.tensor(ids, dtype=torch.int32, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)
