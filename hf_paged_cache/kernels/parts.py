"""Attention of dense parts of the keys, and their merge by log-sum-exp.

Softmax over a long row can be taken part by part if each part also says the logarithm of its denominator
(online softmax, Milakov & Gimelshein 2018; as used between splits by Flash-Decoding, Dao et al. 2023).

Heads are kept as `[kv_heads, group]` here, so that a group's queries can be laid end to end and share one
product with their keys. Masks come as `[batch or 1, q_heads or 1, q_tokens or 1, tokens]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

PACKED_MASK_TOKENS = 16
"""Up to so many queries a mask is repeated over the head group, to lay the group's queries end to end."""

FAR = -1e4
"""A finite mask below this spoils the precision of a row's log-sum-exp."""
SWALLOWS = -1e30
"""Adding this to a score gives the same float32 whatever the score is."""


@dataclass(slots=True)
class Part:
    """Attention over some of the keys.

    Attributes:
        out: `[batch, kv_heads, group, q_tokens, v_head_dim]`, zeros where a query sees nothing.
        lse: `[batch, kv_heads, group, q_tokens]`, float32 (float64 for such queries), -inf where it sees
            nothing.
    """

    out: torch.Tensor
    lse: torch.Tensor

    def merge(self, other: Part) -> Part:
        """Attention over the keys of both parts."""
        weight = torch.sigmoid(other.lse - self.lse)
        weight = weight.masked_fill(other.lse == -torch.inf, 0.0)  # -inf - -inf is NaN
        mine, theirs = self.out.to(self.lse.dtype), other.out.to(self.lse.dtype)
        return Part(torch.lerp(mine, theirs, weight[..., None]), torch.logaddexp(self.lse, other.lse))

    def with_sink(self, logits: torch.Tensor) -> Part:
        """The part with one more key of value zero.

        Args:
            logits: Its score, broadcastable to `lse`.
        """
        weight = torch.sigmoid(self.lse - logits).masked_fill(self.lse == -torch.inf, 0.0)
        return Part(self.out.to(self.lse.dtype) * weight[..., None], torch.logaddexp(self.lse, logits))

    def tokens_first(self, dtype: torch.dtype) -> torch.Tensor:
        """The output as `[batch, q_tokens, q_heads, v_head_dim]`, contiguous."""
        return self.out.permute(0, 3, 1, 2, 4).to(dtype).contiguous().flatten(2, 3)


