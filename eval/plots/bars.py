"""Memory and time of each task as bars, for runs that did not measure them by context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from eval.plots.looks import DPI, Look, Picture
from eval.run.lookups import MIB, by_task
from eval.run.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH_INCHES = 9.0
_INCHES_PER_BAR = 0.36
_INCHES_PER_TASK = 0.5  # its name
_INCHES_AROUND = 1.3  # title above, axis below
_ROOM_FOR_NUMBERS = 1.25
# Light enough for the hatch to be seen; told apart by the hatch alone when printed in grey.
_COLOURS = ("#dddddd", "#8ecae6", "#ffd166", "#b7e4c7", "#f4a6a6", "#cdb4db")
_HATCHES = ("", "///", "...", "xxx", "\\\\\\", "---", "++")


@dataclass(frozen=True)
class Measure:
    """One column of bars."""

    label: str  # of its axis, with the unit
    # what it shows of a row, in that unit; None where it was not measured
    value: Callable[[Row], float | None]
    spec: str  # how the number at the end of a bar is written


@dataclass(frozen=True)
class Bars:
    """One question and the measures that answer it, side by side."""

    PICTURE: Picture
    measures: tuple[Measure, ...]

    def figure(self, rows: Sequence[Row], looks: Mapping[str, Look]) -> Figure | None:
        """Return a line of panels for each task; None where lines over contexts say it better."""
        if any(row.contexts for row in rows) or not any(m.value(row) for row in rows for m in self.measures):
            return None
        height = _INCHES_AROUND + _INCHES_PER_TASK * len(by_task(rows)) + _INCHES_PER_BAR * len(rows)
        result = Figure(figsize=(_WIDTH_INCHES, height), dpi=DPI, layout="constrained")
        _fill(result, self.measures, by_task(rows), {cache: number for number, cache in enumerate(looks)})
        return result


def _mib(name: str) -> Callable[[Row], float | None]:
    return lambda row: None if getattr(row, name) is None else getattr(row, name) / MIB


def _median(name: str) -> Callable[[Row], float | None]:
    return lambda row: None if getattr(row, name) is None else getattr(row, name).median


MEMORY = Bars(
    Picture(
        "memory.png", "Memory", "Left: keys and values held at the end. Right: what a batch took at most."
    ),
    (
        Measure("KV held at the end, largest batch (MiB)", _mib("kv_bytes"), ".2f"),
        Measure("Largest rise of memory in a batch (MiB)", _mib("rise_bytes"), ".0f"),
    ),
)
TIME = Bars(
    Picture("time.png", "Time", "Left: the forward of the whole prompt. Right: one decode step."),
    (
        Measure("Prefill, median (ms)", _median("prefill_ms"), ".1f"),
        Measure("Decode, median over steps (ms/token)", _median("decode_ms"), ".2f"),
    ),
)


def _fill(
    figure: Figure, measures: Sequence[Measure], tasks: Mapping[str, list[Row]], numbers: Mapping[str, int]
) -> None:
    grid: Any = figure.subplots(
        len(tasks),
        len(measures),
        squeeze=False,
        sharex="col",
        sharey="row",
        height_ratios=[len(of_task) for of_task in tasks.values()],
    )
    for axes_of_task, of_task in zip(grid, tasks.values(), strict=True):
        for axes, measure in zip(axes_of_task, measures, strict=True):
            _bars(axes, measure, of_task, numbers)
        axes_of_task[0].invert_yaxis()  # shared by the row: the first cache is on top
    for axes, measure in zip(grid[-1], measures, strict=True):
        axes.set_xlabel(measure.label)
        values = (measure.value(row) for of_task in tasks.values() for row in of_task)
        longest = max((value for value in values if value is not None), default=0.0)
        axes.set_xlim(0, _ROOM_FOR_NUMBERS * longest or 1)


def _bars(axes: Axes, measure: Measure, rows: Sequence[Row], numbers: Mapping[str, int]) -> None:
    values = [measure.value(row) for row in rows]
    texts = ["not measured" if value is None else format(value, measure.spec) for value in values]
    looks = [
        (_COLOURS[numbers[row.cache] % len(_COLOURS)], _HATCHES[numbers[row.cache] % len(_HATCHES)])
        for row in rows
    ]
    draw_bars(
        axes, rows[0].task, [row.cache for row in rows], [value or 0.0 for value in values], texts, looks
    )


def draw_bars(
    axes: Axes,
    title: str,
    names: Sequence[str],
    values: Sequence[float],
    texts: Sequence[str],
    looks: Sequence[tuple[str, str]],
    left: float = 0.0,
) -> None:
    """Draw a bar for each name from `left` to its value, with a text at its end; looks: colour and hatch."""
    bars = axes.barh(
        names,
        [max(0.0, value - left) for value in values],
        left=left,
        color=[colour for colour, _ in looks],
        hatch=[hatch for _, hatch in looks],
        edgecolor="black",
        linewidth=0.6,
    )
    axes.bar_label(bars, texts, padding=3, fontsize="small")
    axes.set_title(title, loc="left", fontsize="medium", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
