"""Contenders timed side by side in one process, so that what disturbs one disturbs all."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

STEPS = 3
"""Steps of one contender in a row."""


@dataclass(frozen=True)
class Contender:
    """Something to time.

    Attributes:
        name: unique among those it is timed with.
        step: what is timed.
        restore: called, untimed, after `step` ran so many times in a row; puts back the state before them.
        prepare: called, untimed, before these steps.
    """

    name: str
    step: Callable[[], object]
    restore: Callable[[int], object] = lambda steps: None
    prepare: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Timings:
    """Seconds of one step: for each contender one median a round, rounds in the order they ran."""

    seconds: dict[str, list[float]]

    def median_s(self, name: str) -> float:
        """Median over the rounds."""
        return statistics.median(self.seconds[name])

    def speedup(self, name: str, over: str) -> float:
        """How many times faster `name` is than `over`: the median of the quotients within each round.

        Neighbours in time share the machine's mood, so this is steadier than the quotient of two medians.
        """
        pairs = zip(self.seconds[over], self.seconds[name], strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)


def interleave(
    contenders: Sequence[Contender],
    *,
    budget_s: float,
    min_rounds: int = 5,
    max_rounds: int = 60,
    steps: int = STEPS,
) -> Timings:
    """Time all contenders in rounds; the order within a round rotates from one to the next.

    Args:
        contenders: at least one. Each is run once untimed first.
        budget_s: no new round begins after so many seconds, warm-up not counted.
        min_rounds: rounds that are run whatever they take.
        max_rounds: rounds at most.
        steps: steps of one contender in a row; their median is its time in that round. One, if more would
            not leave time for all rounds.
    """
    round_s = sum(_median_step_s(contender, 1) for contender in contenders)
    if min_rounds * steps * round_s > budget_s:
        steps = 1
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    started_s = time.perf_counter()
    for index in range(max_rounds):
        if index >= min_rounds and time.perf_counter() - started_s > budget_s:
            break
        shift = index % len(contenders)
        for contender in (*contenders[shift:], *contenders[:shift]):
            seconds[contender.name].append(_median_step_s(contender, steps))
    return Timings(seconds)


def _median_step_s(contender: Contender, steps: int) -> float:
    taken = []
    contender.prepare()
    with _no_garbage_collection():
        for _ in range(steps):
            start_s = time.perf_counter()
            contender.step()
            taken.append(time.perf_counter() - start_s)
    contender.restore(steps)
    return statistics.median(taken)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect(0)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
