"""Attention of many new tokens over stored history and over each other.

The new tokens' K and V are attended in the model's own precision, as they came out of the projections; the
history is read from its blocks; the parts are merged by log-sum-exp. A backend may bring kernels for both.
Without, torch's own attend it chunk by chunk. On CPU this beats masked SDPA over dense K/V: the history needs
no mask, and no head is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from . import dispatch
from .call import Attention, LayerBlocks
from .torch import partial_softmax, torch_kernels
from .torch.masking import accumulate_dtype, additive, all_over, both, causal_visible, read_mask
from .torch.partial_softmax import Part

CHUNK_TOKENS = 2048
"""Stored tokens that are dense at one time."""
MAX_DECODE_TOKENS = 16
"""Up to so many queries per row go to the decode kernel, more to the prefill over history."""
STRIP_TOKENS = 256
"""Fresh queries that are attended at one time."""


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
    makes no difference: they are never read from there.

    Args:
        blocks: The history. Not changed.
        query: `[batch, q_heads, q_tokens, head_dim]`.
        fresh_keys: `[batch, kv_heads, q_tokens, head_dim]`, in the query's dtype.
        fresh_values: `[batch, kv_heads, q_tokens, v_head_dim]`.
        history_start: First stored token attended.
        history_end: One past the last; equal to `history_start` if there is no history.
        scale: Factor on q·k.
        mask: None, or broadcastable to `[batch, q_heads, q_tokens, history + q_tokens]`, history first:
            boolean (True = attend) or additive. Fresh tokens before a row begins need not be hidden by it.
        is_causal: Query i sees the fresh tokens up to its own. Independent of `mask`; both apply.
        window: None, or query at position p sees only positions > p - window.
        softcap: None, or c: score = c * tanh(score / c).
        sinks: None, or `[q_heads]`: a logit per head in the denominator only.

    Returns:
        `[batch, q_tokens, q_heads, v_head_dim]`, contiguous, in the query's dtype; zeros where a query sees
        nothing.
    """
    dtype, history = query.dtype, history_end - history_start
    read = read_mask(query, mask, history + query.shape[2])
    a = Attention(
        query, history_start, history_end, scale, window=window, softcap=softcap, queries_are_last=False
    )
    (old_visible, new_visible), (old_bias, new_bias) = (
        (None, None) if x is None else (x[..., :history], x[..., history:]) for x in (read.visible, read.bias)
    )
    if blocks.offsets is not None:
        columns = torch.arange(history_end, history_end + query.shape[2], device=query.device)
        begun = columns >= blocks.offsets[:, None]
        if not (begun.is_cpu and begun.all()):
            new_visible = both(new_visible, begun[:, None, None])
    kernels = dispatch.prefill_backend(blocks)
    if kernels is not None:
        a.query = read.query
        part = kernels.attend_fresh(a, fresh_keys, fresh_values, new_visible, new_bias, is_causal)
        if history:
            part = kernels.attend_history(blocks, a, old_visible, old_bias).merge(part)
        return torch_kernels.with_sinks(part, sinks, read.taken).tokens_first(dtype)
    grouped = partial_softmax.split_heads(read.query.contiguous(), blocks.keys.shape[1])
    part = _attend_fresh(a, grouped, fresh_keys, fresh_values, new_visible, new_bias, is_causal)
    if history:
        part = _attend_history(blocks, a, read.query, grouped, old_visible, old_bias).merge(part)
    return torch_kernels.with_sinks(part, sinks, read.taken).tokens_first(dtype)


