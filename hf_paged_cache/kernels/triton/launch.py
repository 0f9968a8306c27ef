"""From tensors to kernel launches. Nothing here waits for the device.

Launches per layer and decode step:

```
               plain pool                   quantized
write          write_kernel                 write_kernel; encode_kernel where tokens fill whole blocks
attend         attend_kernel                attend_kernel, and once more for residual blocks
               merge_kernel where rows are split, or where there were both
seal                                        encode_kernel, all layers at once
```
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from hf_paged_cache.kernels.call import Attention, LayerBlocks, on_device

from .attend import attend_kernel, merge_kernel
from .move import copy_kernel, encode_kernel, write_kernel
from .question import Question, last_contiguous, mask_of, on, processors
from .tiles import DECODE_QUERIES, choose_splits, splits_of
from .variants import Layout, PlainLayout, encode_constants, is_new, merge_constants, started, write_constants

if TYPE_CHECKING:
    from hf_paged_cache.formats import RecordFormat

_DENSE_BLOCK_SIZE = 1 << 30  # dense K and V are read as one block a row, which no row outgrows
_COPY_ELEMENTS = 4096


def write(
    blocks: LayerBlocks,
    lengths: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    *,
    dense: bool = True,
) -> None:
    """Store new tokens at the end of every row; those of records only if the format is per token.

    Shapes are as in `Backend.write`. `lengths`, int32 `[batch]`, are the tokens of each row, the new ones
    included; `dense` says whether some of them may belong to residual blocks of a quantized layer.
    """
    batch, kv_heads, new_tokens, _ = new_keys.shape
    new_keys, new_values = last_contiguous(new_keys), last_contiguous(new_values)
    keys, values, table, layout = blocks.keys, blocks.values, blocks.table, blocks.layout
    records = keys if blocks.records is None else blocks.records
    constants = write_constants(
        layout=layout or _plain(blocks),
        kv_heads=kv_heads,
        k_stride_t=keys.stride(2),
        v_stride_t=values.stride(2),
        dense=dense,
        check=blocks.fault is not None,
    )
    with on(table.device):
        if layout is not None and dense and is_new((layout, keys.dtype, "seal")):
            pools = records[:, None], keys[:, None], values[:, None]
            seal(layout, *pools, lengths, lengths, compile_only=True)
        write_kernel[(new_tokens, batch, -(-kv_heads // constants["H"]))](
            keys if dense else new_keys,
            values if dense else new_values,
            records,
            new_keys,
            new_values,
            table,
            lengths,
            lengths if blocks.offsets is None else blocks.offsets,
            table if blocks.fault is None else blocks.fault,
            keys.stride()[:2],
            values.stride()[:2],
            records.stride()[:2],
            new_keys.stride()[:3],
            new_values.stride()[:3],
            table.stride(0),
            table.shape[1],
            new_tokens,
            PADDED=blocks.offsets is not None,
            **constants,
        )


def encode(
    blocks: LayerBlocks, layout: RecordFormat, new_keys: torch.Tensor, new_values: torch.Tensor, start: int
) -> None:
    """Encode the new tokens that fill whole blocks, as `Backend.write`; residual blocks are passed over."""
    records, table, offsets, fault = blocks.records, blocks.table, blocks.offsets, blocks.fault
    assert records is not None, "a quantized layer has records"
    new_keys, new_values = last_contiguous(new_keys), last_contiguous(new_values)
    batch, kv_heads, new_tokens, _ = new_keys.shape
    with on(records.device):
        encode_kernel[(new_tokens // layout.block_size, kv_heads, batch)](
            records,
            new_keys,
            new_values,
            table,
            table,
            table if offsets is None else offsets,
            table if fault is None else fault,
            records.stride()[:2],
            new_keys.stride()[:3],
            new_values.stride()[:3],
            table.stride(0),
            table.shape[1],
            start + new_tokens,
            start,
            PADDED=offsets is not None,
            **encode_constants(layout=layout, seal=False, check=fault is not None),
        )


def seal(
    layout: RecordFormat,
    records: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    dense_ids: torch.Tensor,
    ids: torch.Tensor,
    *,
    compile_only: bool = False,
) -> None:
    """Encode blocks of a pool, as `Backend.encode_blocks`; `dense_ids` and `ids` are int32 `[blocks]`."""
    heads = records.shape[1] * records.shape[2]
    records, keys, values = (x.view(x.shape[0], heads, *x.shape[3:]) for x in (records, keys, values))
    with on(records.device):
        started(encode_kernel, (len(ids), heads, 1), compile_only=compile_only)(
            *(records, keys, values, ids, dense_ids, ids, ids),
            *(records.stride()[:2], keys.stride()[:3], values.stride()[:3]),
            *(0, 0, 0, 0),  # what is asked of new tokens
            PADDED=False,
            **encode_constants(layout=layout, seal=True, check=False),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Pass:
    """A launch of `attend_kernel`: over records or a plain pool, or over residual blocks."""

    keys: torch.Tensor  # what holds K
    values: torch.Tensor
    constants: dict[str, Any]
    programs: int  # without splits
    splits: int  # programs that share a row's tokens; 0 where the pass has nothing to attend
    columns: torch.Tensor | None = None  # see `_on_device`; the only columns of the table to attend


def attend(
    blocks: LayerBlocks,
    a: Attention,  # no row's length is more than `back` above `a.end`, which decides on splits
    lengths: torch.Tensor,  # int32 `[batch]`, columns of each row, those before it begins included
    *,
    back: int = 0,  # columns at the end of each row that are left out
    dense_columns: tuple[tuple[int, ...], ...] = (),  # as in `LayerBlocks`; empty without residual blocks
    block_size: int | None = None,  # where that is not what the keys' shape says
    splits: int | None = None,  # programs that share a row's tokens, where not the best number is wanted
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend the tokens `[a.start, length - back)` of every row; rows may differ in length.

    The mask may have more columns than there are tokens. The answer is that of `Backend.decode`, always with
    the log-sum-exp.
    """
    query = last_contiguous(a.query)
    q = Question(blocks, a, query, *mask_of(a.mask, *query.shape[:3]), lengths, back)
    layout: Layout = blocks.layout or _plain(blocks, block_size)
    with on(query.device):
        out, lse = q.answers(layout.v_head_dim)
        passes = [_main_pass(q, layout, dense_columns, splits)]
        if any(dense_columns):
            passes.append(_dense_pass(q, dense_columns))
        counts = [each.splits for each in passes]
        is_merged = sum(counts) > 1
        parts = [q.scratch(count, layout.v_head_dim) if is_merged and count else lse for count in counts]
        for ahead in (True, False) if splits is None and _is_first(passes, is_merged) else (False,):
            for each, part in zip(passes, parts, strict=True):
                if ahead or each.splits:
                    _attend_pass(q, each, out, lse, part, as_part=ahead or is_merged, compile_only=ahead)
            if ahead or is_merged:
                batch, q_heads, q_tokens, _ = query.shape
                started(merge_kernel, (q_heads * q_tokens, batch), compile_only=ahead)(
                    *(out, lse, parts[0], parts[-1]),
                    lse if a.sinks is None else a.sinks,
                    q_tokens,
                    counts[0],
                    sum(counts[1:]),
                    **merge_constants(q_heads=q_heads, layout=layout, sinks=a.sinks is not None),
                )
    return out.to(query.dtype), lse


