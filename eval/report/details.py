"""The tables behind the main one: every metric, memory and time in full, contexts, depths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from eval.report import numbers
from eval.report.document import Grid, Section
from eval.report.numbers import NOTHING
from eval.run.lookups import DEFAULT_CACHE, at_context, by_task, default_row
from eval.run.rows import AtContext, Row

BRACKETS = (
    "Between brackets: for metrics and differences the ends of the 95 % interval, for times the 10th and "
    "90th percentile."
)
_AGREEMENT = f"against {DEFAULT_CACHE}"
_DIVERGENCE = "first divergence"
MEANINGS = (
    ("set aside MiB", "memory that the cache has for keys and values, used or not; largest batch"),
    ("peak MiB", "peak memory, weights included"),
    (
        _DIVERGENCE,
        f"position of the first generated token that differs from {DEFAULT_CACHE}'s: median over the samples "
        "that differ at all",
    ),
    (_AGREEMENT, f"the main metric with {DEFAULT_CACHE}'s own answers as references"),
)

Cells = dict[tuple[str, str], str]
"""One line of a table: (heading, what else tells columns apart) -> text."""


def sections(rows: Sequence[Row]) -> list[Section]:
    """Return a section for each task of which anything was measured."""
    found = {task: [row for row in of_task if row.problem is None] for task, of_task in by_task(rows).items()}
    return [
        Section(task, (), [Section(title, [_grid(lines)]) for title, lines in _tables(measured) if lines])
        for task, measured in found.items()
        if measured
    ]


def _tables(rows: Sequence[Row]) -> Iterator[tuple[str, list[Cells]]]:
    """Yield the title and the lines of each table of one task."""
    yield "Quality", [_metrics(row) for row in rows if row.metrics]
    yield "Exact match % by length and depth", [line for row in rows for line in _heat(row)]
    yield (
        "Memory and time",
        [_resources(row) for row in rows if row.prefill_ms or row.decode_ms or row.kv_bytes is not None],
    )
    for title, value in _BY_CONTEXT.items():
        yield title, _by_context(rows, value)


def _grid(lines: Sequence[Cells]) -> Grid:
    """Return a table whose columns stand in the order in which they first come."""
    keys = list(dict.fromkeys(key for line in lines for key in line))
    return Grid(
        [heading for heading, _ in keys], [[line.get(key, NOTHING) for key in keys] for line in lines]
    )


def _line(cells: Mapping[str, str]) -> Cells:
    return {(heading, ""): text for heading, text in cells.items()}


def _metrics(row: Row) -> Cells:
    cells = _line({"cache": row.cache})
    for metric in row.metrics:
        cells[numbers.name(metric), ""] = numbers.interval(metric)
        is_default = row.cache == DEFAULT_CACHE
        difference = NOTHING if is_default else numbers.difference_interval(metric)
        cells[f"Δ to {DEFAULT_CACHE}", metric.key] = difference
    if row.agreement is not None:
        cells[f"{numbers.name(row.agreement)} {_AGREEMENT}", ""] = numbers.interval(row.agreement)
    if row.first_divergence_tokens is not None:
        cells[_DIVERGENCE, ""] = f"{row.first_divergence_tokens:g}"
    return cells


def _heat(row: Row) -> Iterator[Cells]:
    for length in sorted({cell.length_tokens for cell in row.heat}):
        found = {
            f"at {cell.depth_percent} %": f"{cell.exact_percent:.0f}"
            for cell in sorted(row.heat, key=lambda cell: cell.depth_percent)
            if cell.length_tokens == length
        }
        yield _line({"cache": row.cache, "tokens": str(length), **found})


def _resources(row: Row) -> Cells:
    return _line(
        {
            "cache": row.cache,
            "KV MiB": numbers.mib(row.kv_bytes),
            "set aside MiB": numbers.mib(row.kv_allocated_bytes),
            "peak MiB": numbers.mib(row.peak_bytes),
            "rise MiB": numbers.mib(row.rise_bytes),
            "prefill ms": numbers.spread(row.prefill_ms),
            "decode ms/token": numbers.spread(row.decode_ms),
        }
    )


Value = Callable[[AtContext, AtContext | None], str]
"""Text of what was measured at one length: (of the cache, of the default cache or None)."""


def _by_context(rows: Sequence[Row], value: Value) -> list[Cells]:
    default = default_row(rows)
    lengths = sorted({at.context_tokens for row in rows for at in row.contexts})
    lines = []
    for row in rows if lengths else ():
        cells = {"cache": row.cache, **dict.fromkeys(map(str, lengths), NOTHING)}
        for at in row.contexts:
            other = at_context(default, at.context_tokens) if default else None
            cells[str(at.context_tokens)] = value(at, other)
        lines.append(_line(cells))
    return lines


def _decode(at: AtContext, default: AtContext | None) -> str:
    times = numbers.ratio(at.decode_ms, default.decode_ms if default else None)
    return f"{numbers.spread(at.decode_ms)} {times}".rstrip()


_BY_CONTEXT: dict[str, Value] = {
    "KV MiB by tokens in the cache": lambda at, _: numbers.mib(at.kv_bytes),
    "Memory set aside, MiB, by tokens in the cache": lambda at, _: numbers.mib(at.kv_allocated_bytes),
    "Rise of memory, MiB, by tokens in the cache": lambda at, _: numbers.mib(at.rise_bytes),
    "Prefill ms by tokens in the cache": lambda at, _: numbers.spread(at.prefill_ms),
    "Decode ms/token by tokens in the cache": _decode,
    "Tokens/s by tokens in the cache": lambda at, _: numbers.significant(at.tokens_per_s),
}
"""Title -> what it shows of each length."""