def _attend_history(
    blocks: LayerBlocks,
    a: Attention,
    query: torch.Tensor,
    grouped: torch.Tensor,
    visible: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> Part:
    """Attention over the stored tokens; `grouped` is `query`, its heads split by kv head."""
    is_float64 = accumulate_dtype(query) == torch.float64  # which a log-sum-exp in float32 would spoil
    if blocks.records is not None and query.shape[2] <= MAX_DECODE_TOKENS and not is_float64:
        mask = visible if bias is None else additive(visible, bias, torch.float32)
        question = replace(a, query=query, mask=mask)
        out, lse = dispatch.decode(blocks, question, return_lse=True)
        heads = blocks.keys.shape[1]
        return Part(
            partial_softmax.split_heads(out.transpose(1, 2), heads), partial_softmax.split_heads(lse, heads)
        )
    return torch_kernels.attend_blocks(
        blocks, a, grouped, visible, bias, chunk_tokens=_chunk_tokens(a), read=dispatch.gather
    )


def _attend_fresh(
    a: Attention,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
    bias: torch.Tensor | None,
    is_causal: bool,
) -> Part:
    """Attention among the fresh tokens, in strips of queries.

    Strips keep temporaries small, and spare keys that come after all of a strip's queries: torch's kernel
    computes tiles of 512 keys, seen or not.
    """
    triangle = causal_visible(query.shape[3], query.device)
    if is_causal and visible is not None:
        visible = visible & triangle
    if a.window is not None and a.window < query.shape[3]:
        visible = both(visible, ~triangle.tril(-a.window))
    if visible is not None and bias is None and visible.is_cpu and all_over(visible == triangle, 0, 1, 2, 3):
        visible, is_causal = None, True  # masks of the host say causality in their own way
    if is_causal and (visible is not None or bias is not None):
        visible = both(visible, triangle)
    strips = [
        _attend_strip(a, query, keys, values, visible, bias, is_causal, start, end)
        for start, end in _strips(a)
    ]
    if len(strips) == 1:
        return strips[0]
    return Part(torch.cat([s.out.to(s.lse.dtype) for s in strips], 3), torch.cat([s.lse for s in strips], 3))


def _attend_strip(
    a: Attention,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
    bias: torch.Tensor | None,
    is_causal: bool,
    start: int,
    end: int,
) -> Part:
    """Attention of the fresh queries `[start, end)`; `visible`, where there is one, says causality too."""

    def attend(first: int, last: int, causal: bool) -> Part:
        return partial_softmax.attend(
            query[..., start:end, :],
            keys[:, :, first:last],
            values[:, :, first:last],
            scale=a.scale,
            softcap=a.softcap,
            visible=_window_of(visible, start, end, first, last),
            bias=_window_of(bias, start, end, first, last),
            causal=causal,
        )

    if not is_causal:
        return attend(0, keys.shape[2], False)
    if visible is not None:
        return attend(0, end, False)
    own = attend(start, end, True)
    return own if start == 0 else own.merge(attend(0, start, False))


def _window_of(x: torch.Tensor | None, start: int, end: int, first: int, last: int) -> torch.Tensor | None:
    """Queries `[start, end)` and tokens `[first, last)` of a mask."""
    return None if x is None else (x if x.shape[2] == 1 else x[:, :, start:end])[..., first:last]


def _strips(a: Attention) -> Iterator[tuple[int, int]]:
    batch, q_heads, q_tokens, _ = a.query.shape
    strip_tokens = STRIP_TOKENS
    if not partial_softmax.has_flash(a.query, a.softcap):
        fitting = torch_kernels.SCORE_BYTES // (batch * q_heads * q_tokens * 4)
        strip_tokens = max(16, min(strip_tokens, fitting))
    for start in range(0, q_tokens, strip_tokens):
        yield start, min(start + strip_tokens, q_tokens)


def _chunk_tokens(a: Attention) -> int:
    if partial_softmax.has_flash(a.query, a.softcap):
        return CHUNK_TOKENS
    batch, q_heads, q_tokens, _ = a.query.shape
    # Below 256 tokens, merging chunks would cost as much as attending them.
    fitting = torch_kernels.SCORE_BYTES // (batch * q_heads * q_tokens * 4)
    return min(CHUNK_TOKENS, max(256, fitting))
