"""The picture of what caches held while they grew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .figure import new_figure, written
from .units import byte_unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hf_paged_cache.tools.timeline import MemoryTimeline, Moment

_HEIGHT_INCHES = 3.4
_PANEL_INCHES = 4.0
# (line, marker, colour): told apart by shape too, so that grey will do.
_STYLES = (
    ("-", "o", "#00798c"),
    ("--", "s", "#d1495b"),
    (":", "^", "#6a4c93"),
    ("-.", "D", "#3a3a3a"),
)
_MOST_MARKERS = 8
_LEGEND_LINE = 0.07  # height, of that of the axes
_LEGEND_EDGES = 0.05


def draw_timelines(timelines: Sequence[MemoryTimeline], path: str | Path | None) -> Figure:
    """See `MemoryTimeline.plot_together`."""
    rows = [timeline.rows for timeline in timelines]
    panels: list[Callable[[Any], None]] = [lambda axes: _draw_bytes(axes, timelines)]
    if any(moment.process_bytes is not None for moments in rows for moment in moments):
        panels.append(lambda axes: _draw_process(axes, timelines))
    if any(moment.used_blocks is not None for moments in rows for moment in moments):
        panels.append(lambda axes: _draw_blocks(axes, timelines))
    figure = new_figure(_PANEL_INCHES * len(panels), _HEIGHT_INCHES, instead="`timeline.to_dict()`")
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        panel(axes)
        axes.set_xlabel("tokens in each row of the cache")
        legend = axes.legend(fontsize="small", loc="upper left", frameon=False)
        lines = sum(1 + text.get_text().count("\n") for text in legend.get_texts())
        room = 1 / (1 - min(0.7, _LEGEND_EDGES + _LEGEND_LINE * lines))
        bottom, top = axes.get_ylim()
        bottom = min(0, bottom)  # a process may hold less than at the start
        axes.set_ylim(bottom=bottom, top=bottom + room * (top - bottom))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return written(figure, path)


def _draw_bytes(axes: Any, timelines: Sequence[MemoryTimeline]) -> None:
    unit, size = byte_unit(max(moment.used_bytes for each in timelines for moment in each.rows))
    for index, timeline in enumerate(timelines):
        aside, aside_size = byte_unit(timeline.rows[-1].allocated_bytes)
        label = f"{timeline.label}\n({timeline.rows[-1].allocated_bytes / aside_size:,.1f} {aside} set aside)"
        _line(axes, timeline.rows, [moment.used_bytes / size for moment in timeline.rows], index, label)
    axes.set(ylabel=f"in use ({unit})", title="K and V in the cache")


def _draw_process(axes: Any, timelines: Sequence[MemoryTimeline]) -> None:
    for index, timeline in enumerate(timelines):
        before = timeline.start_process_bytes or 0
        rows = [moment for moment in timeline.rows if moment.process_bytes is not None]
        grown = [((moment.process_bytes or 0) - before) / 2**20 for moment in rows]
        _line(axes, rows, grown, index, timeline.label)
    axes.set(ylabel="more than at the start (MiB)", title=timelines[0].process_memory_kind)


def _draw_blocks(axes: Any, timelines: Sequence[MemoryTimeline]) -> None:
    for index, timeline in enumerate(timelines):
        rows = [moment for moment in timeline.rows if moment.used_blocks is not None]
        if rows:
            _line(axes, rows, [moment.used_blocks or 0 for moment in rows], index, timeline.label)
    axes.set(ylabel="blocks in use", title="blocks")
    axes.yaxis.get_major_locator().set_params(integer=True)


def _line(axes: Any, rows: Sequence[Moment], values: Sequence[float], index: int, label: str) -> None:
    style, marker, colour = _STYLES[index % len(_STYLES)]
    axes.plot(
        [moment.tokens for moment in rows],
        values,
        style,
        color=colour,
        marker=marker,
        markersize=5,
        markevery=max(1, len(rows) // _MOST_MARKERS),
        label=label,
    )
