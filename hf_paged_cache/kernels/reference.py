"""The meaning of every kernel (`backend.Backend`) in loops: slow, obvious, what fast backends are held to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hf_paged_cache.errors import UnstorableValueError
from hf_paged_cache.formats.codec import LARGEST_VALUE

from .call import NULL_BLOCK, dense_entry

if TYPE_CHECKING:
    from hf_paged_cache.formats import RecordFormat

    from .call import Attention, LayerBlocks

ACCUMULATE_DTYPE = torch.float32
"""What sums are kept in. Tests set float64; float64 queries are always summed in float64."""


def unavailable_reason() -> str | None:
    """None: plain torch runs wherever torch does."""
    return None


def unsupported_reason(blocks: LayerBlocks) -> str | None:
    """None: every dtype and device is served."""
    return None


def write(blocks: LayerBlocks, key_states: torch.Tensor, value_states: torch.Tensor, start: int) -> None:
    """As `Backend.write`."""
    batch, _, tokens, _ = key_states.shape
    if blocks.records is not None:
        check_storable(blocks, key_states, value_states, start)
    for row in range(batch):
        for token in range(tokens):
            entry, slot = _entry_and_slot(blocks, row, start + token)
            if entry == NULL_BLOCK:
                continue
            k, v = key_states[row, :, token], value_states[row, :, token]
            if blocks.records is None or blocks.layout is None or entry < NULL_BLOCK:
                block = entry if entry >= 0 else dense_entry(entry)
                blocks.keys[block, :, slot], blocks.values[block, :, slot] = k, v
            elif blocks.layout.format.is_per_token:
                blocks.layout.encode_tokens(k[:, None], v[:, None], blocks.records[entry], slot)
            elif slot == 0:
                whole = slice(token, token + blocks.block_size)
                k, v = key_states[row, :, whole], value_states[row, :, whole]
                blocks.layout.encode(k, v, blocks.records[entry])


def _entry_and_slot(blocks: LayerBlocks, row: int, column: int) -> tuple[int, int]:
    """The table's entry for the block that has a column, and the slot in it."""
    position = column if blocks.offsets is None else column - int(blocks.offsets[row])
    if position < 0:
        return NULL_BLOCK, 0
    logical_block, slot = divmod(position, blocks.block_size)
    return int(blocks.table[row, logical_block]), slot


def check_storable(
    blocks: LayerBlocks, key_states: torch.Tensor, value_states: torch.Tensor, start: int
) -> None:
    """Raise UnstorableValueError if a format could not hold K or V of a row from its beginning on."""
    if blocks.offsets is not None:
        columns = torch.arange(start, start + key_states.shape[2], device=blocks.offsets.device)
        before = (columns < blocks.offsets[:, None])[:, None, :, None]
        key_states, value_states = (x.masked_fill(before, 0.0) for x in (key_states, value_states))
    for name, x in (("K", key_states), ("V", value_states)):
        if x.numel() and not float(x.abs().amax()) <= LARGEST_VALUE:
            raise unstorable(name)


def unstorable(name: str) -> UnstorableValueError:
    """The error for K or V, by name."""
    return UnstorableValueError(
        f"{name} has a NaN, an infinity or a magnitude above {LARGEST_VALUE:g}, for which a quantized block "
        "has no scale"
    )


