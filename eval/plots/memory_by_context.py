"""How much memory each cache takes as the context grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from eval.lookups import MIB
from eval.plots import lines
from eval.plots.looks import Look
from eval.plots.picture import Picture
from eval.rows import AtContext, Row

PICTURE = Picture(
    "memory_by_context.png",
    "Memory against context",
    "Above: keys and values held at the end. Below: the rise of memory above what was held before, median of "
    "the rounds; it counts what a cache needs for a moment beside what it holds. Both axes are of powers, so "
    "that caches of the same growth run in parallel.",
)


def _kv(at: AtContext) -> tuple[float, float, float]:
    return (at.kv_bytes / MIB,) * 3


def _rise(at: AtContext) -> tuple[float, float, float]:
    return (at.rise_bytes / MIB,) * 3


_MEASURES = (lines.Measure("KV held (MiB)", _kv), lines.Measure("rise of memory (MiB)", _rise))


def figure(rows: Sequence[Row], looks: Mapping[str, Look]) -> Figure | None:
    """Return the picture; None where nothing was measured by context."""
    return lines.figure(rows, looks, _MEASURES)
