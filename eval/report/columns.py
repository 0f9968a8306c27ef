"""The columns of the main table, in the terminal as in the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eval.report import numbers
from eval.report.numbers import NOTHING
from eval.run.lookups import DEFAULT_CACHE, at_shared_context, default_row
from eval.run.rows import Row

DIFFERENCE_RULE = (
    f"A difference to {DEFAULT_CACHE} whose 95 % interval contains zero is called noise: these samples do "
    "not tell the two apart. The others are better or worse; same: every sample scores the same."
)

Cell = Callable[[Row, Row | None], str]
"""Text of a cell: (row, the default cache's row of the same task or None)."""


@dataclass(frozen=True)
class Column:
    """One column of the table."""

    heading: str  # with the unit of its numbers
    cell: Cell  # what it says of a row
    meaning: str  # explained in the report
    # where columns have to go because the terminal is narrow, the highest number goes first; 0: never
    left_out: int = 0


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
    shown = at_shared_context(rows)
    default = default_row(shown)
    return [[column.cell(row, default) for column in COLUMNS] for row in shown]


def score_heading(rows: Sequence[Row]) -> str:
    """Return what the score of one task is; nothing where it has none."""
    return next((numbers.name(row.metrics[0]) for row in rows if row.metrics), "")
