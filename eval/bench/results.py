"""What a bench hands back: rows of numbers, and the bounds that some of them have to keep."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Cell = str | int | float | None


class WrongAnswer(Exception):
    """A cache computed something else than it should; its speed is not worth printing."""


@dataclass(frozen=True)
class Bound:
    """A number that must not fall below (or rise above) a limit.

    Attributes:
        what: the number's name, a few words.
        value: what was measured.
        limit: what is required.
        at_least: False if `value` must be at most `limit`.
        unit: printed after the limit.
    """

    what: str
    value: float
    limit: float
    at_least: bool = True
    unit: str = "x"

    @property
    def holds(self) -> bool:
        """Whether the bound is kept; NaN never keeps one."""
        if math.isnan(self.value):
            return False
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        sign = "≥" if self.at_least else "≤"
        return f"{'✓' if self.holds else '✗'} {self.what} {sign} {self.limit:,.4g}{self.unit}"


@dataclass(frozen=True)
class Column:
    """One column of a table: the key in `Row.cells`, its heading, and how to print a value."""

    key: str
    heading: str
    show: Callable[[Any], str] = str


@dataclass(frozen=True)
class Row:
    """One line: cells by column key, and what is required of it."""

    cells: dict[str, Cell]
    bounds: tuple[Bound, ...] = ()


@dataclass(frozen=True)
class Result:
    """The table of one bench. `notes` say what the columns mean."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: list[Row]
    notes: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON writes it."""
        return {
            "bench": self.name,
            "title": self.title,
            "notes": list(self.notes),
            "seconds": round(self.seconds, 1),
            "rows": [
                {
                    **row.cells,
                    "required": [
                        {
                            "what": bound.what,
                            "value": bound.value,
                            "limit": bound.limit,
                            "at_least": bound.at_least,
                            "holds": bound.holds,
                        }
                        for bound in row.bounds
                    ],
                }
                for row in self.rows
            ],
        }


def fixed(digits: int, unit: str = "") -> Callable[[Any], str]:
    """A way to print numbers with so many decimals."""
    return lambda value: f"{value:,.{digits}f}{unit}"


def scientific(value: Any) -> str:
    """A number as 1.2e-07."""
    return f"{value:.1e}"
