"""Attention over some of the keys, dense, and the merge of such partial answers by log-sum-exp.

Softmax over a long row can be taken bit by bit if each partial answer has the logarithm of its denominator
(online softmax, Milakov & Gimelshein 2018; as used between splits by Flash-Decoding, Dao et al. 2023).

Heads are kept as `[kv_heads, group]` here, so that a group's queries can be laid end to end and share one
product with their keys. Masks are as in `masking`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from .masking import accumulate_dtype, additive, any_over, both, causal_visible

# Up to so many queries a mask is repeated over the head group, to lay the group's queries end to end.
PACKED_MASK_TOKENS = 16


@dataclass(slots=True)
class Partial:
    """Attention over some of the keys."""

    out: torch.Tensor  # `[batch, kv_heads, group, q_tokens, v_head_dim]`, zeros where a query sees nothing
    lse: torch.Tensor  # `[batch, kv_heads, group, q_tokens]`, -inf there; of `accumulate_dtype`

    def merge(self, other: Partial) -> Partial:
        """Attention over the keys of both."""
        weight = torch.sigmoid(other.lse - self.lse)
        weight = weight.masked_fill(other.lse == -torch.inf, 0.0)  # -inf - -inf is NaN
        mine, theirs = self.out.to(self.lse.dtype), other.out.to(self.lse.dtype)
        return Partial(torch.lerp(mine, theirs, weight[..., None]), torch.logaddexp(self.lse, other.lse))

    def tokens_first(self, dtype: torch.dtype) -> torch.Tensor:
        """The output as `[batch, q_tokens, q_heads, v_head_dim]`, contiguous."""
        return self.out.permute(0, 3, 1, 2, 4).to(dtype).contiguous().flatten(2, 3)


def nothing(query: torch.Tensor, v_head_dim: int) -> Partial:
    """Attention over no tokens, for queries `[batch, kv_heads, group, q_tokens, head_dim]`."""
    lse = torch.full(query.shape[:4], -torch.inf, dtype=accumulate_dtype(query), device=query.device)
    return Partial(query.new_zeros(*query.shape[:4], v_head_dim), lse)


def split_heads(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """`[batch, q_heads or 1, ...]` as `[batch, kv_heads or 1, group or 1, ...]`."""
    return x.unsqueeze(1) if x.shape[1] == 1 else torch.unflatten(x, 1, (kv_heads, -1))


def has_flash(query: torch.Tensor, softcap: float | None) -> bool:
    """Whether torch's own CPU kernel answers, which keeps no scores in memory."""
    return query.is_cpu and softcap is None


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    visible: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    causal: bool = False,
) -> Partial:
    """Attention over dense keys. Queries that see nothing, and NaN in tokens that nobody sees, do no harm.

    The query is `[batch, kv_heads, group, q_tokens, head_dim]`, K are `[batch, kv_heads, tokens, head_dim]`,
    at least one token. If `causal`, queries and keys are the same, and each sees itself and those before.
    """
    flash = has_flash(query, softcap)
    if causal and not (flash and visible is None and bias is None):
        visible, causal = both(visible, causal_visible(query.shape[3], query.device)), False
    if visible is not None:
        hidden = ~any_over(split_heads(visible, query.shape[1]), 2, 3)  # [batch or 1, kv_heads or 1, tokens]
        if hidden.any():
            keys, values = (x.masked_fill(hidden[..., None], 0.0) for x in (keys, values))
    if flash:
        partial = _flash(query, keys, values, scale, additive(visible, bias, accumulate_dtype(query)), causal)
    else:
        partial = _plain(query, keys, values, scale, softcap, visible, bias)
    if visible is None:
        return partial
    blind = split_heads(~any_over(visible, 3), query.shape[1])
    if not blind.any():
        return partial
    return Partial(partial.out.masked_fill(blind[..., None], 0.0), partial.lse.masked_fill(blind, -torch.inf))


def _flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    causal: bool,
) -> Partial:
    _, kv_heads, group, q_tokens, head_dim = query.shape
    v_head_dim = values.shape[3]
    if head_dim != v_head_dim:  # the operator wants them equal; zeros add nothing to q·k
        wide = max(head_dim, v_head_dim)
        query, keys, values = (pad(x, (0, wide - x.shape[-1])) for x in (query, keys, values))
    packed = not causal and (mask is None or q_tokens <= PACKED_MASK_TOKENS)
    if packed and mask is not None:
        mask = split_heads(mask, kv_heads)
        mask = mask.expand(-1, -1, group, q_tokens, -1).flatten(2, 3)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query.flatten(2, 3) if packed else query.flatten(1, 2),
        keys,
        values,
        is_causal=causal,
        attn_mask=mask,
        scale=scale,
    )
    dim, sizes = (2, (group, q_tokens)) if packed else (1, (kv_heads, group))
    return Partial(torch.unflatten(out, dim, sizes)[..., :v_head_dim], torch.unflatten(lse, dim, sizes))


def _plain(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    softcap: float | None,
    visible: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> Partial:
    dtype = accumulate_dtype(query)
    kv_heads, group, q_tokens = query.shape[1:4]
    factor = scale if softcap is None else scale / softcap
    scores = (query.flatten(2, 3).to(dtype) * factor) @ keys.to(dtype).mT
    if softcap is not None:
        scores.tanh_().mul_(softcap)
    scores = torch.unflatten(scores, 2, (group, q_tokens))
    if bias is not None:
        scores += split_heads(bias, kv_heads)
    if visible is not None:
        scores.masked_fill_(~split_heads(visible, kv_heads), -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = scores.sub_(lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp_()
    out = weights.flatten(2, 3) @ values.to(dtype)
    return Partial(torch.unflatten(out, 2, (group, q_tokens)), lse)
