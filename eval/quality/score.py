"""How far predictions are from those in full precision."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass
class Score:
    """Sums over the tokens seen so far.

    Attributes:
        divergence: KL(full precision || scheme) in nats.
        agreed: tokens whose most likely successor is the same.
        tokens: tokens compared.
        surprise: negative log-likelihood of the true successors, in nats.
        predicted: successors.
    """

    divergence: float = 0.0
    agreed: int = 0
    tokens: int = 0
    surprise: float = 0.0
    predicted: int = 0

    def add(self, logits: torch.Tensor, reference: torch.Tensor, successors: torch.Tensor) -> None:
        """Count one chunk.

        Args:
            logits: `[rows, tokens, vocabulary]` of the scheme.
            reference: the same in full precision, as log-probabilities in float64.
            successors: ids `[rows, up to tokens]` of the tokens that follow.
        """
        log_p = log_probabilities(logits)
        self.divergence += float((reference.exp() * (reference - log_p)).sum())
        self.agreed += int((log_p.argmax(-1) == reference.argmax(-1)).sum())
        self.tokens += logits.shape[0] * logits.shape[1]
        of_successors = log_p[:, : successors.shape[1]].gather(-1, successors.unsqueeze(-1))
        self.surprise -= float(of_successors.sum())
        self.predicted += successors.numel()

    @property
    def kl_nats(self) -> float:
        """Mean KL divergence per token."""
        return self.divergence / self.tokens

    @property
    def top1_percent(self) -> float:
        """Share of tokens with the same most likely successor."""
        return 100 * self.agreed / self.tokens

    @property
    def perplexity(self) -> float:
        """Of the true successors; infinite beyond the range of floats."""
        try:
            return math.exp(self.surprise / self.predicted)
        except OverflowError:
            return math.inf


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """In float64: divergences of 1e-9 are to be seen."""
    return logits.double().log_softmax(-1)
