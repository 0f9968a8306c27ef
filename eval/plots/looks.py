"""Looks of each cache, in every picture alike; markers and strokes tell them apart without colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

from eval.run.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 120
# Dark enough for lines on white, and apart for those who see no red or no green.
_COLOURS = ("#000000", "#0072b2", "#b34700", "#007a5a", "#a0468c", "#5c5c5c", "#8a6d00")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*", "d", "8")
_STROKES = ("-", "--", "-.", ":")
_NAME_POINTS = 8.5
_NAME_LINES = 1.5
_NAMES_AT = 1.07  # place of names, in widths of the axes


@dataclass(frozen=True)
class Picture:
    """One question, answered by a PNG, as a report speaks of it."""

    file_name: str  # in the run folder
    title: str  # what it shows
    caption: str  # how it is read


@dataclass(frozen=True)
class Look:
    """A cache's colour, marker and stroke, as matplotlib names them."""

    colour: str
    marker: str
    stroke: str


def looks_of(rows: Sequence[Row]) -> dict[str, Look]:
    """Return name of a cache -> its look; no two of the first 14 share a marker."""
    caches = dict.fromkeys(row.cache for row in rows)
    looks = zip(caches, cycle(_COLOURS), cycle(_MARKERS), cycle(_STROKES), strict=False)
    return {cache: Look(*look) for cache, *look in looks}


def power_axis(axes: Axes, ticks: Sequence[float], low: float, high: float) -> None:
    """Make the horizontal axis one of powers, with these numbers on it."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


@dataclass(frozen=True)
class Name:
    """A name to write: of a cache, at what height of the data, how it looks, and where its line ends."""

    cache: str
    y: float
    look: Look
    is_bold: bool = False
    line_from: float | None = None


def write_names(figure: Figure, names: Mapping[Axes, Sequence[Name]]) -> None:
    """Write names right of axes, near to their heights; the limits of the axes must not change after."""
    figure.draw_without_rendering()  # names are set by the height that the layout gives
    for axes, of_axes in names.items():
        _write(axes, of_axes, figure.dpi)


def _write(axes: Axes, names: Sequence[Name], dpi: float) -> None:
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = [to_axes.transform((name.line_from or axes.get_xlim()[1], name.y)) for name in names]
    order = sorted(range(len(names)), key=lambda index: float(ends[index][1]))
    gap = _NAME_LINES * _NAME_POINTS / 72 * dpi / axes.get_window_extent().height
    places = spaced([float(ends[index][1]) for index in order], gap)
    for index, place in zip(order, places, strict=True):
        name, (end_x, end_y) = names[index], ends[index]
        colour, weight = name.look.colour, "bold" if name.is_bold else "normal"
        shared: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False, "color": colour}
        if name.line_from is not None:
            axes.plot([end_x, _NAMES_AT - 0.015], [end_y, place], linewidth=0.4, **shared)
        inside = colour if name.is_bold else "white"
        axes.plot([_NAMES_AT], [place], name.look.marker, markersize=5, markerfacecolor=inside, **shared)
        style: dict[str, Any] = {"fontsize": _NAME_POINTS, "fontweight": weight, "va": "center_baseline"}
        axes.text(_NAMES_AT + 0.02, place, name.cache, parse_math=False, **style, **shared)


def spaced(wanted: Sequence[float], gap: float) -> list[float]:
    """Places in rising order, a gap or more apart: pushed up by those below, and down again from 1."""
    places: list[float] = []
    for want in wanted:
        places.append(max(want, places[-1] + gap) if places else max(want, 0.0))
    for index in range(len(places) - 1, -1, -1):
        places[index] = min(places[index], 1.0 if index == len(places) - 1 else places[index + 1] - gap)
    return places
