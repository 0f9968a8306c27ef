"""The picture of what a cache holds: blocks by what they are, and bytes by format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .figure import new_figure, written
from .units import byte_unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hf_paged_cache.display.stats import CacheStats, GroupStats

_SIZE_INCHES = (10.0, 3.2)
_ROOM_FOR_NUMBERS = 1.25
_ALWAYS_SHOWN = ("open", "sealed", "shared")
_SELDOM_SHOWN = ("cached", "pending")
# Told apart by pattern and by lightness, so that grey will do.
_LOOKS = (
    {"facecolor": "#1d4e6b", "hatch": ""},
    {"facecolor": "#c9dbe6", "hatch": "///"},
    {"facecolor": "#6fa3bf", "hatch": "..."},
    {"facecolor": "#ffffff", "hatch": "xxx"},
)


def draw_stats(stats: CacheStats, path: str | Path | None) -> Figure:
    """See `CacheStats.plot`."""
    figure = new_figure(*_SIZE_INCHES, instead="`cache.stats()` itself")
    blocks, sizes = figure.subplots(1, 2)
    _draw_blocks(blocks, stats)
    _draw_bytes(sizes, stats)
    rows = f"{stats.batch} row{'s' * (stats.batch != 1)} x {stats.tokens} tokens"
    figure.suptitle(f"{rows}, blocks of {stats.block_sizes} tokens", fontsize="medium")
    return written(figure, path)


def _draw_blocks(axes: Any, stats: CacheStats) -> None:
    counts = [group.blocks_by_kind for group in stats.groups]
    kinds = [*_ALWAYS_SHOWN, *(kind for kind in _SELDOM_SHOWN if any(each[kind] for each in counts))]
    for place, (group, each) in enumerate(zip(stats.groups, counts, strict=True)):
        _bars(axes, [each[kind] for kind in kinds], "{:,}", place, len(counts), label=_name_of(group))
    free = sum(each["free"] for each in counts)
    axes.set(xlabel="blocks", title=f"blocks in use; {free:,} of {stats.num_blocks:,} are free")
    axes.xaxis.get_major_locator().set_params(integer=True)
    _finish(axes, kinds, max((each[kind] for each in counts for kind in kinds), default=0))
    if len(counts) > 1:
        axes.legend(fontsize="small", loc="best")


def _draw_bytes(axes: Any, stats: CacheStats) -> None:
    by_format = dict(sorted(stats.bytes_by_format.items())) or {"auto": 0}
    unit, size = byte_unit(max(by_format.values()))
    values = [count / size for count in by_format.values()]
    _bars(axes, values, "{:,.1f}", 0, 1)
    axes.set(xlabel=f"K and V in blocks ({unit})", title=f"bytes by format; {sum(values):,.1f} {unit} in all")
    names = ["model's dtype" if name == "auto" else name for name in by_format]
    _finish(axes, names, max(values))


def _bars(axes: Any, values: Sequence[float], form: str, place: int, of: int, label: str = "") -> None:
    """One bar of every entry of the axis, beside those of other groups."""
    height = 0.8 / of
    where = [entry - 0.4 + height * (place + 0.5) for entry in range(len(values))]
    bars = axes.barh(where, values, height, edgecolor="black", label=label, **_LOOKS[place % len(_LOOKS)])
    axes.bar_label(bars, labels=[form.format(value) for value in values], padding=3, fontsize="small")


def _finish(axes: Any, names: Sequence[str], largest: float) -> None:
    axes.set_xlim(0, _ROOM_FOR_NUMBERS * (largest or 1))
    axes.set_yticks(range(len(names)), names)
    around = 1.0 if len(names) == 1 else 0.6  # so that a single bar is no wall
    axes.set_ylim(len(names) - 1 + around, -around)
    axes.spines[["top", "right"]].set_visible(False)


def _name_of(group: GroupStats) -> str:
    kept = "all tokens" if group.window is None else f"window of {group.window}"
    return f"{len(group.layers)} layer{'s' * (len(group.layers) != 1)}, {kept}"
