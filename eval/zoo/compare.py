"""Whether two runs gave the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eval.zoo.runs import Run

TOLERANCE = 1e-3
"""Largest difference of logits in float32, as a share of their standard deviation (or 1, if more). Most are
below 1e-5; states that are scanned in chunks in one run and step by step in the other come to 3e-4."""


@dataclass(frozen=True)
class Difference:
    """How two runs differ.

    Attributes:
        logits: the largest difference, as a share of the logits' standard deviation; infinity where one is
            finite and the other is not.
        compared: rows of steps that were compared: those whose ids were the same up to there. Behind a token
            that differs nothing can be compared, and at that token the logits are.
        rows: rows of steps in all.
    """

    logits: float
    compared: int
    rows: int

    @property
    def is_none(self) -> bool:
        """Whether the logits agree wherever the runs can be compared.

        Where they do and tokens part, two logits lay within the tolerance of each other.
        """
        return self.compared > 0 and self.logits <= TOLERANCE


def difference(reference: Run, other: Run, beams: int = 1) -> Difference:
    """How `other` differs from `reference`.

    With beams, rows of a step are matched by what they have generated: equal scores may have them in
    another order.
    """
    worst, compared, rows = 0.0, 0, 0
    spread = _spread(reference)
    for (ids, logits), (other_ids, other_logits) in zip(reference.steps, other.steps, strict=False):
        places = {_key(row, ids, reference.start, beams): row for row in range(len(ids))}
        for row in range(len(other_ids)):
            rows += 1
            place = places.get(_key(row, other_ids, other.start, beams))
            if place is not None:
                compared += 1
                worst = max(worst, _distance(logits[place], other_logits[row]) / spread)
    return Difference(worst, compared, rows)


def _key(row: int, ids: torch.Tensor, start: int, beams: int) -> tuple[int, ...]:
    return (row // beams, *ids[row, start:].tolist())


def _distance(logits: torch.Tensor, others: torch.Tensor) -> float:
    finite = torch.isfinite(logits)
    if not torch.equal(finite, torch.isfinite(others)) or not finite.any():
        return float("inf")
    return float((logits[finite] - others[finite]).abs().max())


def _spread(run: Run) -> float:
    logits = run.steps[0][1]
    return max(1.0, float(logits[torch.isfinite(logits)].std()))
