"""The tables behind the main one: every metric, memory and time in full, contexts, depths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from eval.lookups import DEFAULT_CACHE, at_context, by_task, default_row
from eval.report import numbers
from eval.report.document import Grid, Section
from eval.report.numbers import NOTHING
from eval.rows import AtContext, Metric, Row

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


def sections(rows: Sequence[Row]) -> list[Section]:
    """Return a section for each task of which anything was measured."""
    found = [
        (task, [row for row in of_task if row.problem is None]) for task, of_task in by_task(rows).items()
    ]
    return [Section(task, (), _of_task(measured)) for task, measured in found if measured]


def _of_task(rows: Sequence[Row]) -> list[Section]:
    parts = [("Quality", _metrics(rows)), ("Exact match % by length and depth", _heat(rows))]
    parts += [("Memory and time", _resources(rows)), *_contexts(rows)]
    return [Section(title, [grid]) for title, grid in parts if grid is not None]


def _metrics(rows: Sequence[Row]) -> Grid | None:
    first: dict[str, Metric] = {}
    for row in rows:
        for metric in row.metrics:
            first.setdefault(metric.key, metric)
    if not first:
        return None
    headings = ["cache"]
    for metric in first.values():
        headings += [numbers.name(metric), f"Δ to {DEFAULT_CACHE}"]
    columns = [*_extra_columns(rows)]
    headings += [heading for heading, _ in columns]
    lines = [[*_metric_cells(row, list(first)), *(cell(row) for _, cell in columns)] for row in rows]
    return Grid(headings, lines)


def _metric_cells(row: Row, keys: Sequence[str]) -> list[str]:
    found = {metric.key: metric for metric in row.metrics}
    cells = [row.cache]
    for key in keys:
        metric = found.get(key)
        cells += [NOTHING] * 2 if metric is None else [numbers.interval(metric), _difference(row, metric)]
    return cells


def _extra_columns(rows: Sequence[Row]) -> Iterator[tuple[str, Callable[[Row], str]]]:
    """Yield heading and cell of what only tasks that generate texts have."""
    agreement = next((row.agreement for row in rows if row.agreement), None)
    if agreement is not None:
        yield f"{numbers.name(agreement)} {_AGREEMENT}", _agreement
    if any(row.first_divergence_tokens is not None for row in rows):
        yield _DIVERGENCE, lambda row: _tokens(row.first_divergence_tokens)


def _agreement(row: Row) -> str:
    return NOTHING if row.agreement is None else numbers.interval(row.agreement)


def _difference(row: Row, metric: Metric) -> str:
    return NOTHING if row.cache == DEFAULT_CACHE else numbers.difference_interval(metric)


def _tokens(value: float | None) -> str:
    return NOTHING if value is None else f"{value:g}"


def _heat(rows: Sequence[Row]) -> Grid | None:
    depths = sorted({cell.depth_percent for row in rows for cell in row.heat})
    if not depths:
        return None
    lines = []
    for row in rows:
        found = {(cell.length_tokens, cell.depth_percent): f"{cell.exact_percent:.0f}" for cell in row.heat}
        for length in sorted({length for length, _ in found}):
            lines.append([row.cache, str(length), *(found.get((length, depth), NOTHING) for depth in depths)])
    return Grid(["cache", "tokens", *(f"at {depth} %" for depth in depths)], lines)


def _resources(rows: Sequence[Row]) -> Grid | None:
    measured = [row for row in rows if row.prefill_ms or row.decode_ms or row.kv_bytes is not None]
    if not measured:
        return None
    headings = ["cache", "KV MiB", "set aside MiB", "peak MiB", "rise MiB", "prefill ms", "decode ms/token"]
    lines = [
        [
            row.cache,
            *(
                numbers.mib(size)
                for size in (row.kv_bytes, row.kv_allocated_bytes, row.peak_bytes, row.rise_bytes)
            ),
            numbers.spread(row.prefill_ms),
            numbers.spread(row.decode_ms),
        ]
        for row in measured
    ]
    return Grid(headings, lines)


Value = Callable[[AtContext, AtContext | None], str]
"""Text of what was measured at one length: (of the cache, of the default cache or None)."""


def _contexts(rows: Sequence[Row]) -> list[tuple[str, Grid]]:
    values: dict[str, Value] = {
        "KV MiB by tokens in the cache": lambda at, default: numbers.mib(at.kv_bytes),
        "Memory set aside, MiB, by tokens in the cache": lambda at, default: numbers.mib(
            at.kv_allocated_bytes
        ),
        "Rise of memory, MiB, by tokens in the cache": lambda at, default: numbers.mib(at.rise_bytes),
        "Prefill ms by tokens in the cache": lambda at, default: numbers.spread(at.prefill_ms),
        "Decode ms/token by tokens in the cache": _decode,
        "Tokens/s by tokens in the cache": lambda at, default: numbers.significant(at.tokens_per_s),
    }
    lengths = sorted({at.context_tokens for row in rows for at in row.contexts})
    return [(title, _by_context(rows, lengths, value)) for title, value in values.items() if lengths]


def _by_context(rows: Sequence[Row], lengths: Sequence[int], value: Value) -> Grid:
    default = default_row(rows)
    lines = []
    for row in rows:
        found = [(at_context(row, n), at_context(default, n) if default else None) for n in lengths]
        lines.append([row.cache, *(NOTHING if at is None else value(at, other) for at, other in found)])
    return Grid(["cache", *map(str, lengths)], lines)


def _decode(at: AtContext, default: AtContext | None) -> str:
    times = numbers.ratio(at.decode_ms, default.decode_ms if default else None)
    return f"{numbers.spread(at.decode_ms)} {times}".rstrip()
