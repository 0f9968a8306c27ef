"""What one run does, and how its time is shared out; the same for the supervisor and its workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

DEFAULT_BUDGET_S = 480.0
DRY_RUN_BUDGET_S = 180.0
RESERVE_S = 8.0
"""Kept back for stopping workers and for the report."""


@dataclass(frozen=True)
class Settings:
    """One run.

    Attributes:
        dry_run: toy sizes on the CPU.
        backend: value of `HF_PAGED_CACHE_BACKEND` in every worker.
        seed: where all random inputs come from.
        budget_s: seconds for everything.
        sections: letters of the sections to run.
        jobs: workers at one time, where nothing is timed.
    """

    dry_run: bool = False
    backend: str = "triton"
    seed: int = 0
    budget_s: float = DEFAULT_BUDGET_S
    sections: tuple[str, ...] = ("a", "b", "c", "d")
    jobs: int = 1


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
        self._weights = dict(weights)
        self._clock = clock
        self._started = clock()
        self._total_s = total_s

    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._started

    def deadline(self, phase: str) -> float:
        """When a phase that begins now has to end. It and the phases after it share what is left."""
        names = list(self._weights)
        rest = names[names.index(phase) :]
        share = self._weights[phase] / sum(self._weights[name] for name in rest)
        return self._clock() + share * max(0.0, self._total_s - RESERVE_S - self.elapsed_s())
