"""Contenders timed on the device in turns."""

from __future__ import annotations

import time
from collections.abc import Callable

from eval.bench.timing import Timings
from eval.gpu.device import Device

TURN_S = 0.008
"""One turn of a contender takes at least about so long."""
MAX_REPEATS = 200


def in_turns(
    device: Device,
    steps: dict[str, Callable[[], object]],
    *,
    budget_s: float,
    min_rounds: int = 3,
    max_rounds: int = 15,
) -> Timings:
    """Seconds of each contender's step, one number a round; the order rotates from round to round.

    Args:
        device: whose clock is used.
        steps: name -> what is timed. Each has run before.
        budget_s: no new round begins after so long.
        min_rounds: rounds that are run whatever they take.
        max_rounds: rounds at most.
    """
    repeats = {name: _repeats(device.seconds_of(step, 1)) for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    started_s = time.perf_counter()
    for index in range(max_rounds):
        if index >= min_rounds and time.perf_counter() - started_s > budget_s:
            break
        shift = index % len(names)
        for name in (*names[shift:], *names[:shift]):
            seconds[name].append(device.seconds_of(steps[name], repeats[name]))
    return Timings(seconds)


def _repeats(step_s: float) -> int:
    return max(1, min(MAX_REPEATS, round(TURN_S / max(step_s, 1e-9))))
