"""Writes names beside points so that none covers another name, a marker or an error bar."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DISTANCES_POINTS = (7, 14, 24, 36, 50, 66, 84, 104, 126)
_DIRECTIONS = 16
_NEAR_POINTS = 11
"""Names farther away than this have a line to their point."""
_MARKER_POINTS = 5


@dataclass(frozen=True)
class Named:
    """A point with its name, in the data's coordinates.

    Attributes:
        x: where it is.
        y: where it is.
        low: lower end of its error bar.
        high: upper end.
        name: what to write.
        bold: how to write it.
    """

    x: float
    y: float
    low: float
    high: float
    name: str
    bold: bool


def write_beside(axes: Axes, points: Sequence[Named], size_points: float) -> None:
    """Write the names; the axes' place and limits must not change any more.

    Greedy: each name takes the nearest place that is free, first come first served. A place that is nearer to
    another point is taken only where there is no other, and bars are crossed only where nothing else is free.
    """
    figure = axes.get_figure(root=True)
    if figure is None:
        raise ValueError("axes must belong to a figure")
    pixels = figure.dpi / 72
    renderer: Any = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    frame = axes.get_window_extent(renderer)
    middles = [axes.transData.transform((point.x, point.y)) for point in points]
    taken = [_around(middle, _MARKER_POINTS * pixels) for middle in middles]
    bars = [_zero_line(axes, frame), *(_bar(axes, point, pixels) for point in points)]
    for point in points:
        weight = "bold" if point.bold else "normal"
        text = axes.annotate(
            point.name,
            (point.x, point.y),
            (0, 0),
            textcoords="offset points",
            va="center",
            ha="center",
            fontsize=size_points,
            fontweight=weight,
            annotation_clip=False,
            parse_math=False,
            # Lines that run behind a name stop at its letters.
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
        )
        extent = text.get_window_extent(renderer)
        x, y = axes.transData.transform((point.x, point.y))
        places = list(_places(extent.width, extent.height, pixels))
        clear = list(_free(places, x, y, extent, frame, [*taken, *bars]))
        own = (place for place in clear if _is_nearest((x, y), middles, place[2]))
        box = (
            next(own, None)
            or next(iter(clear), None)
            or next(_free(places, x, y, extent, frame, taken), None)
            or (*places[0], extent)
        )
        text.set_position((box[0] / pixels, box[1] / pixels))
        taken.append(box[2])
        _line_to(axes, point, box, (x, y), _NEAR_POINTS * pixels)


Place = tuple[float, float, Bbox]
"""(right of the point, above it, the box of the name), in pixels."""


def _places(width: float, height: float, pixels: float) -> Iterator[tuple[float, float]]:
    """Yield how far the middle of a name may lie from its point, in pixels, nearest first."""
    for distance in _DISTANCES_POINTS:
        for step in range(_DIRECTIONS):
            angle = 2 * math.pi * step / _DIRECTIONS
            right, up = math.cos(angle), math.sin(angle)
            yield right * (distance * pixels + width / 2), up * (distance * pixels + height / 2)


def _free(
    places: Sequence[tuple[float, float]],
    x: float,
    y: float,
    extent: Bbox,
    frame: Bbox,
    taken: Sequence[Bbox],
) -> Iterator[Place]:
    for right, up in places:
        left, bottom = x + right - extent.width / 2, y + up - extent.height / 2
        box = Bbox.from_bounds(left, bottom, extent.width, extent.height)
        inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
        if inside and not any(box.overlaps(other) for other in taken):
            yield right, up, box


def _is_nearest(own: tuple[float, float], middles: Sequence[Any], box: Bbox) -> bool:
    return all(math.dist(own, _edge(own, box)) <= math.dist(other, _edge(other, box)) for other in middles)


def _edge(point: Any, box: Bbox) -> tuple[float, float]:
    """Return the place in the box that is nearest to a point."""
    return min(max(point[0], box.x0), box.x1), min(max(point[1], box.y0), box.y1)


def _around(middle: Any, radius: float) -> Bbox:
    x, y = middle
    return Bbox.from_extents(x - radius, y - radius, x + radius, y + radius)


def _bar(axes: Axes, point: Named, pixels: float) -> Bbox:
    (x, low), (_, high) = (axes.transData.transform((point.x, end)) for end in (point.low, point.high))
    return Bbox.from_extents(x - pixels, min(low, high), x + pixels, max(low, high))


def _zero_line(axes: Axes, frame: Bbox) -> Bbox:
    height = axes.transData.transform((axes.get_xlim()[0], 0.0))[1]
    return Bbox.from_extents(frame.x0, height - 1, frame.x1, height + 1)


def _line_to(axes: Axes, point: Named, place: Place, at: tuple[float, float], near: float) -> None:
    end = _edge(at, place[2])
    if math.dist(at, end) > near:
        x, y = axes.transData.inverted().transform(end)
        axes.plot([point.x, x], [point.y, y], color="#888888", linewidth=0.5, zorder=1)
