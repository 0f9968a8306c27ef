"""What quality each cache keeps for its bits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from eval.lookups import DEFAULT_CACHE, by_task
from eval.plots.beside import Named, write_beside
from eval.plots.front import Point, front, points
from eval.plots.looks import Look
from eval.plots.picture import Picture
from eval.rows import Metric, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = Picture(
    "quality_by_bits.png",
    "Quality against bits per value",
    f"The main metric of each task, as difference to {DEFAULT_CACHE}; better is always up. Bars are 95 % "
    "intervals; where one reaches zero the difference is noise. Filled, bold and joined by the dashed line: "
    "no other cache is as good with fewer bits, or better with as many (noise counts as zero). Where all "
    "differences have one sign and some are a hundred times as large as others, their axis is one of powers.",
)
_PANEL_INCHES = (5.6, 4.2)
_LEFT_INCHES, _RIGHT_INCHES, _TOP_INCHES, _BOTTOM_INCHES = 0.85, 0.15, 1.0, 0.6
_DPI = 120
_NAME_POINTS = 8.0
_BITS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)
_ROOM = 1.45
"""Free space at both ends of the axis of bits, as a factor."""
_WIDE = 100.0
"""Differences of one sign that are so many times apart get an axis of powers."""


def figure(rows: Sequence[Row], looks: Mapping[str, Look]) -> Figure | None:
    """Return a panel for each task with metrics; None where no cache has a place on it."""
    found = {task: (points(of_task), _metric(of_task)) for task, of_task in by_task(rows).items()}
    panels = {task: (spots, metric) for task, (spots, metric) in found.items() if spots and metric}
    if not panels:
        return None
    columns = min(2, len(panels))
    lines = math.ceil(len(panels) / columns)
    width = columns * (_PANEL_INCHES[0] + _LEFT_INCHES) + _RIGHT_INCHES
    height = _TOP_INCHES + lines * (_PANEL_INCHES[1] + _BOTTOM_INCHES) + (lines - 1) * 0.3
    result = Figure(figsize=(width, height), dpi=_DPI)
    result.subplots_adjust(
        _LEFT_INCHES / width,
        _BOTTOM_INCHES / height,
        1 - _RIGHT_INCHES / width,
        1 - _TOP_INCHES / height,
        wspace=_LEFT_INCHES / _PANEL_INCHES[0],
        hspace=(_BOTTOM_INCHES + 0.3) / _PANEL_INCHES[1],
    )
    grid: Any = result.subplots(lines, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (task, (spots, metric)) in zip(grid.flat, panels.items(), strict=False):
        axes.set_title(task, loc="left", fontsize="medium", fontweight="bold")
        _panel(axes, spots, metric, looks)
    return result


def _metric(rows: Sequence[Row]) -> Metric | None:
    return next((row.metrics[0] for row in rows if row.metrics), None)


def _panel(axes: Axes, spots: Sequence[Point], metric: Metric, looks: Mapping[str, Look]) -> None:
    best = front(spots)
    axes.axhline(0.0, color="#999999", linewidth=0.8, zorder=0)
    axes.plot(
        [p.bits for p in best], [p.difference for p in best], color="#777777", linestyle="--", linewidth=0.9
    )
    for point in spots:
        _spot(axes, point, looks[point.caches[0]], point in best)
    _bits_axis(axes, [point.bits for point in spots])
    _difference_axis(axes, spots, metric)
    ordered = sorted(spots, key=lambda point: point not in best)
    named = [Named(p.bits, p.difference, p.low, p.high, _joined(p.caches), p in best) for p in ordered]
    write_beside(axes, named, _NAME_POINTS)


def _joined(caches: Sequence[str]) -> str:
    """Return the names of caches on one spot, two in a line."""
    pairs = [", ".join(caches[index : index + 2]) for index in range(0, len(caches), 2)]
    return ",\n".join(pairs)


def _spot(axes: Axes, point: Point, look: Look, is_best: bool) -> None:
    axes.errorbar(
        point.bits,
        point.difference,
        yerr=[[max(0.0, point.difference - point.low)], [max(0.0, point.high - point.difference)]],
        marker=look.marker,
        markersize=6,
        color=look.colour,
        markerfacecolor=look.colour if is_best else "white",
        elinewidth=0.8,
        capsize=2,
    )


def _bits_axis(axes: Axes, bits: Sequence[float]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(bits) / _ROOM, max(bits) * _ROOM)
    axes.xaxis.set_major_locator(FixedLocator(_BITS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("bits per value of K and V")


def _difference_axis(axes: Axes, spots: Sequence[Point], metric: Metric) -> None:
    low, high = _limits(axes, [end for point in spots for end in (point.low, point.difference, point.high)])
    axes.set_ylim((low, high) if metric.higher_is_better else (high, low))
    unit = {"%": "points"}.get(metric.unit, metric.unit)
    axes.set_ylabel(f"{metric.label}, difference to {DEFAULT_CACHE}{f' ({unit})' if unit else ''}, better ↑")
    axes.spines[["top", "right"]].set_visible(False)


def _limits(axes: Axes, ends: Sequence[float]) -> tuple[float, float]:
    """Choose the scale of the differences; return where it ends, with room for names."""
    low, high = min(0.0, *ends), max(0.0, *ends)
    sizes = [abs(end) for end in ends if end]
    if sizes and low * high == 0.0 and max(sizes) > _WIDE * min(sizes):
        nearest = min(sizes)
        axes.set_yscale("symlog", linthresh=nearest)
        return (3 * low, nearest) if low else (-nearest, 3 * high)
    room = 0.12 * (high - low) or 1.0
    return low - room, high + room
