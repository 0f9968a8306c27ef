"""Pictures of a run, one for each question: how much memory, how much time.

They need matplotlib (extra `plots`); without it a run has none, and its report says how to get them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.report import MIB, Run
from eval.runner import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH_INCHES = 9.0
_INCHES_PER_BAR = 0.36
_INCHES_PER_TASK = 0.5  # its name
_INCHES_AROUND = 1.1  # title above, axis below
_DPI = 120
_ROOM_FOR_NUMBERS = 1.25
# Light enough for the hatch to be seen; told apart by the hatch alone when printed in grey.
_COLOURS = ("#dddddd", "#8ecae6", "#ffd166", "#b7e4c7", "#f4a6a6", "#cdb4db")
_HATCHES = ("", "///", "...", "xxx", "\\\\\\", "---", "++")


@dataclass(frozen=True)
class Measure:
    """One column of bars.

    Attributes:
        label: of its axis, with the unit.
        value: what it shows of a row, in that unit; None where it was not measured.
        spec: how the number at the end of a bar is written.
    """

    label: str
    value: Callable[[Row], float | None]
    spec: str


@dataclass(frozen=True)
class Picture:
    """One question and the measures that answer it, side by side."""

    file_name: str
    title: str
    measures: tuple[Measure, ...]


def _mib(value: int | None) -> float | None:
    return None if value is None else value / MIB


PICTURES = (
    Picture(
        "memory.png",
        "Memory",
        (
            Measure("KV held at the end, largest batch (MiB)", lambda row: _mib(row.kv_bytes), ".2f"),
            Measure("Largest rise of memory in a batch (MiB)", lambda row: _mib(row.rise_bytes), ".0f"),
        ),
    ),
    Picture(
        "latency.png",
        "Latency",
        (
            Measure("Prefill, median over batches (ms)", lambda row: row.prefill_ms, ".1f"),
            Measure("Decode, median over steps (ms/token)", lambda row: row.decode_ms_per_token, ".2f"),
        ),
    ),
)


def draw(run: Run, folder: Path) -> list[str] | None:
    """Write the pictures of a run into its folder, as PNG.

    Args:
        run: what was measured.
        folder: exists already.

    Returns:
        The names of the files, or None where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    about = f"{Path(run.source).name}, {run.settings.dtype}, batches of {run.settings.batch_size}"
    for picture in PICTURES:
        # A figure of its own, without pyplot: nothing is registered anywhere, and PNG is always drawn by Agg.
        figure = Figure(figsize=(_WIDTH_INCHES, _height_inches(run.rows)), dpi=_DPI, layout="constrained")
        _fill(figure, picture, run.rows)
        figure.suptitle(f"{picture.title}: {about}", fontsize="medium", wrap=True, parse_math=False)
        figure.savefig(folder / picture.file_name, format="png")
    return [picture.file_name for picture in PICTURES]


def _height_inches(rows: Sequence[Row]) -> float:
    tasks = {row.task for row in rows}
    return _INCHES_AROUND + _INCHES_PER_TASK * len(tasks) + _INCHES_PER_BAR * len(rows)


def _fill(figure: Figure, picture: Picture, rows: Sequence[Row]) -> None:
    tasks = list(dict.fromkeys(row.task for row in rows))
    looks = {cache: look for look, cache in enumerate(dict.fromkeys(row.cache for row in rows))}
    by_task = [[row for row in rows if row.task == task] for task in tasks]
    grid: Any = figure.subplots(
        len(tasks),
        len(picture.measures),
        squeeze=False,
        sharex="col",
        sharey="row",
        height_ratios=[len(of_task) for of_task in by_task],
    )
    for axes_of_task, of_task in zip(grid, by_task, strict=True):
        for axes, measure in zip(axes_of_task, picture.measures, strict=True):
            _bars(axes, measure, of_task, looks)
        axes_of_task[0].invert_yaxis()  # shared by the row: the first cache is on top
    for axes, measure in zip(grid[-1], picture.measures, strict=True):
        axes.set_xlabel(measure.label)
        longest = max((value for row in rows if (value := measure.value(row)) is not None), default=0.0)
        axes.set_xlim(0, _ROOM_FOR_NUMBERS * longest or 1)


def _bars(axes: Axes, measure: Measure, rows: Sequence[Row], looks: dict[str, int]) -> None:
    values = [measure.value(row) for row in rows]
    bars = axes.barh(
        [row.cache for row in rows],
        [0.0 if value is None else value for value in values],
        color=[_COLOURS[looks[row.cache] % len(_COLOURS)] for row in rows],
        hatch=[_HATCHES[looks[row.cache] % len(_HATCHES)] for row in rows],
        edgecolor="black",
        linewidth=0.6,
    )
    numbers = ["not measured" if value is None else format(value, measure.spec) for value in values]
    axes.bar_label(bars, numbers, padding=3)
    axes.set_title(rows[0].task, loc="left", fontsize="medium", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
