"""KL of every scheme as bars, with its bits per value. Needs matplotlib (extra `plots`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.core.table import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANEL_INCHES = 6.0
_INCHES_PER_BAR = 0.32
_INCHES_AROUND = 1.3
_LEAST_KL, _MOST_KL = 1e-6, 1e3
"""Ends of the axis: full precision has no divergence, such an axis has no zero, and numbers need room."""
_TITLES = {"quality": "keys as they are", "offset": "60 added to two channels of every key"}
_STOCK, _OURS = ("#dddddd", "///"), ("#8ecae6", "")


def draw(results: Sequence[Result], path: Path) -> bool:
    """Write a PNG, a panel for each result; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    height = _INCHES_AROUND + _INCHES_PER_BAR * max(len(result.rows) for result in results)
    figure = Figure(figsize=(_PANEL_INCHES * len(results), height), dpi=120, layout="constrained")
    _fill(figure, results)
    figure.savefig(path, format="png")
    return True


def _fill(figure: Figure, results: Sequence[Result]) -> None:
    grid: Any = figure.subplots(1, len(results), squeeze=False)
    for axes, result in zip(grid[0], results, strict=True):
        _bars(axes, result)
    figure.suptitle(results[0].title, fontsize="medium", wrap=True, parse_math=False)


def _bars(axes: Axes, result: Result) -> None:
    from eval.plots.bars import draw_bars

    rows: list[dict[str, Any]] = [row.cells for row in result.rows]
    names = [str(cells["scheme"]) for cells in rows]
    looks = [_STOCK if name == "dynamic" or name.startswith("stock") else _OURS for name in names]
    values, labels = [cells.get("kl_nats") or 0.0 for cells in rows], [_label(cells) for cells in rows]
    # A bar on an axis of powers has to begin somewhere: at its left end.
    draw_bars(axes, _TITLES[result.name], names, values, labels, looks, left=_LEAST_KL)
    axes.set_xscale("log")
    axes.set_xlim(_LEAST_KL, _MOST_KL)
    axes.invert_yaxis()
    axes.set_xlabel("KL to full precision (nats per token), bits per stored value")


def _label(cells: dict[str, Any]) -> str:
    if cells.get("kl_nats") is None:
        return "not measured"
    bits = "" if cells["stored_bits"] is None else f", {cells['stored_bits']:.2f} bits"
    return f"{cells['kl_nats']:.1e}{bits}"
