"""A panel of lines over the tokens in the cache, each named at its end."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from eval.plots.apart import apart
from eval.plots.looks import Look
from eval.rows import AtContext, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH_INCHES, _PANEL_INCHES, _TOP_INCHES, _BOTTOM_INCHES, _BETWEEN_INCHES = 8.5, 4.0, 0.8, 0.6, 0.5
_LEFT, _RIGHT = 0.09, 0.79
"""Of the width: the axes; the names stand at their right."""
_DPI = 130
_NAME_POINTS = 8.5
_NAMES_AT = 1.07
"""Where names begin, in widths of the axes."""
_ASIDE = 0.25
"""Part of the way to the next length over which lines with bars are spread."""
_ROOM = 1.08
"""Factor between the outermost lines and the ends of the axis."""
_LEAST_DECADES = 0.5
"""Less than this of an axis of powers has too few round numbers to read it by."""


@dataclass(frozen=True)
class Measure:
    """What one panel shows.

    Attributes:
        label: of its axis, with the unit.
        value: (low, middle, high) of what was measured at one length, in that unit.
    """

    label: str
    value: Callable[[AtContext], tuple[float, float, float]]


def figure(rows: Sequence[Row], looks: Mapping[str, Look], measures: Sequence[Measure]) -> Figure | None:
    """Return a panel for each measure, one below the other; None where nothing was measured by context."""
    measured = [row for row in rows if row.contexts]
    if not measured:
        return None
    count = len(measures)
    height = _TOP_INCHES + _BOTTOM_INCHES + count * _PANEL_INCHES + (count - 1) * _BETWEEN_INCHES
    result = Figure(figsize=(_WIDTH_INCHES, height), dpi=_DPI)
    result.subplots_adjust(
        _LEFT,
        _BOTTOM_INCHES / height,
        _RIGHT,
        1 - _TOP_INCHES / height,
        hspace=_BETWEEN_INCHES / _PANEL_INCHES,
    )
    grid: Any = result.subplots(count, 1, squeeze=False, sharex=True)
    for axes, measure in zip(grid[:, 0], measures, strict=True):
        _panel(axes, measured, looks, measure)
    grid[-1, 0].set_xlabel("tokens in the cache, of each sequence")
    return result


def _panel(axes: Axes, rows: Sequence[Row], looks: Mapping[str, Look], measure: Measure) -> None:
    lengths = sorted({at.context_tokens for row in rows for at in row.contexts})
    values = [measure.value(at) for row in rows for at in row.contexts]
    has_bars = any(low != high for low, _, high in values)
    asides = _asides(len(rows), lengths) if has_bars else [1.0] * len(rows)
    for row, aside in zip(rows, asides, strict=True):
        _line(axes, row, looks[row.cache], measure, aside)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator([float(length) for length in lengths]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.set_xlim(lengths[0] * min(asides) / _ROOM, lengths[-1] * max(asides) * _ROOM)
    axes.set_ylabel(measure.label)
    _powers(axes, [end for ends in values for end in ends])
    axes.grid(axis="y", which="major", linewidth=0.5, color="#dddddd")
    axes.spines[["top", "right"]].set_visible(False)
    _names(axes, rows, looks, measure, asides)


def _asides(count: int, lengths: Sequence[int]) -> list[float]:
    """Return by which factor each of `count` lines is moved aside, so that no bar stands on another."""
    gaps = [math.log(after / before) for before, after in itertools.pairwise(lengths)]
    width = _ASIDE * min(gaps, default=1.0)
    return [math.exp(width * ((number + 0.5) / count - 0.5)) for number in range(count)]


def _line(axes: Axes, row: Row, look: Look, measure: Measure, aside: float) -> None:
    values = [measure.value(at) for at in row.contexts]
    axes.errorbar(
        [at.context_tokens * aside for at in row.contexts],
        [middle for _, middle, _ in values],
        # Rounding may leave a middle outside its ends.
        yerr=[[max(0, mid - low) for low, mid, _ in values], [max(0, high - mid) for _, mid, high in values]],
        color=look.colour,
        marker=look.marker,
        linestyle=look.stroke,
        linewidth=1.1,
        markersize=5,
        markerfacecolor="white",
        elinewidth=0.7,
    )


def _powers(axes: Axes, values: Sequence[float]) -> None:
    """Make the vertical axis one of powers, unless something is not above zero."""
    if min(values) <= 0:
        return
    low, high = axes.get_ylim()
    axes.set_yscale("log")
    low, high = math.log10(min(values)), math.log10(max(values))
    room = max(0.05 * (high - low), (_LEAST_DECADES - (high - low)) / 2)
    axes.set_ylim(10 ** (low - room), 10 ** (high + room))
    dense = high - low + 2 * room < 1
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if dense else (1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _names(
    axes: Axes, rows: Sequence[Row], looks: Mapping[str, Look], measure: Measure, asides: Sequence[float]
) -> None:
    """Write each cache's name beside the end of its line, with its marker, and a thin line from there."""
    lasts = [row.contexts[-1] for row in rows]
    ends = [
        (at.context_tokens * aside, measure.value(at)[1]) for at, aside in zip(lasts, asides, strict=True)
    ]
    to_axes = axes.transData + axes.transAxes.inverted()
    starts = [to_axes.transform(end) for end in ends]
    gap = 1.3 * _NAME_POINTS / 72 / _PANEL_INCHES
    places = apart([float(start[1]) for start in starts], gap, 0.0, 1.0)
    for row, start, place in zip(rows, starts, places, strict=True):
        look = looks[row.cache]
        shared: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False, "color": look.colour}
        axes.plot([start[0], _NAMES_AT - 0.015], [start[1], place], linewidth=0.4, **shared)
        axes.plot([_NAMES_AT], [place], marker=look.marker, markersize=5, markerfacecolor="white", **shared)
        axes.text(
            _NAMES_AT + 0.02,
            place,
            row.cache,
            va="center_baseline",
            fontsize=_NAME_POINTS,
            parse_math=False,
            **shared,
        )
