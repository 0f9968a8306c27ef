"""Attention masks for the kernels in torch: what a query sees, and what is added to its scores.

Both are `[batch or 1, q_heads or 1, q_tokens or 1, tokens]` here, the former boolean.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FAR = -1e4  # a finite mask below this spoils the precision of a row's log-sum-exp
SWALLOWS = -1e30  # added to any score it gives the same float32, and beside others no probability


@dataclass(slots=True)
class ReadMask:
    """A mask taken apart."""

    query: torch.Tensor  # what to compute with in place of the query
    visible: torch.Tensor | None = None  # None if every token is
    bias: torch.Tensor | None = None  # None if nothing is added; arbitrary where not visible
    # What is missing in all scores of a row alike, `[batch or 1, q_heads or 1, q_tokens or 1]`.
    taken: torch.Tensor | None = None


def read_mask(query: torch.Tensor, mask: torch.Tensor | None, tokens: int) -> ReadMask:
    """Take a mask apart.

    A query that is masked everywhere by a finite number (padding, in eager masks) averages all tokens alike.
    Its log-sum-exp cannot say how many tokens there were, because float32 drops log(n) beside -3e38; so what
    is common to a whole row is taken out, and so are the scores that it would swallow. In other rows tokens
    masked by such a number count as not visible, so that eager masks are as fast as boolean ones.

    The mask is that of `Attention`, over all `tokens` of the row.
    """
    if mask is None or tokens == 0:
        return ReadMask(query)
    mask = mask[(None,) * (4 - mask.dim())]
    mask = mask.expand(*mask.shape[:3], tokens)
    if mask.dtype == torch.bool:
        return ReadMask(query, mask)
    mask = mask.to(accumulate_dtype(query))
    top = mask.amax(dim=-1, keepdim=True)
    far = (top < FAR) & (top > -torch.inf)
    taken = None
    if far.any():
        shift = top.masked_fill(~far, 0.0)
        query, mask, taken = query.masked_fill(shift < SWALLOWS, 0.0), mask - shift, shift[..., 0]
    visible = ~(mask <= SWALLOWS)  # a NaN is visible, so that it shows
    adds_nothing = mask.is_cpu and not mask.masked_fill(~visible, 0.0).any()
    return ReadMask(query, visible, None if adds_nothing else mask, taken)


def accumulate_dtype(query: torch.Tensor) -> torch.dtype:
    """What sums over tokens are kept in."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def both(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    """What is visible by both rules."""
    if a is None or b is None:
        return a if b is None else b
    return a & b


def any_over(x: torch.Tensor, *dims: int) -> torch.Tensor:
    """`x.any(dims)` of a boolean tensor; as bytes it is twenty times faster on CPUs."""
    return x.view(torch.uint8).amax(dim=dims).bool()


def all_over(x: torch.Tensor, *dims: int) -> torch.Tensor:
    """`x.all(dims)` of a boolean tensor."""
    return x.view(torch.uint8).amin(dim=dims).bool()


def causal_visible(q_tokens: int, device: torch.device) -> torch.Tensor:
    """Boolean `[1, 1, q_tokens, q_tokens]`: each token sees itself and those before."""
    return torch.ones(q_tokens, q_tokens, dtype=torch.bool, device=device).tril()[None, None]


def additive(
    visible: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor | None:
    """One additive mask that says both, -inf where not visible."""
    if visible is None:
        return None if bias is None else bias.to(dtype)
    if bias is not None:
        return bias.to(dtype).masked_fill(~visible, -torch.inf)
    zero, never = (torch.tensor(x, dtype=dtype, device=visible.device) for x in (0.0, -torch.inf))
    return torch.where(visible, zero, never)
