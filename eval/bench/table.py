"""Results on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from eval.bench.results import Cell, Column, Result

_PACKAGES = ("torch", "transformers", "hf-paged-cache", "numpy")


def header(environment: dict[str, Any], backend: str) -> str:
    """The machine, the threads and the versions, two lines."""
    versions = environment["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in _PACKAGES if versions.get(name))
    return (
        f"{environment['cpu']}, {environment['cpu_count']} cores, {environment['torch_threads']} threads, "
        f"{environment['memory_bytes'] / 1e9:.0f} GB, load {environment['load_average_1_min']}\n"
        f"{environment['machine']}, Python {environment['python']}, {packages}, kernels: {backend}"
    )


def show(console: Console, result: Result) -> None:
    """Print the table of one bench, its notes below."""
    table = Table(title=f"{result.name}: {result.title}", title_justify="left", title_style="bold")
    for column in result.columns:
        table.add_column(column.heading, justify=_alignment(result, column))
    with_bounds = any(row.bounds for row in result.rows)
    if with_bounds:
        table.add_column("required")
    for row in result.rows:
        cells = [_text(column, row.cells.get(column.key)) for column in result.columns]
        if with_bounds:
            cells.append("\n".join(_coloured(str(bound), bound.holds) for bound in row.bounds))
        table.add_row(*cells)
    console.print(table)
    for note in result.notes:
        console.print(f"  {note}", style="dim", highlight=False)
    console.print(f"  {result.seconds:.0f} s", style="dim", highlight=False)


def summary(results: Sequence[Result]) -> str:
    """How many of the required numbers hold, and which do not."""
    bounds = [(result, row, bound) for result in results for row in result.rows for bound in row.bounds]
    failed = [
        f"✗ {result.name} [{_case(result, row.cells)}]: {bound.what} is {bound.value:,.4g}{bound.unit}, "
        f"required {'≥' if bound.at_least else '≤'} {bound.limit:,.4g}{bound.unit}"
        for result, row, bound in bounds
        if not bound.holds
    ]
    return "\n".join([f"{len(bounds) - len(failed)} of {len(bounds)} required numbers hold", *failed])


def _case(result: Result, cells: dict[str, Cell]) -> str:
    """The cells that name the case: those before the first measured number."""
    named = []
    for column in result.columns:
        value = cells.get(column.key)
        if isinstance(value, float):
            break
        if value is not None:
            named.append(_text(column, value))
    return ", ".join(named)


def _alignment(result: Result, column: Column) -> Any:
    is_text = any(isinstance(row.cells.get(column.key), str) for row in result.rows)
    return "left" if is_text else "right"


def _text(column: Column, value: Cell) -> str:
    return "" if value is None else column.show(value)


def _coloured(text: str, good: bool) -> str:
    return f"[{'green' if good else 'red'}]{text}[/]"