def gather(blocks: LayerBlocks, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `dispatch.gather`."""
    keys, values = _stored(blocks, start, end)
    return keys.to(blocks.keys.dtype), values.to(blocks.values.dtype)


def _stored(blocks: LayerBlocks, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What `gather` returns, in float32 or more where it is stored in records."""
    batch, heads = blocks.table.shape[0], blocks.keys.shape[1]
    dtype = blocks.keys.dtype
    if blocks.records is not None:
        dtype = torch.promote_types(dtype, torch.float32)
    keys, values = (
        x.new_zeros(batch, heads, end - start, x.shape[3], dtype=dtype) for x in (blocks.keys, blocks.values)
    )
    for row in range(batch):
        for column in range(start, end):
            entry, slot = _entry_and_slot(blocks, row, column)
            if entry == NULL_BLOCK:
                continue
            if blocks.records is None or blocks.layout is None or entry < NULL_BLOCK:
                block = entry if entry >= 0 else dense_entry(entry)
                k, v = blocks.keys[block], blocks.values[block]
            else:
                k, v = blocks.layout.decode(blocks.records[entry])
            keys[row, :, column - start], values[row, :, column - start] = k[:, slot], v[:, slot]
    return keys, values


def decode(
    blocks: LayerBlocks, a: Attention, *, return_lse: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `Backend.decode`."""
    batch, q_heads, q_tokens, _ = a.query.shape
    dtype = torch.float64 if a.query.dtype == torch.float64 else ACCUMULATE_DTYPE
    keys, values = _stored(blocks, a.start, a.end)
    visible, bias = _visible_and_bias(blocks, a, dtype)
    out = torch.zeros(batch, q_tokens, q_heads, values.shape[3], dtype=dtype, device=a.query.device)
    lse = torch.full((batch, q_heads, q_tokens), -torch.inf, dtype=dtype, device=a.query.device)
    group = q_heads // keys.shape[1]
    for row in range(batch):
        for head in range(q_heads):
            sink = None if a.sinks is None else a.sinks[head].to(dtype)
            for i in range(q_tokens):
                shown = visible[row, head, i].nonzero()[:, 0]
                scores = keys[row, head // group, shown].to(dtype) @ a.query[row, head, i].to(dtype) * a.scale
                if a.softcap is not None:
                    scores = a.softcap * torch.tanh(scores / a.softcap)
                scores = scores + bias[row, head, i, shown]
                logits = scores if sink is None else torch.cat([scores, sink[None]])
                lse[row, head, i] = torch.logsumexp(logits, dim=0) if len(logits) else -torch.inf
                # softmax, not exp(score - lse): a mask of finfo.min swallows the scores, and lse with them.
                weights = torch.softmax(logits, dim=0)[: len(shown)]
                out[row, i, head] = weights @ values[row, head // group, shown].to(dtype)
    return out.to(a.query.dtype), lse.float() if return_lse else None


def copy_blocks(pool: torch.Tensor, src: list[int], dst: list[int]) -> None:
    """As `Backend.copy_blocks`."""
    contents = [pool[source].clone() for source in src]
    for content, target in zip(contents, dst, strict=True):
        pool[target] = content


def encode_blocks(
    layout: RecordFormat,
    records: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    dense_ids: list[int],
    ids: list[int],
) -> None:
    """As `Backend.encode_blocks`."""
    for dense_id, block_id in zip(dense_ids, ids, strict=True):
        layout.encode(keys[dense_id], values[dense_id], records[block_id])


def decode_blocks(
    layout: RecordFormat,
    records: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    dense_ids: list[int],
    ids: list[int],
) -> None:
    """As `Backend.decode_blocks`."""
    for dense_id, block_id in zip(dense_ids, ids, strict=True):
        keys[dense_id], values[dense_id] = layout.decode(records[block_id])


def _visible_and_bias(
    blocks: LayerBlocks, a: Attention, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which token a query sees, and what is added to its score: `[batch, q_heads, q_tokens, end - start]`."""
    batch, q_heads, q_tokens, _ = a.query.shape
    device, columns = a.query.device, range(a.start, a.end)
    shape = (batch, q_heads, q_tokens, len(columns))
    positions = torch.arange(a.start, a.end, device=device)
    stored = [_entry_and_slot(blocks, row, c)[0] != NULL_BLOCK for row in range(batch) for c in columns]
    visible = torch.tensor(stored, dtype=torch.bool, device=device).view(batch, 1, 1, len(columns))
    visible = visible.expand(shape).clone()
    first_query = a.end - q_tokens if a.queries_are_last else a.end
    query_positions = torch.arange(first_query, first_query + q_tokens, device=device)[:, None]
    if a.causal:
        visible &= positions <= query_positions
    if a.window is not None:
        visible &= positions > query_positions - a.window
    bias = torch.zeros(shape, dtype=dtype, device=device)
    if a.mask is not None and a.mask.dtype == torch.bool:
        visible &= a.mask
    elif a.mask is not None:
        visible &= a.mask != -torch.inf
        bias += a.mask.to(dtype)
    return visible, bias
