"""Attention of many new tokens over stored history and over each other.

The new tokens' K and V are attended in the model's own precision, as they came out of the projections; the
history is read chunk by chunk from its blocks; the parts are merged by log-sum-exp. On CPU this beats masked
SDPA over dense K/V: the history needs no mask, and no head is repeated.
"""

from __future__ import annotations

import torch

from . import parts, torch_blocks
from .parts import Part
from .problem import Attention, LayerBlocks

CHUNK_TOKENS = 2048
"""Stored tokens that are dense at one time."""


def attend_with_history(
    blocks: LayerBlocks,
    *,
    query: torch.Tensor,
    fresh_keys: torch.Tensor,
    fresh_values: torch.Tensor,
    history_start: int,
    history_end: int,
    scale: float,
    mask: torch.Tensor | None,
    is_causal: bool,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend the stored tokens `[history_start, history_end)` and the fresh ones.

    Query i stands at position `history_end + i`. Whether the fresh tokens have been written to blocks already
    makes no
    difference: they are never read from there.

    Args:
        blocks: The history. Not changed.
        query: `[batch, q_heads, q_tokens, head_dim]`.
        fresh_keys: `[batch, kv_heads, q_tokens, head_dim]`, in the query's dtype.
        fresh_values: `[batch, kv_heads, q_tokens, v_head_dim]`.
        history_start: First stored token attended.
        history_end: One past the last; equal to `history_start` if there is no history.
        scale: Factor on q·k.
        mask: None, or broadcastable to `[batch, q_heads, q_tokens, history + q_tokens]`, history first:
            boolean (True = attend) or additive.
        is_causal: Query i sees the fresh tokens up to its own. Independent of `mask`; both apply.
        window: None, or query at position p sees only positions > p - window.
        softcap: None, or c: score = c * tanh(score / c).
        sinks: None, or `[q_heads]`: a logit per head in the denominator only.

    Returns:
        `[batch, q_tokens, q_heads, v_head_dim]`, contiguous, in the query's dtype; zeros where a query sees
        nothing.
    """
    dtype, history = query.dtype, history_end - history_start
    taken: torch.Tensor | None = None
    if mask is not None:
        mask = parts.four_dims(mask, history + query.shape[2])
        if mask.dtype != torch.bool:
            query, mask, taken = parts.lift_far_rows(query, mask)
    a = Attention(
        query, history_start, history_end, scale, window=window, softcap=softcap, queries_are_last=False
    )
    grouped = parts.split_heads(query.contiguous(), blocks.keys.shape[1])
    old_mask, new_mask = (None, None) if mask is None else (mask[..., :history], mask[..., history:])
    part = torch_blocks.attend_blocks(blocks, a, grouped, old_mask, chunk_tokens=_chunk_tokens(a))
    fresh = _attend_fresh(a, grouped, fresh_keys, fresh_values, new_mask, is_causal)
    part = fresh if part is None else part.merge(fresh)
    return torch_blocks.with_sinks(part, sinks, taken).tokens_first(dtype)


def _attend_fresh(
    a: Attention,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
) -> Part:
    visible, bias = (None, None) if mask is None else parts.split_mask(mask)
    q_tokens = query.shape[3]
    if a.window is not None and a.window < q_tokens:
        near = ~torch.ones(q_tokens, q_tokens, dtype=torch.bool, device=query.device).tril(-a.window)
        visible = near[None, None] if visible is None else visible & near
    return parts.attend(
        query,
        keys,
        values,
        scale=a.scale,
        softcap=a.softcap,
        visible=visible,
        bias=bias,
        causal=is_causal,
    )


def _chunk_tokens(a: Attention) -> int:
    if parts.has_flash(a.query, a.softcap):
        return CHUNK_TOKENS
    batch, q_heads, q_tokens, _ = a.query.shape
    return min(CHUNK_TOKENS, torch_blocks.SCORE_BYTES // (batch * q_heads * q_tokens * 4))
