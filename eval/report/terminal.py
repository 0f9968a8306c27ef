"""The one table that the terminal shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from eval.report.columns import COLUMNS, DIFFERENCE_RULE, cells, score_heading
from eval.run.lookups import by_task, problem_lines, shared_context
from eval.run.rows import Row


def table(rows: Sequence[Row], width: int = 100) -> Table:
    """Return the rows as a rich table, tasks set apart; what kept a cache from running is said below it.

    Where `width` characters are too few, the columns go that a reader can best do without.
    """
    sections = {task: [_head(task, of_task), *cells(of_task)] for task, of_task in by_task(rows).items()}
    kept = _fitting([_heading(column.heading) for column in COLUMNS], sections, width)
    # Text, not strings: rich reads brackets in strings as markup, and an error's message may hold some.
    caption = Text("\n".join([*problem_lines(rows), DIFFERENCE_RULE]))
    layout: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": 0, "pad_edge": False, "show_edge": False}
    result = Table(title="Caches compared", caption=caption, caption_justify="left", **layout)
    for index in kept:
        justify: Any = "left" if index == 0 else "right"  # names of caches, and numbers
        result.add_column(_heading(COLUMNS[index].heading), justify=justify, no_wrap=True)
    for lines in sections.values():
        for number, line in enumerate(lines):
            result.add_row(*(Text(line[index]) for index in kept), style=None if number else "bold")
        result.add_section()
    return result


def _head(task: str, rows: Sequence[Row]) -> list[str]:
    """Return the line above a task's rows: its name, and what its score is or where it was measured."""
    context_tokens = shared_context(rows)
    where = score_heading(rows) if context_tokens is None else f"at {context_tokens} tokens"
    return [task, where, *[""] * (len(COLUMNS) - 2)]


def _heading(text: str) -> str:
    return text.replace("/ ", "/\n") if "/ " in text else text.replace(" ", "\n", 1)


def _fitting(headings: Sequence[str], sections: dict[str, list[list[str]]], width: int) -> list[int]:
    """Return the indices of the columns that fit."""
    lines = [line for section in sections.values() for line in section]
    widths = [
        max(cell_len(text) for text in [*heading.splitlines(), *(line[index] for line in lines)])
        for index, heading in enumerate(headings)
    ]
    kept = list(range(len(COLUMNS)))
    # Between columns is one character, which the box draws.
    while sum(widths[index] + 1 for index in kept) - 1 > width:
        least = max(kept, key=lambda index: COLUMNS[index].left_out)
        if COLUMNS[least].left_out == 0:
            break
        kept.remove(least)
    return kept
