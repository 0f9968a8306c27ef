"""Tables of numbers, the bounds that some of them have to keep, and how they are shown."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from rich.console import Console
from rich.table import Table

Cell = str | int | float | None


class WrongAnswer(Exception):
    """A cache computed something else than it should; its speed is not worth printing."""


@dataclass(frozen=True)
class Bound:
    """A number that must not fall below (or rise above) a limit."""

    what: str  # the number's name, a few words
    value: float  # what was measured
    limit: float  # what is required
    at_least: bool = True  # False if `value` must be at most `limit`
    unit: str = "x"  # printed after the limit

    @property
    def holds(self) -> bool:
        """Whether the bound is kept; NaN never keeps one."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    @property
    def limit_text(self) -> str:
        """The limit with its sign and unit."""
        return f"{'≥' if self.at_least else '≤'} {self.limit:,.4g}{self.unit}"

    def __str__(self) -> str:
        return f"{'✓' if self.holds else '✗'} {self.what} {self.limit_text}"

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        fields = {name: value for name, value in vars(self).items() if name != "unit"}
        return {**fields, "holds": self.holds}


def required(what: str, value: Any, limit: float | None, **fields: Any) -> tuple[Bound, ...]:
    """The bound of a row where there is a limit; none where that is None."""
    return () if limit is None else (Bound(what, value, limit, **fields),)


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
    """A table with a name. `notes` say what the columns mean."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: list[Row]
    notes: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        rows = [{**row.cells, "required": [bound.to_dict() for bound in row.bounds]} for row in self.rows]
        about = {"bench": self.name, "title": self.title, "notes": list(self.notes)}
        return {**about, "seconds": round(self.seconds, 1), "rows": rows}


def plain(*keys: str) -> tuple[Column, ...]:
    """Columns that are headed by their keys, whose values are printed as they are."""
    return tuple(Column(key, key) for key in keys)


def fixed(digits: int) -> Callable[[Any], str]:
    """A way to print numbers with so many decimals."""
    return lambda value: f"{value:,.{digits}f}"


def scientific(value: Any) -> str:
    """A number as 1.2e-07; text as it is."""
    return value if isinstance(value, str) else f"{value:.1e}"


def show(console: Console, result: Result) -> None:
    """Print a table, its notes below."""
    table = Table(title=f"{result.name}: {result.title}", title_justify="left", title_style="bold")
    for column in result.columns:
        is_text = any(isinstance(row.cells.get(column.key), str) for row in result.rows)
        table.add_column(column.heading, justify="left" if is_text else "right")
    with_bounds = any(row.bounds for row in result.rows)
    if with_bounds:
        table.add_column("required")
    for row in result.rows:
        cells = [_text(column, row.cells.get(column.key)) for column in result.columns]
        if with_bounds:
            lines = (f"[{'green' if bound.holds else 'red'}]{bound}[/]" for bound in row.bounds)
            cells.append("\n".join(lines))
        table.add_row(*cells)
    console.print(table)
    for note in (*result.notes, f"{result.seconds:.0f} s"):
        console.print(f"  {note}", style="dim", highlight=False)


def summary(results: Sequence[Result]) -> str:
    """How many of the required numbers hold, and which do not."""
    bounds = [(result, row, bound) for result in results for row in result.rows for bound in row.bounds]
    failed = [
        f"✗ {result.name} [{_case(result, row.cells)}]: {bound.what} is {bound.value:,.4g}{bound.unit}, "
        f"required {bound.limit_text}"
        for result, row, bound in bounds
        if not bound.holds
    ]
    return "\n".join([f"{len(bounds) - len(failed)} of {len(bounds)} required numbers hold", *failed])


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown; a bar inside a cell stays text."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _case(result: Result, cells: dict[str, Cell]) -> str:
    """The cells that name the case: those before the first measured number."""
    values = [(column, cells.get(column.key)) for column in result.columns]
    named = takewhile(lambda pair: not isinstance(pair[1], float), values)
    return ", ".join(_text(column, value) for column, value in named if value is not None)


def _text(column: Column, value: Cell) -> str:
    return "" if value is None else column.show(value)
