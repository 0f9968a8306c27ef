"""Maps of where in a long text each cache still finds what is asked for."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.plots.looks import DPI, Look, Picture
from eval.run.rows import HeatCell, Row

PICTURE = Picture(
    "retrieval.png",
    "Retrieval by length and depth",
    "The number in a cell is the share of answers, in percent, that are word for word right, where the entry "
    "lay at that depth of a text of that length. All caches share one scale: darker is more.",
)
_COLUMNS = 4
_CELL_INCHES, _AROUND_INCHES, _MARGINS_INCHES = (0.5, 0.3), (0.35, 0.75), (0.9, 1.4)
_DARK_PERCENT = 65  # from here on numbers are written in white


def figure(rows: Sequence[Row], looks: Mapping[str, Look]) -> Figure | None:
    """Return a map for each cache, or where it is missing why; None where there is no map at all."""
    tasks = {row.task for row in rows if row.heat}
    shown = [row for row in rows if row.task in tasks]
    lengths = sorted({cell.length_tokens for row in shown for cell in row.heat})
    depths = sorted({cell.depth_percent for row in shown for cell in row.heat})
    if not lengths:
        return None
    columns = min(_COLUMNS, len(shown))
    lines = math.ceil(len(shown) / columns)
    width = columns * (_CELL_INCHES[0] * len(lengths) + _AROUND_INCHES[0]) + _MARGINS_INCHES[0]
    height = lines * (_CELL_INCHES[1] * len(depths) + _AROUND_INCHES[1]) + _MARGINS_INCHES[1]
    result = Figure(figsize=(max(5.0, width), height), dpi=DPI, layout="constrained")
    grid: Any = result.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    image = None
    for axes, row in zip(grid.flat, shown, strict=False):
        axes.set_title(row.cache, fontsize=9, parse_math=False)
        image = _map(axes, row.heat, lengths, depths) or image
        if row.problem is not None:
            word = "failed" if row.failed else "not available"
            axes.text(0.5, 0.5, word, transform=axes.transAxes, ha="center", va="center", fontsize=8)
    for axes in grid.flat[len(shown) :]:
        axes.set_visible(False)
    result.supxlabel("length of the text (tokens)", fontsize="medium")
    result.supylabel("depth of the entry (%)", fontsize="medium")
    if image is not None:
        result.colorbar(image, ax=grid, label="exact match (%)", shrink=0.6, aspect=30)
    return result


def _map(axes: Axes, cells: Sequence[HeatCell], lengths: Sequence[int], depths: Sequence[int]) -> Any:
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths], fontsize=8)
    axes.set_yticks(range(len(depths)), [str(depth) for depth in depths], fontsize=8)
    axes.tick_params(length=0, labelbottom=True)
    axes.spines[:].set_visible(False)
    if not cells:
        return None
    found = {(cell.depth_percent, cell.length_tokens): cell.exact_percent for cell in cells}
    values = [[found.get((depth, length), math.nan) for length in lengths] for depth in depths]
    for (depth, length), value in found.items():
        colour = "white" if value >= _DARK_PERCENT else "black"
        place = lengths.index(length), depths.index(depth)
        axes.text(*place, f"{value:.0f}", ha="center", va="center", fontsize=8, color=colour)
    return axes.imshow(values, cmap="Blues", vmin=0, vmax=100, aspect="auto")
