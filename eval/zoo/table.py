"""Reports on the screen."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eval.zoo import groups
from eval.zoo.examine import Report

_COLOURS = {groups.WRONG: "red", groups.REFUSED: "yellow", groups.UNKNOWN: "dim"}


def show(console: Console, reports: Sequence[Report]) -> None:
    """Print one table, group by group."""
    table = Table(title="model types and PagedCache", title_justify="left", title_style="bold")
    for heading in ("type", "layers", "K and V", "formats", "checks"):
        table.add_column(heading, overflow="fold")
    for group, members in groups.grouped(reports).items():
        for report in members:
            cells = (
                report.name,
                ", ".join(report.kinds),
                group,
                groups.formats_in_words(report),
                groups.checks_in_words(report),
            )
            table.add_row(*(escape(cell) for cell in cells), style=_COLOURS.get(group))
        table.add_section()
    console.print(table)
