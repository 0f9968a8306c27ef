"""Quality that each cache keeps for its bits, and which caches no other one beats."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.plots.looks import DPI, Look, Name, Picture, power_axis, write_names
from eval.run.rows import DEFAULT_CACHE, Metric, Row, by_task

PICTURE = Picture(
    "quality_by_bits.png",
    "Quality against bits per value",
    f"The main metric of each task, as difference to {DEFAULT_CACHE}; better is always up, and so are the "
    "names. Bars are 95 % intervals; where one reaches zero the difference is noise. Filled, bold and joined "
    "by the dashed line: no other cache is as good with fewer bits, or better with as many (noise counts as "
    "zero). Where all differences have one sign and some are a hundred times as large as others, their axis "
    "is one of powers.",
)
_PANEL_INCHES = (6.2, 4.2)
_TITLE_INCHES = 0.6
_BITS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)
_ROOM = 1.2  # free space at both ends of the axis of bits, as a factor
_WIDE = 100.0  # differences of one sign that are so many times apart get an axis of powers


@dataclass(frozen=True)
class Point:
    """Caches of one task that lie on the same spot."""

    caches: tuple[str, ...]  # their names
    bits: float  # per value
    difference: float  # of the main metric to the default cache
    low: float  # end of its interval
    high: float
    quality: float  # `difference`, better upwards; zero where it is noise


def points(rows: Sequence[Row]) -> list[Point]:
    """Return the spots of one task's caches; those without bits or a difference have none."""
    spots: dict[tuple[float, float, float, float, float], list[str]] = {}
    for row in rows:
        place = _place(row.cache, row.metrics[0]) if row.metrics else None
        if place is not None and row.bits_per_value is not None:
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

    def beats(one: Point, other: Point) -> bool:
        as_good = one.bits <= other.bits and one.quality >= other.quality
        return as_good and (one.bits, one.quality) != (other.bits, other.quality)

    unbeaten = [point for point in found if not any(beats(other, point) for other in found)]
    return sorted(unbeaten, key=lambda point: point.bits)


def figure(rows: Sequence[Row], looks: Mapping[str, Look]) -> Figure | None:
    """Return a panel for each task with metrics; None where no cache has a place on it."""
    panels = {
        task: (spots, next(row.metrics[0] for row in of_task if row.metrics))
        for task, of_task in by_task(rows).items()
        if (spots := points(of_task))
    }
    if not panels:
        return None
    columns = min(2, len(panels))
    lines = math.ceil(len(panels) / columns)
    size = columns * _PANEL_INCHES[0], _TITLE_INCHES + lines * _PANEL_INCHES[1]
    result = Figure(figsize=size, dpi=DPI, layout="constrained")
    grid: Any = result.subplots(lines, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    names = {}
    for axes, (task, (spots, metric)) in zip(grid.flat, panels.items(), strict=False):
        axes.set_title(task, loc="left", fontsize="medium", fontweight="bold")
        names[axes] = _panel(axes, spots, metric, looks)
    write_names(result, names)
    return result


def _panel(axes: Axes, spots: Sequence[Point], metric: Metric, looks: Mapping[str, Look]) -> list[Name]:
    """Draw the points; the names beside them."""
    best = front(spots)
    axes.axhline(0.0, color="#999999", linewidth=0.8, zorder=0)
    line = [point.bits for point in best], [point.difference for point in best]
    axes.plot(*line, color="#777777", linestyle="--", linewidth=0.9)
    for point in spots:
        look = looks[point.caches[0]]
        axes.errorbar(
            point.bits,
            point.difference,
            yerr=[[max(0.0, point.difference - point.low)], [max(0.0, point.high - point.difference)]],
            marker=look.marker,
            markersize=6,
            color=look.colour,
            markerfacecolor=look.colour if point in best else "white",
            elinewidth=0.8,
            capsize=2,
        )
    bits = [point.bits for point in spots]
    power_axis(axes, _BITS, min(bits) / _ROOM, max(bits) * _ROOM)
    axes.set_xlabel("bits per value of K and V")
    low, high = _limits(axes, [end for point in spots for end in (point.low, point.difference, point.high)])
    axes.set_ylim((low, high) if metric.higher_is_better else (high, low))
    unit = {"%": "points"}.get(metric.unit, metric.unit)
    axes.set_ylabel(f"{metric.label}, difference to {DEFAULT_CACHE}{f' ({unit})' if unit else ''}, better ↑")
    axes.spines[["top", "right"]].set_visible(False)
    return [
        Name(cache, point.difference, looks[point.caches[0]], point in best)
        for point in spots
        for cache in point.caches
    ]


def _limits(axes: Axes, ends: Sequence[float]) -> tuple[float, float]:
    """Choose the scale of the differences; return where it ends."""
    low, high = min(0.0, *ends), max(0.0, *ends)
    sizes = [abs(end) for end in ends if end]
    if sizes and low * high == 0.0 and max(sizes) > _WIDE * min(sizes):
        nearest = min(sizes)
        axes.set_yscale("symlog", linthresh=nearest)
        return (2 * low, nearest) if low else (-nearest, 2 * high)
    room = 0.08 * (high - low) or 1.0
    return low - room, high + room
