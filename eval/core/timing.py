"""Contenders timed side by side in one process, so that what disturbs one disturbs all."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eval.core.hardware import CPU, Device

STEPS = 3  # steps of one contender in a row
_TURN_S = 0.008
_MAX_REPEATS = 200


@dataclass(frozen=True)
class Contender:
    """Something to time."""

    name: str  # unique among those it is timed with
    step: Callable[[], object]  # what is timed
    restore: Callable[[int], object] = lambda steps: None  # untimed: puts back the state before so many steps
    prepare: Callable[[], object] = lambda: None  # called, untimed, before these steps


@dataclass(frozen=True)
class Timings:
    """Seconds of one step: for each contender one number a round, rounds in the order they ran."""

    seconds: dict[str, list[float]]

    def median_s(self, name: str) -> float:
        """Median over the rounds."""
        return statistics.median(self.seconds[name])

    def speedup(self, name: str, over: str) -> float:
        """How many times faster `name` is than `over`: the median of quotients within rounds.

        What slows a machine down slows neighbours in time, so this is steadier than a quotient of medians.
        """
        pairs = zip(self.seconds[over], self.seconds[name], strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)


def interleave(
    contenders: Sequence[Contender],
    *,
    budget_s: float,
    min_rounds: int = 5,
    max_rounds: int = 60,
    steps: int | None = STEPS,
    device: Device = CPU,
) -> Timings:
    """Time all contenders in rounds; the order within a round rotates from one to the next.

    Each contender is run once untimed first. No round after the `min_rounds`-th begins after `budget_s`.
    `steps` of one contender in a row are one, if more would not leave time for all rounds, and with None as
    many as a turn needs to be timed well, for contenders that any number of steps leaves unchanged.
    """
    for _ in range(1 if steps is not None else 2):  # what is compiled at first would say nothing
        first_s = {contender.name: _turn_s(contender, 1, device) for contender in contenders}
    if steps is not None and min_rounds * steps * sum(first_s.values()) > budget_s:
        steps = 1
    repeats = {name: round(_TURN_S / max(taken_s, 1e-9)) for name, taken_s in first_s.items()}
    in_a_row = {name: steps or min(max(1, count), _MAX_REPEATS) for name, count in repeats.items()}
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    started_s = time.perf_counter()
    for index in range(max_rounds):
        if index >= min_rounds and time.perf_counter() - started_s > budget_s:
            break
        shift = index % len(contenders)
        for contender in (*contenders[shift:], *contenders[:shift]):
            seconds[contender.name].append(_turn_s(contender, in_a_row[contender.name], device))
    return Timings(seconds)


def _turn_s(contender: Contender, steps: int, device: Device) -> float:
    contender.prepare()
    taken_s = device.step_s(contender.step, steps)
    contender.restore(steps)
    return taken_s
