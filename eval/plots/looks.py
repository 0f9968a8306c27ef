"""How each cache is drawn, in every picture alike; markers and strokes tell them apart without colour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.rows import Row

# Dark enough for lines on white, and apart for those who see no red or no green.
_COLOURS = ("#000000", "#0072b2", "#b34700", "#007a5a", "#a0468c", "#5c5c5c", "#8a6d00")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*", "d", "8")
_STROKES = ("-", "--", "-.", ":")


@dataclass(frozen=True)
class Look:
    """A cache's colour, marker and stroke, as matplotlib names them."""

    colour: str
    marker: str
    stroke: str


def looks_of(rows: Sequence[Row]) -> dict[str, Look]:
    """Return name of a cache -> its look; no two of the first 14 share a marker."""
    caches = dict.fromkeys(row.cache for row in rows)
    return {cache: _look(number) for number, cache in enumerate(caches)}


def _look(number: int) -> Look:
    return Look(
        _COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)], _STROKES[number % len(_STROKES)]
    )
