"""All types in tables: on the screen, and on a page for users."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eval.core.table import markdown
from eval.zoo import groups, kinds, runs
from eval.zoo.checks import CASES
from eval.zoo.examine import Options, Report

_COLOURS = {groups.WRONG: "red", groups.REFUSED: "yellow", groups.UNKNOWN: "dim"}

_CASES = {
    "plain": "a batch without padding",
    "padded": "prompts of several lengths, padded on the left",
    "second turn": "the same cache given again with the longer conversation",
    "beams": "beam search",
}


def page(reports: Sequence[Report], options: Options, environment: dict[str, Any]) -> str:
    """The page, with a section for every group.

    Args:
        reports: what was found out.
        options: how.
        environment: as it was described when they were made.
    """
    versions = environment["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in ("transformers", "torch", "hf-paged-cache"))
    cases = "; ".join(f"*{case.name}*, {_CASES[case.name]}" for case in CASES)
    attention = options.attention or "the attention that transformers chooses"
    parts = [
        "# Which models PagedCache serves",
        f"**{groups.headline(reports)}.**",
        f"Written by `python -m eval.zoo` with {packages}, blocks of {options.block_size} tokens, "
        f"{attention}, on a CPU. Every generative class that transformers registers is built tiny, with "
        "random weights, and generates with the default cache and with PagedCache: "
        f"{cases}. *equal* means the same tokens and logits in float32 (within {runs.TOLERANCE:g} of "
        "their standard deviation; where two logits lie closer than that, tokens may part). A format is "
        "listed where a prompt of more than two blocks and some steps run in it; what it loses depends on "
        "trained weights, and is not seen here.",
        "Layers are those of the tiny configs (windows are switched on where a type can have them): "
        + "; ".join(f"*{kind}* {meaning}" for kind, meaning in kinds.KINDS.items())
        + ".",
    ]
    for group, members in groups.grouped(reports).items():
        parts += [f"## {groups.GROUPS[group]} ({len(members)})", _table(group, members)]
    return "\n\n".join(parts) + "\n"


def _table(group: str, members: list[Report]) -> str:
    rows = [[f"`{report.name}`", f"`{report.class_name}`", *_cells(report)] for report in members]
    if group in (groups.REFUSED, groups.UNKNOWN):
        return markdown(["type", "class", "why"], [[row[0], row[1], row[-1]] for row in rows])
    return markdown(["type", "class", "layers", "formats", "checks"], rows)


def _cells(report: Report) -> list[str]:
    return [", ".join(report.kinds), groups.formats_in_words(report), groups.checks_in_words(report)]


def show(console: Console, reports: Sequence[Report]) -> None:
    """Print one table, group by group."""
    table = Table(title="model types and PagedCache", title_justify="left", title_style="bold")
    for heading in ("type", "K and V", "layers", "formats", "checks"):
        table.add_column(heading, overflow="fold")
    for group, members in groups.grouped(reports).items():
        for report in members:
            cells = (report.name, group, *_cells(report))
            table.add_row(*(escape(cell) for cell in cells), style=_COLOURS.get(group))
        table.add_section()
    console.print(table)
    console.print(groups.headline(reports), highlight=False)
