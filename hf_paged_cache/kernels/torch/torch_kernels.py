"""Kernels in torch operations alone, for machines without a compiler and devices without a kernel.

A chunk of blocks is copied to a temporary, attended, and merged with the chunks before by log-sum-exp, so the
dense history never exists as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import embedding

from hf_paged_cache.kernels import reference
from hf_paged_cache.kernels.call import NULL_BLOCK, Attention, LayerBlocks, dense_entry

from . import partial_softmax
from .masking import accumulate_dtype, all_over, both, read_mask
from .partial_softmax import Partial, attend, nothing, split_heads

if TYPE_CHECKING:
    from hf_paged_cache.formats import RecordFormat

# Plain torch runs wherever torch does, and formats are in it already.
unavailable_reason, unsupported_reason = reference.unavailable_reason, reference.unsupported_reason
encode_blocks, decode_blocks = reference.encode_blocks, reference.decode_blocks

# Keys and values of one chunk: about what a core's caches hold, so that attending re-reads from there.
CHUNK_BYTES = 4 << 20
SCORE_BYTES = 16 << 20  # scores of one chunk, on the path that keeps them
# So many tokens that everybody sees are attended by themselves, without the mask of those before them.
UNMASKED_TOKENS = 256


def write(blocks: LayerBlocks, key_states: torch.Tensor, value_states: torch.Tensor, start: int) -> None:
    """As `Backend.write`."""
    if blocks.records is not None:
        reference.check_storable(blocks, key_states, value_states, start)
    if blocks.offsets is None:
        _write(blocks, key_states, value_states, start)
        return
    for offset in set(blocks.offsets.tolist()):
        rows = (blocks.offsets == offset).nonzero()[:, 0]
        keys, values = (x[rows, :, max(offset - start, 0) :] for x in (key_states, value_states))
        _write(replace(blocks, table=blocks.table[rows], offsets=None), keys, values, max(start - offset, 0))


def _write(blocks: LayerBlocks, key_states: torch.Tensor, value_states: torch.Tensor, start: int) -> None:
    """What `write` does for rows of which none begins later."""
    positions = torch.arange(start, start + key_states.shape[2], device=blocks.table.device)
    ids = blocks.table[:, positions // blocks.block_size].long()  # [batch, tokens]
    slots = (positions % blocks.block_size).expand_as(ids)
    stored = ids != NULL_BLOCK
    keys, values = key_states.transpose(1, 2), value_states.transpose(1, 2)  # [batch, tokens, kv_heads, dim]
    if blocks.records is not None:
        stored = ids < NULL_BLOCK
        _write_records(blocks, key_states, value_states, start)
        ids = dense_entry(ids)
    if not stored.all():
        ids, slots, keys, values = (x[stored] for x in (ids, slots, keys, values))
    blocks.keys[ids, :, slots], blocks.values[ids, :, slots] = keys, values


def _write_records(
    blocks: LayerBlocks, key_states: torch.Tensor, value_states: torch.Tensor, start: int
) -> None:
    """Encode the tokens that fall into records, column by column of the table."""
    records, layout, size, end = blocks.records, blocks.layout, blocks.block_size, start + key_states.shape[2]
    assert records is not None, "only quantized layers come here"
    assert layout is not None, "and their records have a format"
    for column in range(start // size, -(-end // size)):
        ids = blocks.table[:, column].long()
        rows = (ids > NULL_BLOCK).nonzero()[:, 0]
        if not len(rows):
            continue
        first, last = max(start, column * size), min(end, (column + 1) * size)
        keys, values = (x[rows, :, first - start : last - start] for x in (key_states, value_states))
        content = records[ids[rows]]
        if layout.format.is_per_token:
            layout.encode_tokens(keys, values, content, first % size)
        else:
            new = last - first
            assert new == size, f"{layout.format.name} encodes full blocks, got {new} tokens of {size}"
            layout.encode(keys, values, content)
        records[ids[rows]] = content


def gather(blocks: LayerBlocks, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `dispatch.gather`."""
    if start == end:
        return reference.gather(blocks, start, end)
    keys, values = _tokens(blocks, start, end)
    stored = _stored(blocks, start, end)
    if stored is not None:
        keys, values = (x.masked_fill(~stored[:, None, :, None], 0.0) for x in (keys, values))
    return keys.to(blocks.keys.dtype).contiguous(), values.to(blocks.values.dtype).contiguous()


