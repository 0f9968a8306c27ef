"""The picture of a profile: where attention errs, and what that does to the next token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_paged_cache.display.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .step_errors import StepErrors

_INCHES_PER_LAYER = 0.2
_INCHES_AROUND = 4.2  # title, axes and the curve below
_LEAST_LAYERS = 12
_OWN, _TOTAL = "#d1495b", "#8ecae6"


def profile_figure(title: str, step: StepErrors, kl_by_step: Sequence[float]) -> Figure:
    """The errors of a measured step by layer and head, and KL over all steps."""
    height = _INCHES_AROUND + _INCHES_PER_LAYER * max(_LEAST_LAYERS, len(step.layers))
    figure = new_figure(10.0, height, instead="`table()`")
    grid = figure.add_gridspec(2, 2, height_ratios=(height - 2.7, 2.0))
    heat = figure.add_subplot(grid[0, 0])
    _draw_heads(figure, heat, step)
    _draw_layers(figure.add_subplot(grid[0, 1], sharey=heat), step)
    _draw_kl(figure.add_subplot(grid[1, :]), kl_by_step)
    figure.suptitle(title, fontsize="medium", parse_math=False)
    return figure


def _draw_heads(figure: Any, axes: Any, step: StepErrors) -> None:
    rows = [layer.own_attention.rms_ratio_by_head for layer in step.layers]
    # Layers may differ in their number of heads.
    width = max(map(len, rows))
    cells = [[*row, *[float("nan")] * (width - len(row))] for row in rows]
    image = axes.imshow(cells, aspect="auto", cmap="magma_r", vmin=0.0, interpolation="nearest")
    figure.colorbar(image, ax=axes, label="RMS ratio of what the layer itself adds")
    axes.set(xlabel="query head", ylabel="layer", title="by layer and head")
    axes.xaxis.get_major_locator().set_params(integer=True)
    places = range(0, len(rows), max(1, len(rows) // 16))
    axes.set_yticks(list(places), [str(step.layers[place].layer) for place in places])


def _draw_layers(axes: Any, step: StepErrors) -> None:
    places = range(len(step.layers))
    total = [layer.attention.rms_ratio for layer in step.layers]
    own = [layer.own_attention.rms_ratio for layer in step.layers]
    axes.barh(places, total, 0.85, color=_TOTAL, label="with what earlier layers bring")
    axes.barh(places, own, 0.45, color=_OWN, label="what the layer itself adds")
    axes.set(xlabel="RMS ratio", title="by layer")
    axes.tick_params(labelleft=False)
    axes.grid(axis="x", alpha=0.4)
    axes.set_axisbelow(True)
    axes.legend(fontsize="small", loc="best")


def _draw_kl(axes: Any, kls: Sequence[float]) -> None:
    mean = sum(kls) / len(kls)
    axes.plot(range(1, len(kls) + 1), kls, color=_OWN, linewidth=1.2, marker="." if len(kls) < 30 else None)
    axes.axhline(mean, color="grey", linestyle="--", linewidth=1.0, label=f"mean {mean:.2e}")
    if min(kls) > 0:
        axes.set_yscale("log")
    axes.set(xlabel="decode step", ylabel="KL (nats)", title="next token: KL(full precision || format)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.4)
    axes.legend(fontsize="small", loc="best")
