"""From quantized blocks to kernel launches. Nothing here waits for the device.

Launches per layer and decode step: one write, `attend_records_kernel`, and where a row's tokens are split
`merge_records_kernel`. Where some blocks lie in the model's dtype, `attend_kernel` has a launch for them.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from hf_paged_cache.formats import RecordFormat

from .attend_records import attend_records_kernel, merge_records_kernel
from .launch import attend_blocks
from .move_records import encode_records_kernel, write_records_kernel
from .question import Question, last_contiguous, mask_of, on, processors
from .record_variants import (
    attend_records_constants,
    encode_records_constants,
    merge_records_constants,
    write_records_constants,
)
from .tiles import DECODE_QUERIES, choose_splits, splits_of
from .variants import is_new, started


def write_tokens(
    form: RecordFormat,
    records: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    *,
    fault: torch.Tensor | None,
    dense: bool,
    offsets: torch.Tensor | None = None,
) -> None:
    """Store new tokens at the end of every row; those of records only if the format is per token.

    Args:
        form: What the bytes of the records mean.
        records: uint8 `[num_blocks, kv_heads, nbytes]`, changed in place.
        keys: `[num_slots, kv_heads, block_size, head_dim]`, changed in place.
        values: `[num_slots, kv_heads, block_size, v_head_dim]`, changed in place.
        table: int32 `[batch, columns]`.
        lengths: int32 `[batch]`: tokens of each row, the new ones included.
        new_keys: `[batch, kv_heads, new_tokens, head_dim]`.
        new_values: `[batch, kv_heads, new_tokens, v_head_dim]`.
        fault: See `LayerBlocks`.
        dense: Whether some of the tokens may belong to slots.
        offsets: None, or int32 `[batch]`: see `LayerBlocks`.
    """
    batch, kv_heads, new_tokens, _ = new_keys.shape
    new_keys, new_values = last_contiguous(new_keys), last_contiguous(new_values)
    constants = write_records_constants(
        form=form,
        kv_heads=kv_heads,
        k_stride_t=keys.stride(2),
        v_stride_t=values.stride(2),
        dense=dense,
        check=fault is not None,
    )
    with on(records.device):
        if dense and is_new((form, keys.dtype, "seal")):
            _seal(form, records, keys, values, lengths, lengths, compile_only=True)
        write_records_kernel[(new_tokens, batch, -(-kv_heads // constants["H"]))](
            records,
            keys if dense else new_keys,
            values if dense else new_values,
            new_keys,
            new_values,
            table,
            lengths,
            lengths if offsets is None else offsets,
            table if fault is None else fault,
            *records.stride()[:2],
            *keys.stride()[:2],
            *values.stride()[:2],
            *new_keys.stride()[:3],
            *new_values.stride()[:3],
            table.stride(0),
            table.shape[1],
            new_tokens,
            PADDED=offsets is not None,
            **constants,
        )


def write_blocks(
    form: RecordFormat,
    records: torch.Tensor,
    table: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    start: int,
    *,
    fault: torch.Tensor | None,
    offsets: torch.Tensor | None = None,
) -> None:
    """Encode the new tokens that fill whole blocks; entries of slots are passed over.

    Args:
        form: What the bytes of the records mean.
        records: uint8 `[num_blocks, kv_heads, nbytes]`, changed in place.
        table: int32 `[batch, columns]`.
        new_keys: `[batch, kv_heads, new_tokens, head_dim]`.
        new_values: `[batch, kv_heads, new_tokens, v_head_dim]`.
        start: Column of the first new token.
        fault: See `LayerBlocks`.
        offsets: None, or int32 `[batch]`: see `LayerBlocks`.
    """
    new_keys, new_values = last_contiguous(new_keys), last_contiguous(new_values)
    batch, kv_heads = new_keys.shape[:2]
    with on(records.device):
        encode_records_kernel[(new_keys.shape[2] // form.block_size, kv_heads, batch)](
            records,
            new_keys,
            new_values,
            table,
            table,
            table if offsets is None else offsets,
            table if fault is None else fault,
            *records.stride()[:2],
            *new_keys.stride()[:3],
            *new_values.stride()[:3],
            table.stride(0),
            table.shape[1],
            start + new_keys.shape[2],
            start,
            PADDED=offsets is not None,
            **encode_records_constants(form=form, seal=False, check=fault is not None),
        )


def seal(
    form: RecordFormat,
    records: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    """Encode blocks of a pool, all layers at once: `records[ids[i]]` becomes what `keys[slots[i]]` holds.

    Args:
        form: What the bytes of the records mean.
        records: uint8 `[num_blocks, layers, kv_heads, nbytes]`, changed in place.
        keys: `[num_slots, layers, kv_heads, block_size, head_dim]`.
        values: `[num_slots, layers, kv_heads, block_size, v_head_dim]`.
        slots: int32 `[blocks]`.
        ids: int32 `[blocks]`.
    """
    heads = records.shape[1] * records.shape[2]
    flat = records.view(records.shape[0], heads, records.shape[3])
    keys, values = (x.view(x.shape[0], heads, *x.shape[3:]) for x in (keys, values))
    with on(records.device):
        _seal(form, flat, keys, values, slots, ids, compile_only=False)


def _seal(
    form: RecordFormat,
    records: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    ids: torch.Tensor,
    *,
    compile_only: bool,
) -> None:
    """As `seal`, with layers and heads in one dimension; a single layer has the same strides."""
    started(encode_records_kernel, (len(ids), records.shape[1], 1), compile_only=compile_only)(
        records,
        keys,
        values,
        ids,
        slots,
        ids,
        ids,
        *records.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        0,
        0,
        0,
        0,
        PADDED=False,
        **encode_records_constants(form=form, seal=True, check=False),
    )


def attend(
    form: RecordFormat,
    records: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    query: torch.Tensor,
    *,
    tokens: int,
    dense_columns: tuple[tuple[int, ...], ...],
    offsets: torch.Tensor | None = None,
    start: int,
    back: int,
    scale: float,
    mask: torch.Tensor | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    queries_are_last: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend the tokens `[start, length - back)` of every row.

    Args:
        form: What the bytes of the records mean.
        records: uint8 `[num_blocks, kv_heads, nbytes]`.
        keys: `[num_slots, kv_heads, block_size, head_dim]`.
        values: `[num_slots, kv_heads, block_size, v_head_dim]`.
        table: int32 `[batch, columns]`; columns past the end of a row may hold anything.
        lengths: int32 `[batch]`: columns of each row, those before it begins included.
        query: `[batch, q_heads, q_tokens, head_dim]`.
        tokens: As in `launch.attend`, as all that follow.
        dense_columns: Of every row, or once for all, the columns of the table whose entries are of slots;
            others among them do no harm.
        offsets: None, or int32 `[batch]`: see `LayerBlocks`.
        start: See there.
        back: See there.
        scale: See there.
        mask: See there.
        causal: See there.
        window: See there.
        softcap: See there.
        sinks: See there.
        queries_are_last: See there.

    Returns:
        `[batch, q_tokens, q_heads, v_head_dim]` in the query's dtype; float32 `[batch, q_heads, q_tokens]`,
        the natural log of the denominators, sinks included.
    """
    query = last_contiguous(query)
    mask, mask_rows = mask_of(mask, query.shape[0], query.shape[1], query.shape[2])
    q = Question(
        query, table, lengths, offsets, start, back, scale, mask, mask_rows, causal, window, softcap, sinks,
        queries_are_last,
    )  # fmt: skip
    out, lse = q.answers(form.v_head_dim)
    kv_heads = keys.shape[1]
    # Where rows begin later they have fewer columns than these; to try them for records does no harm.
    reached = set(range(start // form.block_size, -(-tokens // form.block_size)))
    with on(query.device):
        dense_splits = _dense_splits(max(map(len, dense_columns), default=0), form.block_size)
        is_all_dense = bool(reached and dense_splits) and all(reached.issubset(row) for row in dense_columns)
        splits, part, dense_part = 0, lse, lse  # scratch that is not touched
        constants, tile = attend_records_constants(dtype=query.dtype, form=form, **q.rules(kv_heads))
        programs = q.programs(kv_heads, tile)
        if not is_all_dense:
            splits = choose_splits(programs, q.seen(tokens), processors(query.device))
        is_part = splits > 1 or dense_splits > 0
        will_be_part = tile.queries == DECODE_QUERIES and (is_all_dense or not is_part)
        is_first = will_be_part and is_new((id(constants), "part"))
        if splits and is_part:
            part = q.scratch(splits, form.v_head_dim)
        for compile_only in (*[True] * is_first, *[False] * (splits > 0)):
            started(attend_records_kernel, (programs * splits,), compile_only=compile_only)(
                out,
                lse,
                part,
                query,
                records,
                table,
                lengths,
                lengths if offsets is None else offsets,
                lse if q.mask is None else q.mask,
                lse if sinks is None else sinks,
                *query.stride()[:3],
                *records.stride()[:2],
                table.stride(0),
                table.shape[1],
                *q.numbers(splits),
                PADDED=offsets is not None,
                SPLIT=is_part or compile_only,
                **constants,
                num_warps=tile.warps,
                num_stages=tile.stages,
            )
        if dense_splits:
            is_part = not is_all_dense or dense_splits > 1
            dense_part = q.scratch(dense_splits, form.v_head_dim) if is_part else lse
            constants, tile = q.constants(keys, values, form.block_size)
            columns = _on_device(query.device, dense_columns)
            for compile_only in (True, False) if is_first and not is_part else (False,):
                attend_blocks(
                    q, keys, values, constants, tile, out, lse, dense_part, dense_splits,
                    columns=columns, as_part=is_part or compile_only, compile_only=compile_only,
                )  # fmt: skip
        is_merged = splits > 1 or dense_splits > 1 or (splits > 0 and dense_splits > 0)
        for compile_only in (*[True] * (is_first and not is_merged), *[False] * is_merged):
            started(merge_records_kernel, q.merge_grid, compile_only=compile_only)(
                out,
                lse,
                part,
                dense_part,
                lse if sinks is None else sinks,
                query.shape[2],
                splits,
                dense_splits,
                **merge_records_constants(q_heads=query.shape[1], form=form, sinks=sinks is not None),
            )
    return q.rounded(out), lse


def _dense_splits(columns: int, block_size: int) -> int:
    return splits_of(columns * block_size)


@lru_cache(maxsize=64)
def _on_device(device: torch.device, columns: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    """int32 `[rows, columns]` on a device, -1 past the last of a row.

    They are the same for all layers, and where rows begin alike for as many steps as a block has tokens.
    """
    most = max(map(len, columns))
    padded = [[*row, *[-1] * (most - len(row))] for row in columns]
    tensor = torch.tensor(padded, dtype=torch.int32, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)
