"""The tables of the README by name; a new one is a row here and a pair of markers there."""

from __future__ import annotations

from collections.abc import Callable

from eval.readme import caches, formats, quality, speed
from eval.readme.results import Results

TABLES: dict[str, Callable[[Results], str]] = {
    "caches": caches.table,
    "speed": speed.table,
    "quality": quality.table,
    "formats": formats.table,
}
"""Name -> makes the Markdown between its markers."""
