"""Places for labels that lie close together: as near as they can be to where they belong, a gap apart."""

from __future__ import annotations

from collections.abc import Sequence


def apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return a place for each wanted one, in the same order, `gap` or more apart, between `low` and `high`.

    Least squares: without the gaps, the places in order must not fall, which is isotonic regression (Ayer et
    al. 1955: neighbours that do fall are pooled at their mean). Where there is no room for all, the uppermost
    lie above `high`.
    """
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    pools: list[list[float]] = []
    for rank, index in enumerate(order):
        pools.append([wanted[index] - rank * gap])
        while len(pools) > 1 and _mean(pools[-2]) > _mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    highest = max(low, high - (len(wanted) - 1) * gap)
    free = [min(highest, max(low, _mean(pool))) for pool in pools for _ in pool]
    places = dict(zip(order, free, strict=True))
    ranks = {index: rank for rank, index in enumerate(order)}
    return [places[index] + ranks[index] * gap for index in range(len(wanted))]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
