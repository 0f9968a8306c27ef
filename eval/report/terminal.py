"""The one table that the terminal shows; the report has its columns too."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from eval.report import numbers
from eval.report.numbers import NOTHING
from eval.run import rows as of_runs
from eval.run.rows import DEFAULT_CACHE, Row, by_task, problem_lines, shared_context

DIFFERENCE_RULE = (
    f"A difference to {DEFAULT_CACHE} whose 95 % interval contains zero is called noise: these samples do "
    "not tell the two apart. The others are better or worse; same: every sample scores the same."
)

Cell = Callable[[Row, Row | None], str]  # (row, the default cache's row of the same task or None)


@dataclass(frozen=True)
class Column:
    """One column of the table."""

    heading: str  # with the unit of its numbers
    cell: Cell  # what it says of a row
    meaning: str  # explained in the report
    left_out: int = 0  # where the terminal is narrow, the highest number goes first; 0: never


def _score(row: Row, default: Row | None) -> str:
    if row.problem is not None:
        return "failed" if row.failed else "not available"
    return numbers.score(row.metrics[0]) if row.metrics else NOTHING


def _difference(row: Row, default: Row | None) -> str:
    return numbers.difference(row.metrics[0]) if row.metrics and row.cache != DEFAULT_CACHE else NOTHING


def _decode(row: Row, default: Row | None) -> str:
    if row.decode_ms is None:
        return NOTHING
    times = numbers.ratio(row.decode_ms, default.decode_ms if default else None)
    return f"{numbers.significant(row.decode_ms.median)} {times}".rstrip()


COLUMNS = (
    Column("cache", lambda row, default: row.cache, "which cache the model was given"),
    Column(
        "score",
        _score,
        "the task's main metric over all samples, ± half the width of its 95 % interval (bootstrap)",
    ),
    Column(
        f"Δ to {DEFAULT_CACHE}",
        _difference,
        f"the score less that of {DEFAULT_CACHE} on the same samples, and what is to be made of it",
    ),
    Column(
        "same tokens %",
        lambda row, default: NOTHING if row.identical_percent is None else f"{row.identical_percent:.1f}",
        f"share of samples whose generated tokens all equal those with {DEFAULT_CACHE}",
        left_out=2,
    ),
    Column(
        "bits/ value",
        lambda row, default: NOTHING if row.bits_per_value is None else f"{row.bits_per_value:.1f}",
        f"KV bytes, in bits, for each number of K and V that {DEFAULT_CACHE} holds for the same batch",
    ),
    Column(
        "KV MiB",
        lambda row, default: numbers.mib(row.kv_bytes),
        "keys and values held at the end of the largest batch",
        left_out=1,
    ),
    Column(
        "rise MiB",
        lambda row, default: numbers.mib(row.rise_bytes),
        "largest rise of memory during one batch",
        left_out=4,
    ),
    Column(
        "prefill ms",
        lambda row, default: numbers.significant(row.prefill_ms.median if row.prefill_ms else None),
        "the forward of the whole prompt; median",
        left_out=5,
    ),
    Column(
        "decode ms/token",
        _decode,
        "one decode step, which gives one token to each sequence of the batch; median; x is how many times "
        f"as long as with {DEFAULT_CACHE}",
    ),
    Column(
        "tokens/ s",
        lambda row, default: numbers.significant(row.tokens_per_s),
        "decoded tokens of all sequences in a second, at the median step",
        left_out=3,
    ),
)


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """Return the text of every cell of one task: a list for each row, in the order of `COLUMNS`."""
    shown = of_runs.at_shared_context(rows)
    default = of_runs.default_row(shown)
    return [[column.cell(row, default) for column in COLUMNS] for row in shown]


def score_heading(rows: Sequence[Row]) -> str:
    """Return what the score of one task is; nothing where it has none."""
    return next((numbers.name(row.metrics[0]) for row in rows if row.metrics), "")


def table(rows: Sequence[Row], width: int = 100) -> Table:
    """Return the rows as a rich table, problems below, without the columns that `width` has no room for."""
    sections = []
    for task, of_task in by_task(rows).items():
        context_tokens = shared_context(of_task)
        where = score_heading(of_task) if context_tokens is None else f"at {context_tokens} tokens"
        sections.append([[task, where, *[""] * (len(COLUMNS) - 2)], *cells(of_task)])
    kept = _fitting([_heading(column.heading) for column in COLUMNS], sections, width)
    # Text, not strings: rich reads brackets in strings as markup, and an error's message may hold some.
    caption = Text("\n".join([*problem_lines(rows), DIFFERENCE_RULE]))
    layout: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": 0, "pad_edge": False, "show_edge": False}
    result = Table(title="Caches compared", caption=caption, caption_justify="left", **layout)
    for index in kept:
        justify: Any = "left" if index == 0 else "right"  # names of caches, and numbers
        result.add_column(_heading(COLUMNS[index].heading), justify=justify, no_wrap=True)
    for lines in sections:
        for number, line in enumerate(lines):
            result.add_row(*(Text(line[index]) for index in kept), style=None if number else "bold")
        result.add_section()
    return result


def _heading(text: str) -> str:
    return text.replace("/ ", "/\n") if "/ " in text else text.replace(" ", "\n", 1)


def _fitting(headings: Sequence[str], sections: Sequence[list[list[str]]], width: int) -> list[int]:
    """Return the indices of the columns that fit."""
    columns = zip(*(line for section in sections for line in section), strict=True)
    texts = [(*heading.splitlines(), *column) for heading, column in zip(headings, columns, strict=True)]
    widths = [max(map(cell_len, column)) for column in texts]
    kept = list(range(len(COLUMNS)))
    # Between columns is one character, which the box draws.
    while sum(widths[index] + 1 for index in kept) - 1 > width:
        least = max(kept, key=lambda index: COLUMNS[index].left_out)
        if COLUMNS[least].left_out == 0:
            break
        kept.remove(least)
    return kept
