"""Text in columns."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], *, left: int = 0) -> list[str]:
    """Lines with two spaces between columns, so many of them set to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    formats = [f"{'<' if place < left else '>'}{width}" for place, width in enumerate(widths)]
    return ["  ".join(map(format, row, formats)).rstrip() for row in rows]
