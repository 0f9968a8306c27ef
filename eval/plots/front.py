"""Which caches no other one beats: as good with fewer bits, or better with as many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.lookups import DEFAULT_CACHE
from eval.rows import Metric, Row


@dataclass(frozen=True)
class Point:
    """Caches of one task that lie on the same spot.

    Attributes:
        caches: their names.
        bits: per value.
        difference: of the main metric to the default cache.
        low: lower end of its interval.
        high: upper end.
        quality: `difference`, better upwards; zero where it is noise.
    """

    caches: tuple[str, ...]
    bits: float
    difference: float
    low: float
    high: float
    quality: float


def points(rows: Sequence[Row]) -> list[Point]:
    """Return the spots of one task's caches; those without bits or a difference have none."""
    spots: dict[tuple[float, float, float, float, float], list[str]] = {}
    for row in rows:
        if row.metrics and row.bits_per_value is not None:
            place = _place(row.cache, row.metrics[0])
            if place is not None:
                spots.setdefault((round(row.bits_per_value, 2), *place), []).append(row.cache)
    return [Point(tuple(names), *spot) for spot, names in spots.items()]


def _place(cache: str, metric: Metric) -> tuple[float, float, float, float] | None:
    if cache == DEFAULT_CACHE:
        return 0.0, 0.0, 0.0, 0.0
    if metric.difference is None or metric.difference_low is None or metric.difference_high is None:
        return None
    upwards = metric.difference if metric.higher_is_better else -metric.difference
    quality = 0.0 if metric.verdict in ("same", "noise") else upwards
    return metric.difference, metric.difference_low, metric.difference_high, quality


def front(found: Sequence[Point]) -> list[Point]:
    """Return the points that no other beats (the Pareto front), from few bits to many."""
    unbeaten = [point for point in found if not any(_beats(other, point) for other in found)]
    return sorted(unbeaten, key=lambda point: point.bits)


def _beats(one: Point, other: Point) -> bool:
    as_good = one.bits <= other.bits and one.quality >= other.quality
    return as_good and (one.bits, one.quality) != (other.bits, other.quality)
