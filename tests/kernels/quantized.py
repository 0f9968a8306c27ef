"""The attention cases over quantized blocks.

`build_quantized` stores random K/V as a cache would: full blocks in records, the first and the open block in
the model's dtype where a format wants that. `Problem.keys`, `values` and `want` are of what the records say,
read by the formats' own plain torch, so kernels are held to the bytes and not to what the bytes lost.
"""

from __future__ import annotations

from typing import Literal

import torch

from hf_paged_cache.formats import FORMATS, RecordFormat, kv_format
from hf_paged_cache.kernels.call import NULL_BLOCK, Attention, LayerBlocks, dense_entry
from tests.kernels.cases import MASKS, Case, Problem, _visible_and_bias, dense_answer

FORMAT_NAMES = tuple(FORMATS)

TOLERANCE = {
    torch.float32: 1e-5,  # codes times scales and zeros are added up apart, and partly cancel
    torch.bfloat16: 3e-3,
    torch.float16: 6e-4,  # rotated queries, and K of 4 bits less their zeros, have 12 bits
}
"""RMS ratio to allow between an answer of the Triton kernels in that dtype and the float64 one."""

Dense = Literal["none", "edges"]
"""Which blocks stay in the model's dtype: none, or the first and the last one."""


def layout_of(name: str, case: Case, *, group_size: int | None = None) -> RecordFormat:
    """The records of a case's blocks; groups as large as heads allow, up to 32."""
    v_head_dim = case.v_head_dim or case.head_dim
    if group_size is None:
        fitting = (n for n in range(32, 0, -1) if case.head_dim % n == 0 and v_head_dim % n == 0)
        group_size = next(fitting)
        if group_size == 1 and case.head_dim == v_head_dim:  # 97 has no divisors
            group_size = case.head_dim
    layer_format = kv_format(name, group_size=group_size)
    assert layer_format is not None
    return layer_format.bind(case.block_size, case.head_dim, v_head_dim)


def build_quantized(
    case: Case,
    layout: RecordFormat,
    dtype: torch.dtype = torch.float32,
    *,
    dense: Dense | None = None,
    seed: int = 0,
) -> Problem:
    """Blocks, question and float64 answer of a case whose blocks are records of `layout`.

    Whatever nobody may read is NaN: slots never filled (their scales, in records), blocks of no table, other
    layers of the pool, and where a format allows it tokens that no query sees.
    """
    g = torch.Generator().manual_seed(seed)
    if dense is None:
        dense = "none" if layout.format.is_per_token else "edges"
    v_head_dim = case.v_head_dim or case.head_dim
    columns = -(-case.end // case.block_size)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).to(dtype)

    offset = torch.zeros(case.head_dim)
    offset[:: max(1, case.head_dim // 3)] = 4.0  # channels that stick out, as in real K
    keys = (normal(case.batch, case.kv_heads, columns * case.block_size, case.head_dim) + offset).to(dtype)
    values = normal(case.batch, case.kv_heads, columns * case.block_size, v_head_dim)
    query = normal(case.batch, case.q_tokens, case.q_heads, case.head_dim).transpose(1, 2)
    attention = Attention(
        query=query,
        start=case.start,
        end=case.end,
        scale=case.head_dim**-0.5 if case.scale is None else case.scale,
        mask=None if case.mask is None else MASKS[case.mask](case, dtype, g),
        causal=case.causal,
        window=case.window,
        softcap=case.softcap,
        sinks=normal(case.q_heads) if case.sinks else None,
        queries_are_last=case.queries_are_last,
    )
    visible, bias = _visible_and_bias(case, attention.mask)
    read = torch.zeros(case.batch, case.kv_heads, columns * case.block_size, dtype=torch.bool)
    read[:, :, case.start : case.end] = visible.unflatten(1, (case.kv_heads, case.group)).any(2).any(2)
    dense_columns = {0, columns - 1} if dense == "edges" else set[int]()
    blocks, keys, values = _store(case, layout, keys, values, _from_own_begin(case, read), dense_columns, g)
    keys, values = (_to_columns(case, x)[:, :, case.start : case.end] for x in (keys, values))
    want, want_lse = dense_answer(
        query, keys, values, visible, bias, attention.scale, attention.softcap, attention.sinks
    )
    return Problem(blocks, attention, keys, values, visible, want, want_lse)


def _from_own_begin(case: Case, x: torch.Tensor) -> torch.Tensor:
    """`[batch, kv_heads, columns]` by stored positions, zeros behind."""
    moved = torch.zeros_like(x)
    for row in range(case.batch):
        begin = min(case.offset(row), x.shape[2])
        moved[row, :, : x.shape[2] - begin] = x[row, :, begin:]
    return moved


def _to_columns(case: Case, x: torch.Tensor) -> torch.Tensor:
    """The way back, zeros in front."""
    moved = torch.zeros_like(x)
    for row in range(case.batch):
        begin = min(case.offset(row), x.shape[2])
        moved[row, :, begin:] = x[row, :, : x.shape[2] - begin]
    return moved


def _store(
    case: Case,
    layout: RecordFormat,
    keys: torch.Tensor,
    values: torch.Tensor,
    read: torch.Tensor,
    dense_columns: set[int],
    g: torch.Generator,
) -> tuple[LayerBlocks, torch.Tensor, torch.Tensor]:
    """Layer 1 of a pool of three, its blocks shuffled; and what is stored, as float32."""
    size, columns = case.block_size, keys.shape[2] // case.block_size
    num_blocks = case.batch * columns + 2
    order = torch.randperm(num_blocks, generator=g, dtype=torch.int32)
    table = order[-1].repeat(case.batch, columns + 2)  # past the end: a record full of NaN
    table[:, :columns] = order[: case.batch * columns].view(case.batch, columns)
    num_slots = case.batch * len(dense_columns) + 1
    pools = [
        torch.full((num_slots, 3, case.kv_heads, size, x.shape[-1]), torch.nan, dtype=x.dtype)
        for x in (keys, values)
    ]
    records = torch.full((num_blocks, 3, case.kv_heads, layout.nbytes), 0xFF, dtype=torch.uint8)
    stored = [x.float().clone() for x in (keys, values)]
    slot = num_slots - 1
    for row in range(case.batch):
        for column in range(columns):
            span = slice(column * size, (column + 1) * size)
            parts = [x[row, :, span] for x in (keys, values)]
            seen = read[row, :, span]
            if column in dense_columns:
                slot -= 1
                table[row, column] = dense_entry(slot)
                for pool, part in zip(pools, parts, strict=True):
                    pool[slot, 1] = part.masked_fill(~seen[..., None], torch.nan)
                continue
            record = records[table[row, column], 1]
            layout.encode(*parts, record)
            for x, part in zip(stored, layout.decode(record), strict=True):
                x[row, :, span] = part
            _poison(layout, record, seen)
    for row, column in case.nulls:
        table[row, column] = NULL_BLOCK
    blocks = LayerBlocks(
        pools[0][:, 1], pools[1][:, 1], table, None, records[:, 1], layout, offsets=case.offsets_tensor()
    )
    return blocks, stored[0], stored[1]


def _poison(layout: RecordFormat, record: torch.Tensor, seen: torch.Tensor) -> None:
    """NaN for the scales of tokens that nobody sees, `[kv_heads, block_size]`."""
    for side in ("keys", "values"):
        if layout.codec(side).is_per_token:  # type: ignore[arg-type]
            _, params = layout.parts(record, side)  # type: ignore[arg-type]
            params.masked_fill_(~seen[:, None, :, None], torch.nan)