def _main_pass(
    q: Question, layout: Layout, dense_columns: tuple[tuple[int, ...], ...], splits: int | None
) -> _Pass:
    """Over what is not in `dense_columns`."""
    blocks, a = q.blocks, q.a
    constants, programs = q.constants(layout)
    # Where rows begin later they have fewer columns than these; to try them for records does no harm.
    reached = set(range(a.start // layout.block_size, -(-a.end // layout.block_size)))
    if reached and any(dense_columns) and all(reached.issubset(row) for row in dense_columns):
        splits = 0
    elif splits is None:
        tokens = a.end - a.start
        in_reach = tokens if a.window is None else min(tokens, a.window + q.query.shape[2])
        splits = choose_splits(programs, in_reach, processors(q.query.device))
    keys, values = (blocks.keys, blocks.values) if blocks.records is None else (blocks.records,) * 2
    return _Pass(keys, values, constants, programs, splits)


def _dense_pass(q: Question, dense_columns: tuple[tuple[int, ...], ...]) -> _Pass:
    """Over the residual blocks of a quantized layer."""
    blocks = q.blocks
    splits = splits_of(max(map(len, dense_columns)) * blocks.block_size)
    columns = _on_device(q.query.device, dense_columns)
    return _Pass(blocks.keys, blocks.values, *q.constants(_plain(blocks)), splits, columns)


def _is_first(passes: list[_Pass], is_merged: bool) -> bool:
    """Whether such a decode step is met for the first time, and later ones will be launched as parts."""
    main = passes[0]
    will_be_part = main.splits == 0 or not is_merged
    return main.constants["M"] == DECODE_QUERIES and will_be_part and is_new((id(main.constants), "part"))


def _attend_pass(
    q: Question,
    each: _Pass,
    out: torch.Tensor,
    lse: torch.Tensor,
    part: torch.Tensor,
    *,
    as_part: bool,
    compile_only: bool,
) -> None:
    """Launch `attend_kernel` on the current device; it writes `part`, or `out` and `lse` if it is all."""
    blocks, a, columns, q_tokens = q.blocks, q.a, each.columns, q.query.shape[2]
    started(attend_kernel, (each.programs * each.splits,), compile_only=compile_only)(
        out,
        lse,
        part,
        q.query,
        each.keys,
        each.values,
        blocks.table,
        q.lengths,
        q.lengths if blocks.offsets is None else blocks.offsets,
        lse if q.mask is None else q.mask,
        lse if a.sinks is None else a.sinks,
        blocks.table if columns is None else columns,
        q.query.stride()[:3],
        each.keys.stride()[:2],
        each.values.stride()[:2],
        blocks.table.stride(0),
        blocks.table.shape[1],
        0 if columns is None or columns.shape[0] == 1 else columns.stride(0),
        0 if columns is None else columns.shape[1],
        *((0, 0, 0, 0) if q.mask is None else q.mask.stride()),
        q_tokens,
        each.splits,
        q.rows,
        a.start,
        q.back,
        -q_tokens if a.queries_are_last else 0,
        a.window or 0,
        a.scale,
        a.softcap or 0.0,
        COLUMNS=columns is not None,
        PADDED=blocks.offsets is not None,
        SPLIT=as_part,
        **each.constants,
    )


def attend_dense(a: Attention, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend dense K and V `[batch, kv_heads, tokens, head_dim]`; all else is as in `attend`."""
    rows = torch.arange(keys.shape[0], dtype=torch.int32, device=keys.device)
    blocks = LayerBlocks(last_contiguous(keys), last_contiguous(values), rows[:, None])
    return attend(blocks, a, torch.full_like(rows, keys.shape[2]), block_size=_DENSE_BLOCK_SIZE)


def copy_blocks(pool: torch.Tensor, src: list[int], dst: list[int]) -> None:
    """Copy whole blocks inside a contiguous pool; no block is both in `src` and in `dst`."""
    ids = on_device([src, dst], pool.device)
    with on(pool.device):
        copy_kernel[(len(src), -(-pool.stride(0) // _COPY_ELEMENTS))](
            pool, ids[0], ids[1], pool.stride(0), CHUNK=_COPY_ELEMENTS
        )


def _plain(blocks: LayerBlocks, block_size: int | None = None) -> PlainLayout:
    """The layout of blocks in the model's dtype."""
    keys, values = blocks.keys, blocks.values
    block_size = block_size or keys.shape[2]
    return PlainLayout(block_size, keys.shape[3], values.shape[3], keys.stride(2), values.stride(2))


@lru_cache(maxsize=64)
def _on_device(device: torch.device, columns: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    """int32 `[batch or 1, columns]` on a device, -1 past the last of a row.

    They are the same for all layers, and where rows begin alike for as many steps as a block has tokens.
    """
    most = max(map(len, columns))
    padded = [[*row, *[-1] * (most - len(row))] for row in columns]
    return on_device(padded, device)
