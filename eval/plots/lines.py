"""Memory and time as the context grows: a panel of lines for each measure, each named at its end."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from eval.core.statistics import Spread
from eval.plots.looks import DPI, Look, Name, Picture, power_axis, write_names
from eval.run.rows import MIB, AtContext, Row

_WIDTH_INCHES, _PANEL_INCHES, _AROUND_INCHES = 8.5, 4.3, 0.8
_ASIDE = 0.25  # part of the way to the next length over which lines with bars are spread
_ROOM = 1.08  # factor between the outermost lines and the ends of the axis
_LEAST_DECADES = 0.5  # less than this of an axis of powers has too few round numbers to read it by

Ends = tuple[float, float, float]  # (low, middle, high) of what was measured at one length


@dataclass(frozen=True)
class Lines:
    """One question and the measures that answer it, one below the other: (axis with its unit, value)."""

    PICTURE: Picture
    measures: tuple[tuple[str, Callable[[AtContext], Ends]], ...]

    def figure(self, rows: Sequence[Row], looks: Mapping[str, Look]) -> Figure | None:
        """Return the picture; None where nothing was measured by context."""
        measured = [row for row in rows if row.contexts]
        if not measured:
            return None
        count = len(self.measures)
        size = _WIDTH_INCHES, _AROUND_INCHES + count * _PANEL_INCHES
        result = Figure(figsize=size, dpi=DPI, layout="constrained")
        grid: Any = result.subplots(count, 1, squeeze=False, sharex=True)
        panels = zip(grid[:, 0], self.measures, strict=True)
        names = {axes: _panel(axes, measured, looks, *measure) for axes, measure in panels}
        grid[-1, 0].set_xlabel("tokens in the cache, of each sequence")
        write_names(result, names)
        return result


def _ends(spread: Spread, scale: float = 1.0) -> Ends:
    return scale * spread.low, scale * spread.median, scale * spread.high


MEMORY = Lines(
    Picture(
        "memory_by_context.png",
        "Memory against context",
        "Above: keys and values held at the end. Below: the rise of memory above what was held before, "
        "median of the rounds; it counts what a cache needs for a moment beside what it holds. Both axes are "
        "of powers, so that caches of the same growth run in parallel.",
    ),
    (
        ("KV held (MiB)", lambda at: (at.kv_bytes / MIB,) * 3),
        ("rise of memory (MiB)", lambda at: (at.rise_bytes / MIB,) * 3),
    ),
)
TIME = Lines(
    Picture(
        "time_by_context.png",
        "Time against context",
        "Above: one decode step, which gives one token to each sequence. Below: the forward of the whole "
        "prompt, for each 1000 of its tokens. Medians; the bars reach from the 10th to the 90th percentile "
        "and stand a little aside of their length, so that all are seen. All axes are of powers.",
    ),
    (
        ("decode (ms/token)", lambda at: _ends(at.decode_ms)),
        # By the token: a longer prompt takes all caches so much longer that nothing else would be seen.
        ("prefill (ms for 1000 tokens)", lambda at: _ends(at.prefill_ms, 1000 / at.context_tokens)),
    ),
)


def _panel(
    axes: Axes, rows: Sequence[Row], looks: Mapping[str, Look], label: str, value: Callable[[AtContext], Ends]
) -> list[Name]:
    """Draw the lines; the names at their ends."""
    lengths = sorted({at.context_tokens for row in rows for at in row.contexts})
    values = [value(at) for row in rows for at in row.contexts]
    has_bars = any(low != high for low, _, high in values)
    asides = _asides(len(rows), lengths) if has_bars else [1.0] * len(rows)
    for row, aside in zip(rows, asides, strict=True):
        _line(axes, row, looks[row.cache], value, aside)
    power_axis(axes, lengths, lengths[0] * min(asides) / _ROOM, lengths[-1] * max(asides) * _ROOM)
    axes.set_ylabel(label)
    if min(ends[0] for ends in values) > 0:
        _powers(axes, [end for ends in values for end in ends])
    axes.grid(axis="y", which="major", linewidth=0.5, color="#dddddd")
    axes.spines[["top", "right"]].set_visible(False)
    return [
        Name(row.cache, value(last)[1], looks[row.cache], line_from=last.context_tokens * aside)
        for row, aside in zip(rows, asides, strict=True)
        for last in row.contexts[-1:]
    ]


def _asides(count: int, lengths: Sequence[int]) -> list[float]:
    """Return by which factor each of `count` lines is moved aside, so that no bar stands on another."""
    gaps = [math.log(after / before) for before, after in itertools.pairwise(lengths)]
    width = _ASIDE * min(gaps, default=1.0)
    return [math.exp(width * ((number + 0.5) / count - 0.5)) for number in range(count)]


def _line(axes: Axes, row: Row, look: Look, value: Callable[[AtContext], Ends], aside: float) -> None:
    values = [value(at) for at in row.contexts]
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
    axes.set_yscale("log")
    low, high = math.log10(min(values)), math.log10(max(values))
    room = max(0.05 * (high - low), (_LEAST_DECADES - (high - low)) / 2)
    axes.set_ylim(10 ** (low - room), 10 ** (high + room))
    dense = high - low + 2 * room < 1
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if dense else (1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
