"""Arithmetic of the profiler: how far tensors are from what they should be, per head."""

from __future__ import annotations

import torch

from .report import Errors

_TINY = 1e-30


class HeadSums:
    """Sums over vectors, from which the errors of every head follow.

    Sums are kept in float64 on the CPU, so a measurement may go on for any number of steps.
    """

    def __init__(self) -> None:
        self._error = self._norm = self._cosine = torch.zeros(0, dtype=torch.float64)
        self._count = 0

    def add(self, got: torch.Tensor, want: torch.Tensor) -> None:
        """Take in vectors.

        Args:
            got: `[batch, heads, tokens, dim]`.
            want: The same in full precision.
        """
        got, want = got.float(), want.float()
        squares = want.square().sum(-1)
        lengths = (squares * got.square().sum(-1)).sqrt()
        # Two zero vectors agree, and a zero vector agrees with no other.
        both_zero = (lengths == 0) & (got == want).all(-1)
        cosines = (got * want).sum(-1) / lengths.clamp(min=_TINY) + both_zero
        sums = [(got - want).square().sum(-1), squares, cosines]
        error, norm, cosine = (x.sum((0, 2)).to("cpu", torch.float64) for x in sums)
        if not self._count:
            self._error = self._norm = self._cosine = torch.zeros_like(error)
        self._error, self._norm, self._cosine = self._error + error, self._norm + norm, self._cosine + cosine
        self._count += got.shape[0] * got.shape[2]

    def errors(self) -> Errors:
        """The errors over everything that was taken in."""
        cosine = self._cosine / max(self._count, 1)
        return Errors(
            rms_ratio=_ratio(self._error.sum(), self._norm.sum()),
            cosine=float(cosine.mean()),
            rms_ratio_by_head=tuple(map(_ratio, self._error, self._norm)),
            cosine_by_head=tuple(cosine.tolist()),
        )


def errors_of(got: torch.Tensor, want: torch.Tensor) -> Errors:
    """The errors of one tensor `[batch, heads, tokens, dim]`."""
    sums = HeadSums()
    sums.add(got, want)
    return sums.errors()


def kl_divergence(logits: torch.Tensor, full_logits: torch.Tensor) -> torch.Tensor:
    """KL(full precision || format) of each next token in nats, in float64: divergences of 1e-9 are seen.

    Args:
        logits: `[..., vocabulary]`.
        full_logits: The same in full precision; log-probabilities do as well.
    """
    got, want = (x.double().log_softmax(-1) for x in (logits, full_logits))
    # A token that full precision rules out entirely adds nothing.
    terms = torch.where(want.isneginf(), 0.0, want.exp() * (want - got))
    return terms.sum(-1).clamp(min=0.0)


def top1_agreement(logits: torch.Tensor, full_logits: torch.Tensor) -> torch.Tensor:
    """Whether the likeliest next token is the same, `[...]`, as bools."""
    return logits.argmax(-1) == full_logits.argmax(-1)


def _ratio(error: torch.Tensor, norm: torch.Tensor) -> float:
    return float((error / norm.clamp(min=_TINY)).sqrt())