def decode(
    blocks: LayerBlocks, a: Attention, *, return_lse: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `Backend.decode`."""
    read = read_mask(a.query, a.mask, a.end - a.start)
    query = split_heads(read.query, blocks.keys.shape[1])
    kv_heads, dims = blocks.keys.shape[1], blocks.keys.shape[3] + blocks.values.shape[3]
    chunk_tokens = CHUNK_BYTES // (a.query.shape[0] * kv_heads * dims * blocks.keys.element_size())
    if not partial_softmax.has_flash(a.query, a.softcap):
        chunk_tokens = min(chunk_tokens, scored_tokens(a))
    partial = attend_blocks(blocks, a, query, read.visible, read.bias, chunk_tokens=chunk_tokens)
    partial = with_sinks(partial, a.sinks, read.taken)
    out = partial.tokens_first(a.query.dtype)
    if not return_lse:
        return out, None
    lse = partial.lse.flatten(1, 2)
    return out, (lse if read.taken is None else lse + read.taken).float()


def copy_blocks(pool: torch.Tensor, src: list[int], dst: list[int]) -> None:
    """As `Backend.copy_blocks`."""
    assert len(src) == len(dst), f"{len(src)} blocks to read but {len(dst)} to overwrite"
    if src:
        pool[torch.tensor(dst, device=pool.device)] = pool[torch.tensor(src, device=pool.device)]


def attend_blocks(
    blocks: LayerBlocks,
    a: Attention,
    query: torch.Tensor,
    visible: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    chunk_tokens: int,
    read: Callable[[LayerBlocks, int, int], tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> Partial:
    """Attention over the stored tokens, in chunks of so many, without the sinks.

    Computed with `query` `[batch, kv_heads, group, q_tokens, head_dim]`; that of `a` says no more than the
    number of tokens. `visible` and `bias` are of `[a.start, a.end)`, as `masking` has them. `read` decodes
    quantized blocks to values of the model's dtype; without it they are decoded here, to float32.
    """
    merged: Partial | None = None
    if read is None or blocks.records is None:
        read = _tokens
        query = query if blocks.records is None else query.to(accumulate_dtype(query))
    for start, end in _chunks(blocks, a.start, a.end, chunk_tokens):
        by_position = _visible_by_position(blocks, a, start, end)
        by_mask = None if visible is None else visible[..., start - a.start : end - a.start]
        for first, last, shown in _pieces(blocks, both(by_position, by_mask), start, end):
            keys, values = read(blocks, first, last)
            partial = attend(
                query,
                keys,
                values,
                scale=a.scale,
                softcap=a.softcap,
                visible=shown,
                bias=None if bias is None else bias[..., first - a.start : last - a.start],
            )
            merged = partial if merged is None else merged.merge(partial)
    return nothing(query, blocks.values.shape[3]) if merged is None else merged


def with_sinks(partial: Partial, sinks: torch.Tensor | None, taken: torch.Tensor | None) -> Partial:
    """Attention with a sink per head, `[q_heads]`: a key of value zero; `taken` as in `ReadMask`."""
    if sinks is None:
        return partial
    lse = partial.lse
    logits = sinks.to(lse.dtype)[None, :, None]  # [1, q_heads, 1]
    logits = torch.unflatten(logits if taken is None else logits - taken, 1, lse.shape[1:3])
    weight = torch.sigmoid(lse - logits).masked_fill(lse == -torch.inf, 0.0)
    return Partial(partial.out.to(lse.dtype) * weight[..., None], torch.logaddexp(lse, logits))


def scored_tokens(a: Attention) -> int:
    """Tokens whose scores may be kept at one time, where they are kept."""
    batch, q_heads, q_tokens, _ = a.query.shape
    return SCORE_BYTES // (batch * q_heads * q_tokens * 4)


def _chunks(blocks: LayerBlocks, start: int, end: int, chunk_tokens: int) -> Iterator[tuple[int, int]]:
    """`[start, end)` in runs of about `chunk_tokens`, at least a block, that meet at edges of blocks."""
    step = max(chunk_tokens // blocks.block_size, 1) * blocks.block_size
    for first in range(start - start % blocks.block_size, end, step):
        yield max(first, start), min(first + step, end)


def _pieces(
    blocks: LayerBlocks, visible: torch.Tensor | None, start: int, end: int
) -> Iterator[tuple[int, int, torch.Tensor | None]]:
    """A chunk `[start, end)` without what nobody sees, and with its mask only where it has one.

    Left padding and windows hide tokens at the beginning. A long rest that everybody sees is worth a piece of
    its own, because attention without a mask is faster and shares keys within head groups.
    """
    if visible is None or not visible.is_cpu:
        yield start, end, visible
        return
    if not visible.any():
        return
    hidden = (~all_over(visible, 0, 1, 2)).nonzero()
    if not len(hidden):
        yield start, end, None
        return
    edge = start + int(hidden[-1]) + 1
    edge += -edge % blocks.block_size
    if end - edge < UNMASKED_TOKENS:
        yield start, end, visible
    else:
        yield start, edge, visible[..., : edge - start]
        yield edge, end, None


def _entries(blocks: LayerBlocks, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The table's entries for the blocks that hold `[start, end)`, and which of their slots the tokens have.

    The latter is `[batch, end - start]`, below 0 before a row begins; None: one after the other from slot
    `start % block_size` on, in all rows.
    """
    size = blocks.block_size
    if blocks.offsets is None:
        return blocks.table[:, start // size : -(-end // size)], None
    columns = torch.arange(start, end, device=blocks.table.device)
    positions = columns - blocks.offsets[:, None]
    first = positions[:, :1].clamp(min=0) // size
    # Tokens that lie anyhow touch one block more than they fill; past the end of a row stand arbitrary ids.
    columns = first + torch.arange((end - start - 1) // size + 2, device=blocks.table.device)
    entries = blocks.table.gather(1, columns.clamp(max=blocks.table.shape[1] - 1))
    entries = entries.masked_fill(columns * size > positions[:, -1:], NULL_BLOCK)
    return entries, torch.where(positions < 0, -1, positions - first * size)


def _tokens(blocks: LayerBlocks, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of the tokens, float32 or more if out of records; what is not stored has arbitrary values."""
    entries, indices = _entries(blocks, start, end)
    if blocks.records is not None and blocks.layout is not None:
        found = _decoded(blocks, blocks.records, blocks.layout, entries)
    else:
        ids = entries.clamp(min=0).long()
        found = _tiles(blocks.keys, ids), _tiles(blocks.values, ids)
    if indices is None:
        skip = start % blocks.block_size
        keys, values = (x[:, :, skip : skip + end - start] for x in found)
        return keys, values
    index = indices.clamp(min=0)[:, None, :, None]
    keys, values = (x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])) for x in found)
    return keys, values


def _decoded(
    blocks: LayerBlocks, records: torch.Tensor, layout: RecordFormat, columns: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V `[batch, kv_heads, columns * block_size, dim]` of `[batch, columns]` blocks; float32 or 64."""
    entries = columns.long()
    dtype = accumulate_dtype(blocks.keys)
    # [batch, columns, kv_heads, block_size, dim]
    found = [x.to(dtype) for x in layout.decode(records[entries.clamp(min=0)])]
    dense = entries < NULL_BLOCK
    for x, pool in zip(found, (blocks.keys, blocks.values), strict=True):
        x[dense] = pool[dense_entry(entries[dense])].to(dtype)
    keys, values = (x.transpose(1, 2).flatten(2, 3) for x in found)
    return keys, values


def _tiles(pool: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`[batch, kv_heads, columns * block_size, dim]` of blocks `[batch, columns]`, in one copy.

    Each (block, head) tile is one contiguous run, so the pool is taken as a matrix with a tile a line, which
    are looked up. Indexing is several times slower: it would move heads before blocks in a second copy.
    """
    _, kv_heads, block_size, dim = pool.shape
    tile = block_size * dim
    if pool.stride()[1:] != (tile, dim, 1) or pool.stride(0) % tile:
        return pool[ids].transpose(1, 2).flatten(2, 3)
    per_block = pool.stride(0) // tile
    matrix = pool.as_strided(((pool.shape[0] - 1) * per_block + kv_heads, tile), (tile, 1))
    heads = torch.arange(kv_heads, device=ids.device)[:, None]
    tiles = embedding(ids[:, None] * per_block + heads, matrix)  # [batch, kv_heads, columns, tile]
    return tiles.view(ids.shape[0], kv_heads, -1, dim)


def _stored(blocks: LayerBlocks, start: int, end: int) -> torch.Tensor | None:
    """Boolean `[batch, end - start]`: which tokens lie in a block that is stored; None if all are."""
    entries, indices = _entries(blocks, start, end)
    stored = entries != NULL_BLOCK
    if indices is None:
        if stored.is_cpu and stored.all():
            return None
        skip = start % blocks.block_size
        return stored.repeat_interleave(blocks.block_size, dim=1)[:, skip : skip + end - start]
    stored = stored.gather(1, indices.clamp(min=0) // blocks.block_size) & (indices >= 0)
    return None if stored.is_cpu and stored.all() else stored


def _visible_by_position(blocks: LayerBlocks, a: Attention, start: int, end: int) -> torch.Tensor | None:
    """What the stored tokens `[start, end)` show by causality, window and null blocks; None if all."""
    stored = _stored(blocks, start, end)
    visible = None if stored is None else stored[:, None, None]
    q_tokens, device = a.query.shape[2], a.query.device
    first_query = a.end - q_tokens if a.queries_are_last else a.end
    hides_later = a.causal and end - 1 > first_query
    hides_earlier = a.window is not None and start <= first_query + q_tokens - 1 - a.window
    if hides_later or hides_earlier:
        positions = torch.arange(start, end, device=device)
        query_positions = torch.arange(first_query, first_query + q_tokens, device=device)[:, None]
        if hides_later:
            visible = both(visible, (positions <= query_positions)[None, None])
        if a.window is not None:
            visible = both(visible, (positions > query_positions - a.window)[None, None])
    return visible
