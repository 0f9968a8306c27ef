"""Attention of many new tokens over stored history and over each other.

The new tokens' K and V are attended in the model's own precision, as they came out of the projections; the
history is read from its blocks; both are merged by log-sum-exp. A backend may bring kernels for them.
Without, torch's own attend the history chunk by chunk. On CPU this beats masked SDPA over dense K/V: the
history needs no mask, and no head is repeated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from . import dispatch
from .torch import partial_softmax, torch_kernels
from .torch.masking import accumulate_dtype, additive, all_over, both, causal_visible, read_mask
from .torch.partial_softmax import Partial, attend, split_heads

if TYPE_CHECKING:
    from .call import Attention, LayerBlocks

CHUNK_TOKENS = 2048
"""Stored tokens that are dense at one time."""
MAX_DECODE_TOKENS = 16
"""Up to so many queries per row go to the decode kernel, more to the prefill over history."""
STRIP_TOKENS = 256
"""Fresh queries that are attended at one time."""


def attend_with_history(
    blocks: LayerBlocks, a: Attention, fresh_keys: torch.Tensor, fresh_values: torch.Tensor
) -> torch.Tensor:
    """Attend the stored tokens `[a.start, a.end)`, the history, and the fresh ones of the queries.

    Query i stands at position `a.end + i`. Whether the fresh tokens have been written to blocks already makes
    no difference: they are never read from there. The mask is broadcastable to `[batch, q_heads, q_tokens,
    history + q_tokens]`, history first; fresh tokens before a row begins need not be hidden by it. Fresh K
    and V are `[batch, kv_heads, q_tokens, head_dim]`, in the query's dtype. Returns as `Backend.decode`.
    """
    history, q_tokens = a.end - a.start, a.query.shape[2]
    read = read_mask(a.query, a.mask, history + q_tokens)
    (old_visible, new_visible), (old_bias, new_bias) = (
        (None, None) if x is None else (x[..., :history], x[..., history:]) for x in (read.visible, read.bias)
    )
    if blocks.offsets is not None:
        columns = torch.arange(a.end, a.end + q_tokens, device=a.query.device)
        begun = columns >= blocks.offsets[:, None]
        if not (begun.is_cpu and begun.all()):
            new_visible = both(new_visible, begun[:, None, None])
    own = dispatch.prefill_backend(blocks)
    attend_fresh, attend_history = (
        (_attend_fresh, _attend_history) if own is None else (own.attend_fresh, own.attend_history)
    )
    query = read.query.contiguous() if own is None else read.query
    bare = replace(a, query=query, mask=None, causal=False, sinks=None, queries_are_last=False)
    partial = attend_fresh(bare, fresh_keys, fresh_values, new_visible, new_bias, a.causal)
    if history:
        partial = attend_history(blocks, bare, old_visible, old_bias).merge(partial)
    return torch_kernels.with_sinks(partial, a.sinks, read.taken).tokens_first(a.query.dtype)


def _attend_history(
    blocks: LayerBlocks, a: Attention, visible: torch.Tensor | None, bias: torch.Tensor | None
) -> Partial:
    """As `PrefillBackend.attend_history`."""
    kv_heads = blocks.keys.shape[1]
    is_float64 = accumulate_dtype(a.query) == torch.float64  # which a log-sum-exp in float32 would spoil
    if blocks.records is not None and a.query.shape[2] <= MAX_DECODE_TOKENS and not is_float64:
        mask = visible if bias is None else additive(visible, bias, torch.float32)
        out, lse = dispatch.decode(blocks, replace(a, mask=mask), return_lse=True)
        assert lse is not None, "it was asked for"
        return Partial(split_heads(out.transpose(1, 2), kv_heads), split_heads(lse, kv_heads))
    chunk_tokens = CHUNK_TOKENS
    if not partial_softmax.has_flash(a.query, a.softcap):
        # Below 256 tokens, merging chunks would cost as much as attending them.
        chunk_tokens = min(chunk_tokens, max(256, torch_kernels.scored_tokens(a)))
    query = split_heads(a.query, kv_heads)
    return torch_kernels.attend_blocks(
        blocks, a, query, visible, bias, chunk_tokens=chunk_tokens, read=dispatch.gather
    )


def _attend_fresh(
    a: Attention,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
    bias: torch.Tensor | None,
    is_causal: bool,
) -> Partial:
    """As `PrefillBackend.attend_fresh`, in strips of queries.

    Strips keep temporaries small, and spare keys that come after all of a strip's queries: torch's kernel
    computes tiles of 512 keys, seen or not.
    """
    q_tokens = a.query.shape[2]
    triangle = causal_visible(q_tokens, a.query.device)
    if is_causal and visible is not None:
        visible = visible & triangle
    if a.window is not None and a.window < q_tokens:
        visible = both(visible, ~triangle.tril(-a.window))
    if visible is not None and bias is None and visible.is_cpu and all_over(visible == triangle, 0, 1, 2, 3):
        visible, is_causal = None, True  # masks of the host say causality in their own way
    if is_causal and (visible is not None or bias is not None):
        visible = both(visible, triangle)
    query = split_heads(a.query, keys.shape[1])

    def attend_strip(start: int, end: int) -> Partial:
        def among(first: int, last: int, *, causal: bool = False) -> Partial:
            shown, added = (
                None if x is None else (x if x.shape[2] == 1 else x[:, :, start:end])[..., first:last]
                for x in (visible, bias)
            )
            return attend(
                query[..., start:end, :],
                keys[:, :, first:last],
                values[:, :, first:last],
                scale=a.scale,
                softcap=a.softcap,
                visible=shown,
                bias=added,
                causal=causal,
            )

        if not is_causal or visible is not None:
            return among(0, end if is_causal else keys.shape[2])
        diagonal = among(start, end, causal=True)
        return diagonal if start == 0 else diagonal.merge(among(0, start))

    step = STRIP_TOKENS
    if not partial_softmax.has_flash(a.query, a.softcap):
        step = max(16, min(step, torch_kernels.scored_tokens(a)))
    strips = [attend_strip(start, min(start + step, q_tokens)) for start in range(0, q_tokens, step)]
    if len(strips) == 1:
        return strips[0]
    out = torch.cat([strip.out.to(strip.lse.dtype) for strip in strips], 3)
    return Partial(out, torch.cat([strip.lse for strip in strips], 3))
