"""Kernels in torch operations alone, for machines without a compiler and devices without a kernel.

A chunk of blocks is copied to a temporary, attended, and merged with the chunks before by log-sum-exp, so the
dense history never exists as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import embedding

from . import parts
from .parts import Part
from .problem import NULL_BLOCK, Attention, LayerBlocks

CHUNK_BYTES = 8 << 20
"""Keys and values of one chunk: about what a core's caches hold, so that attending re-reads from there."""
SCORE_BYTES = 64 << 20
"""Scores of one chunk, where the path taken keeps them."""


def unavailable_reason() -> str | None:
    """None: plain torch runs wherever torch does."""
    return None


def unsupported_reason(blocks: LayerBlocks) -> str | None:
    """None: every dtype and device is served."""
    return None


def write(blocks: LayerBlocks, key_states: torch.Tensor, value_states: torch.Tensor, start: int) -> None:
    """Store new tokens in the slots of positions `start, start + 1, ...` of every row.

    Tokens that fall into a null block are dropped.

    Args:
        blocks: Changed in place.
        key_states: `[batch, kv_heads, tokens, head_dim]`.
        value_states: `[batch, kv_heads, tokens, v_head_dim]`.
        start: Position of the first new token, the same in every row.
    """
    positions = torch.arange(start, start + key_states.shape[2], device=blocks.table.device)
    ids = blocks.table[:, positions // blocks.block_size].long()  # [batch, tokens]
    slots = (positions % blocks.block_size).expand_as(ids)
    stored = ids != NULL_BLOCK
    keys, values = key_states.transpose(1, 2), value_states.transpose(1, 2)  # [batch, tokens, kv_heads, dim]
    if not stored.all():
        ids, slots, keys, values = ids[stored], slots[stored], keys[stored], values[stored]
    blocks.keys[ids, :, slots] = keys
    blocks.values[ids, :, slots] = values


def gather(blocks: LayerBlocks, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The stored tokens `[start, end)` as dense tensors; null blocks read as zeros.

    Returns:
        Keys `[batch, kv_heads, end - start, head_dim]` and values `[..., v_head_dim]`, contiguous copies.
    """
    if start == end:
        batch, kv_heads = blocks.table.shape[0], blocks.keys.shape[1]
        return (
            blocks.keys.new_empty(batch, kv_heads, 0, blocks.keys.shape[3]),
            blocks.values.new_empty(batch, kv_heads, 0, blocks.values.shape[3]),
        )
    keys, values = _tokens(blocks, start, end)
    stored = _stored(blocks, start, end)
    if stored is not None:
        keys, values = (x.masked_fill(~stored[:, None, :, None], 0.0) for x in (keys, values))
    return keys.contiguous(), values.contiguous()


def decode(
    blocks: LayerBlocks, a: Attention, *, return_lse: bool = False
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend the stored tokens `[a.start, a.end)`.

    Args:
        blocks: Keys and values. Not changed.
        a: The question; every field is honoured.
        return_lse: Also return the log-sum-exp that merges this answer with another part's.

    Returns:
        `[batch, q_tokens, q_heads, v_head_dim]`, contiguous, in the query's dtype; zeros where a query sees
        nothing. With `return_lse` also float32 `[batch, q_heads, q_tokens]`: natural log of the softmax's
        denominator, the sink included; -inf where there is neither a visible token nor a sink.
    """
    query, mask, taken = a.query, a.mask, None
    if mask is not None:
        mask = parts.four_dims(mask, a.end - a.start)
        if mask.dtype != torch.bool and a.end > a.start:
            query, mask, taken = parts.lift_far_rows(query, mask)
    kv_heads = blocks.keys.shape[1]
    query = parts.split_heads(query, kv_heads)
    part = attend_blocks(blocks, a, query, mask, chunk_tokens=_chunk_tokens(blocks, a))
    if part is None:
        part = nothing(query, blocks.values.shape[3])
    part = with_sinks(part, a.sinks, taken)
    out = part.tokens_first(a.query.dtype)
    if not return_lse:
        return out
    lse = part.lse.flatten(1, 2)
    return out, (lse if taken is None else lse + taken).float()


def copy_blocks(pool: torch.Tensor, src: list[int], dst: list[int]) -> None:
    """Copy whole blocks inside one pool tensor: `pool[dst[i]] = pool[src[i]]`, all sources read first.

    Args:
        pool: `[num_blocks, ...]`, changed in place.
        src: Block ids to read.
        dst: As many distinct block ids to overwrite.
    """
    assert len(src) == len(dst), f"{len(src)} blocks to read but {len(dst)} to overwrite"
    if src:
        pool[torch.tensor(dst, device=pool.device)] = pool[torch.tensor(src, device=pool.device)]


def attend_blocks(
    blocks: LayerBlocks, a: Attention, query: torch.Tensor, mask: torch.Tensor | None, *, chunk_tokens: int
) -> Part | None:
    """Attention over the stored tokens, chunk by chunk, without the sinks; None where nothing can be seen.

    Args:
        blocks: Keys and values.
        a: Range, scale, causal, window, softcap. Its `query` gives the shape only.
        query: `[batch, kv_heads, group, q_tokens, head_dim]`, what is computed with.
        mask: None, or four dimensions, what is computed with.
        chunk_tokens: Tokens of the temporary.
    """
    merged: Part | None = None
    for start, end in _chunks(blocks, a.start, a.end, chunk_tokens):
        visible, bias = _masking(blocks, a, mask, start, end)
        if visible is not None and visible.is_cpu:
            if not visible.any():
                continue
            visible = None if visible.all() else visible
        keys, values = _tokens(blocks, start, end)
        part = parts.attend(query, keys, values, scale=a.scale, softcap=a.softcap, visible=visible, bias=bias)
        merged = part if merged is None else merged.merge(part)
    return merged


def nothing(query: torch.Tensor, v_head_dim: int) -> Part:
    """The part that has no tokens, for `[batch, kv_heads, group, q_tokens, head_dim]` queries."""
    lse = torch.full(query.shape[:4], -torch.inf, dtype=parts.accumulate_dtype(query), device=query.device)
    return Part(query.new_zeros(*query.shape[:4], v_head_dim), lse)


def with_sinks(part: Part, sinks: torch.Tensor | None, taken: torch.Tensor | None) -> Part:
    """The part with a sink per head, `[q_heads]`; `taken` is what `lift_far_rows` took out of the scores."""
    if sinks is None:
        return part
    logits = sinks.to(part.lse.dtype)[None, :, None]  # [1, q_heads, 1]
    logits = logits if taken is None else logits - taken
    return part.with_sink(parts.split_heads(logits, part.lse.shape[1]))


def _chunk_tokens(blocks: LayerBlocks, a: Attention) -> int:
    batch, q_heads, q_tokens, _ = a.query.shape
    kv_heads, dims = blocks.keys.shape[1], blocks.keys.shape[3] + blocks.values.shape[3]
    tokens = CHUNK_BYTES // (batch * kv_heads * dims * blocks.keys.element_size())
    if not parts.has_flash(a.query, a.softcap):
        tokens = min(tokens, SCORE_BYTES // (batch * q_heads * q_tokens * 4))
    return tokens


def _chunks(blocks: LayerBlocks, start: int, end: int, chunk_tokens: int) -> Iterator[tuple[int, int]]:
    """`[start, end)` in runs of about `chunk_tokens`, at least a block, that meet at blocks' edges."""
    step = max(chunk_tokens // blocks.block_size, 1) * blocks.block_size
    while start < end:
        edge = min(start - start % blocks.block_size + step, end)
        yield start, edge
        start = edge


def _columns(blocks: LayerBlocks, start: int, end: int) -> torch.Tensor:
    """The table's entries for the blocks that hold `[start, end)`."""
    return blocks.table[:, start // blocks.block_size : -(-end // blocks.block_size)]


def _tokens(blocks: LayerBlocks, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of the stored tokens; null blocks hold arbitrary values."""
    ids = _columns(blocks, start, end).clamp(min=0).long()
    skip = start % blocks.block_size
    return tuple(_tiles(pool, ids)[:, :, skip : skip + end - start] for pool in (blocks.keys, blocks.values))  # type: ignore[return-value]


def _tiles(pool: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`[batch, kv_heads, columns * block_size, dim]` of blocks `[batch, columns]`, in one copy.

    Each (block, head) tile is one contiguous run, so the pool is seen as a matrix with a tile a row. Looking
    rows up is several times faster than indexing, which would move heads before blocks in a second copy.
    """
    _, kv_heads, block_size, dim = pool.shape
    tile = block_size * dim
    block_stride = pool.stride(0)
    if pool.stride()[1:] != (tile, dim, 1) or block_stride % tile:
        return pool[ids].transpose(1, 2).flatten(2, 3)
    per_block = block_stride // tile
    rows = pool.as_strided(((pool.shape[0] - 1) * per_block + kv_heads, tile), (tile, 1))
    heads = torch.arange(kv_heads, device=ids.device)[:, None]
    tiles = embedding(ids[:, None] * per_block + heads, rows)  # [batch, kv_heads, columns, tile]
    return tiles.view(ids.shape[0], kv_heads, -1, dim)


def _stored(blocks: LayerBlocks, start: int, end: int) -> torch.Tensor | None:
    """Boolean `[batch, end - start]`: which tokens lie in a block that is stored; None if all are."""
    stored = _columns(blocks, start, end) != NULL_BLOCK
    if stored.is_cpu and stored.all():
        return None
    skip = start % blocks.block_size
    return stored.repeat_interleave(blocks.block_size, dim=1)[:, skip : skip + end - start]


def _masking(
    blocks: LayerBlocks, a: Attention, mask: torch.Tensor | None, start: int, end: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What of the tokens `[start, end)` is visible, None if all, and what is added to their scores."""
    terms: list[torch.Tensor] = []
    bias: torch.Tensor | None = None
    q_tokens, device = a.query.shape[2], a.query.device
    first_query = a.end - q_tokens if a.queries_are_last else a.end
    positions = torch.arange(start, end, device=device)
    query_positions = torch.arange(first_query, first_query + q_tokens, device=device)[:, None]
    if a.causal and end - 1 > first_query:
        terms.append((positions <= query_positions)[None, None])
    if a.window is not None and start <= first_query + q_tokens - 1 - a.window:
        terms.append((positions > query_positions - a.window)[None, None])
    stored = _stored(blocks, start, end)
    if stored is not None:
        terms.append(stored[:, None, None])
    if mask is not None:
        allowed, bias = parts.split_mask(mask[..., start - a.start : end - a.start])
        terms.append(allowed)
    visible = None
    for term in terms:
        visible = term if visible is None else visible & term
    return visible, bias
