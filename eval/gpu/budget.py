"""How the time of a run is shared out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

RESERVE_S = 8.0
"""Kept back for stopping workers and for the report."""


class Budget:
    """A deadline for everything, and a share of what is left for each phase.

    What one phase leaves unused goes to those after it.

    Args:
        total_s: seconds from now.
        weights: phase -> weight, in the order they run.
        clock: seconds since the epoch; workers compare with the same clock.
    """

    def __init__(
        self, total_s: float, weights: dict[str, float], clock: Callable[[], float] = time.time
    ) -> None:
        if not total_s > RESERVE_S:
            raise ValueError(
                f"budget_s must be above {RESERVE_S:g} s, which the report takes; got {total_s:g}"
            )
        self.total_s = total_s
        self._weights = dict(weights)
        self._clock = clock
        self._started = clock()

    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._started

    def remaining_s(self) -> float:
        """Seconds left for phases; never negative."""
        return max(0.0, self.total_s - RESERVE_S - self.elapsed_s())

    def deadline(self, phase: str) -> float:
        """When a phase that begins now has to end. It and the phases after it share what is left."""
        names: Sequence[str] = list(self._weights)
        rest = names[names.index(phase) :]
        share = self._weights[phase] / sum(self._weights[name] for name in rest)
        return self._clock() + share * self.remaining_s()
