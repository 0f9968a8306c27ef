"""How long each cache takes as the context grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from eval.plots import lines
from eval.plots.looks import Look
from eval.plots.picture import Picture
from eval.rows import AtContext, Row, Spread

PICTURE = Picture(
    "time_by_context.png",
    "Time against context",
    "Above: one decode step, which gives one token to each sequence. Below: the forward of the whole prompt, "
    "for each 1000 of its tokens. Medians; the bars reach from the 10th to the 90th percentile. All axes are "
    "of powers.",
)


def _ends(spread: Spread, scale: float = 1.0) -> tuple[float, float, float]:
    return scale * spread.low, scale * spread.median, scale * spread.high


def _decode(at: AtContext) -> tuple[float, float, float]:
    return _ends(at.decode_ms)


def _prefill(at: AtContext) -> tuple[float, float, float]:
    # By the token, for all caches take so much longer for a longer prompt that nothing else would be seen.
    return _ends(at.prefill_ms, 1000 / at.context_tokens)


_MEASURES = (
    lines.Measure("decode (ms/token)", _decode),
    lines.Measure("prefill (ms for 1000 tokens)", _prefill),
)


def figure(rows: Sequence[Row], looks: Mapping[str, Look]) -> Figure | None:
    """Return the picture; None where nothing was measured by context."""
    return lines.figure(rows, looks, _MEASURES)
