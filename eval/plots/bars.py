"""Memory and time of each task as bars, for runs that did not measure them by context."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.core.statistics import Spread
from eval.plots.looks import DPI, Look, Picture
from eval.run.rows import MIB, Row, by_task

_WIDTH_INCHES = 9.0
_INCHES_PER_BAR = 0.36
_INCHES_PER_TASK = 0.5  # its name
_INCHES_AROUND = 1.3  # title above, axis below
_ROOM_FOR_NUMBERS = 1.25
# Light enough for the hatch to be seen; told apart by the hatch alone when printed in grey.
_COLOURS = ("#dddddd", "#8ecae6", "#ffd166", "#b7e4c7", "#f4a6a6", "#cdb4db")
_HATCHES = ("", "///", "...", "xxx", "\\\\\\", "---", "++")

# One column of bars: (label of its axis with the unit, value in that unit or None, how it is written).
Measure = tuple[str, Callable[[Row], float | None], str]


@dataclass(frozen=True)
class Bars:
    """One question and the measures that answer it, side by side."""

    PICTURE: Picture
    measures: tuple[Measure, ...]

    def figure(self, rows: Sequence[Row], looks: Mapping[str, Look]) -> Figure | None:
        """Return a line of panels for each task; None where lines over contexts say it better."""
        if any(row.contexts for row in rows) or not any(m[1](row) for row in rows for m in self.measures):
            return None
        tasks = by_task(rows)
        height = _INCHES_AROUND + _INCHES_PER_TASK * len(tasks) + _INCHES_PER_BAR * len(rows)
        result = Figure(figsize=(_WIDTH_INCHES, height), dpi=DPI, layout="constrained")
        heights = [len(of_task) for of_task in tasks.values()]
        shape: dict[str, Any] = {"squeeze": False, "sharex": "col", "sharey": "row", "height_ratios": heights}
        grid: Any = result.subplots(len(tasks), len(self.measures), **shape)
        styles = dict(zip(looks, zip(cycle(_COLOURS), cycle(_HATCHES), strict=False), strict=False))
        for column, measure in zip(grid.T, self.measures, strict=True):
            _fill(column, measure, tasks, styles)
        for axes in grid[:, 0]:
            axes.invert_yaxis()  # shared by the line of panels: the first cache is on top
        return result


def _fill(column: Sequence[Axes], measure: Measure, tasks: Mapping[str, list[Row]], styles: Any) -> None:
    label, value, spec = measure
    longest = 0.0
    for axes, (task, rows) in zip(column, tasks.items(), strict=True):
        values = [value(row) for row in rows]
        texts = ["not measured" if number is None else format(number, spec) for number in values]
        names, lengths = [row.cache for row in rows], [number or 0.0 for number in values]
        draw_bars(axes, task, names, lengths, texts, [styles[name] for name in names])
        longest = max(longest, *lengths)
    column[-1].set_xlabel(label)
    column[-1].set_xlim(0, _ROOM_FOR_NUMBERS * longest or 1)


def _mib(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else size_bytes / MIB


def _median(times: Spread | None) -> float | None:
    return None if times is None else times.median


MEMORY = Bars(
    Picture(
        "memory.png", "Memory", "Left: keys and values held at the end. Right: what a batch took at most."
    ),
    (
        ("KV held at the end, largest batch (MiB)", lambda row: _mib(row.kv_bytes), ".2f"),
        ("Largest rise of memory in a batch (MiB)", lambda row: _mib(row.rise_bytes), ".0f"),
    ),
)
TIME = Bars(
    Picture("time.png", "Time", "Left: the forward of the whole prompt. Right: one decode step."),
    (
        ("Prefill, median (ms)", lambda row: _median(row.prefill_ms), ".1f"),
        ("Decode, median over steps (ms/token)", lambda row: _median(row.decode_ms), ".2f"),
    ),
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