def split_heads(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """`[batch, q_heads or 1, ...]` as `[batch, kv_heads or 1, group or 1, ...]`."""
    return x.unsqueeze(1) if x.shape[1] == 1 and kv_heads > 1 else torch.unflatten(x, 1, (kv_heads, -1))


def four_dims(mask: torch.Tensor, tokens: int) -> torch.Tensor:
    """A mask with all four dimensions, the last of them `tokens` long."""
    mask = mask[(None,) * (4 - mask.dim())]
    return mask.expand(*mask.shape[:3], tokens)


def causal_visible(q_tokens: int, device: torch.device) -> torch.Tensor:
    """Boolean `[1, 1, q_tokens, q_tokens]`: each token sees itself and those before."""
    return torch.ones(q_tokens, q_tokens, dtype=torch.bool, device=device).tril()[None, None]


def split_mask(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A boolean or additive mask as what is visible and what is added to a score."""
    return (mask, None) if mask.dtype == torch.bool else (mask != -torch.inf, mask)


def lift_far_rows(
    query: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Take what is common to a whole row out of an additive mask.

    A query that is masked everywhere by a finite number (padding, in eager masks) averages all tokens alike.
    Its log-sum-exp cannot say how many tokens a part had, because float32 drops log(n) beside -3e38; so such
    rows are computed without the number.

    Args:
        query: `[batch, q_heads, q_tokens, head_dim]`.
        mask: Floating, four dimensions, all tokens of the row.

    Returns:
        Query and mask to compute with, and what was taken out, `[batch or 1, q_heads or 1, q_tokens or 1]`,
        or None.
    """
    top = mask.amax(dim=-1, keepdim=True)
    far = (top < FAR) & (top > -torch.inf)
    if not far.any():
        return query, mask, None
    dtype = accumulate_dtype(query)
    taken = top.to(dtype).masked_fill(~far, 0.0)
    return query.masked_fill(taken < SWALLOWS, 0.0), mask.to(dtype) - taken, taken[..., 0]


def accumulate_dtype(query: torch.Tensor) -> torch.dtype:
    """What sums over tokens are kept in."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


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
) -> Part:
    """Attention over dense keys; rows that see nothing, and NaN in tokens that nobody sees, do no harm.

    Args:
        query: `[batch, kv_heads, group, q_tokens, head_dim]`.
        keys: `[batch, kv_heads, tokens, head_dim]`, at least one token.
        values: `[batch, kv_heads, tokens, v_head_dim]`.
        scale: Factor on q·k.
        softcap: As in `Attention`.
        visible: None, or a boolean mask.
        bias: None, or an additive mask; where it is -inf, `visible` must be False.
        causal: Queries and keys are the same tokens.
    """
    flash = has_flash(query, softcap)
    if causal and not (flash and visible is None and bias is None):
        triangle = causal_visible(query.shape[3], query.device)
        visible = triangle if visible is None else visible & triangle
        causal = False
    if visible is not None:
        seen = (
            split_heads(visible, query.shape[1]).any(dim=3).any(dim=2)
        )  # [batch or 1, kv_heads or 1, tokens]
        if not seen.all():
            keys, values = (x.masked_fill(~seen[..., None], 0.0) for x in (keys, values))
    if flash:
        part = _flash(query, keys, values, scale, visible, bias, causal)
    else:
        part = _plain(query, keys, values, scale, softcap, visible, bias)
    if visible is None:
        return part
    blind = split_heads(~visible.any(dim=-1), query.shape[1])
    return Part(part.out.masked_fill(blind[..., None], 0.0), part.lse.masked_fill(blind, -torch.inf))


def _flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    visible: torch.Tensor | None,
    bias: torch.Tensor | None,
    causal: bool,
) -> Part:
    _, kv_heads, group, q_tokens, head_dim = query.shape
    v_head_dim = values.shape[3]
    if head_dim != v_head_dim:  # the operator wants them equal; zeros add nothing to q·k
        wide = max(head_dim, v_head_dim)
        query, keys, values = (pad(x, (0, wide - x.shape[-1])) for x in (query, keys, values))
    mask = _additive(visible, bias, accumulate_dtype(query))
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
    if packed:
        dim, sizes = 2, (group, q_tokens)
    else:
        dim, sizes = 1, (kv_heads, group)
    out, lse = torch.unflatten(out, dim, sizes), torch.unflatten(lse, dim, sizes)
    return Part(out[..., :v_head_dim], lse)


def _additive(
    visible: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor | None:
    if visible is None:
        return None if bias is None else bias.to(dtype)
    added = torch.zeros(visible.shape, dtype=dtype, device=visible.device) if bias is None else bias.to(dtype)
    return added.masked_fill(~visible, -torch.inf)


def _plain(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    softcap: float | None,
    visible: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> Part:
    dtype = accumulate_dtype(query)
    group, q_tokens = query.shape[2:4]
    scores = query.flatten(2, 3).to(dtype) @ keys.to(dtype).mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = torch.unflatten(scores, 2, (group, q_tokens))
    if bias is not None:
        scores = scores + split_heads(bias, query.shape[1]).to(dtype)
    if visible is not None:
        scores = scores.masked_fill(~split_heads(visible, query.shape[1]), -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    out = weights.flatten(2, 3) @ values.to(dtype)
    return Part(torch.unflatten(out, 2, (group, q_tokens)), lse)
