"""The tables behind the main one: every metric, memory and time in full, contexts, depths."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from eval.report import numbers
from eval.report.numbers import NOTHING
from eval.run.rows import DEFAULT_CACHE, AtContext, Metric, Row, at_context, by_task, default_row

BRACKETS = (
    "Between brackets: for metrics and differences the ends of the 95 % interval, for times the 10th and "
    "90th percentile."
)
_AGREEMENT, _DIVERGENCE = f"against {DEFAULT_CACHE}", "first divergence"
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

Table = tuple[str, list[str], list[list[str]]]  # (title, headings, the texts of each line)
Columns = Sequence[tuple[str, Callable[[Row], str]]]  # (heading, text of a row)


def table(title: str, headings: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    """Return a table without the columns that say nothing."""
    kept = [index for index in range(len(headings)) if any(line[index] != NOTHING for line in lines)]
    return title, [headings[index] for index in kept], [[line[index] for index in kept] for line in lines]


def tables(rows: Sequence[Row]) -> dict[str, list[Table]]:
    """Return the tables of each task of which anything was measured."""
    found = {task: [row for row in of_task if row.problem is None] for task, of_task in by_task(rows).items()}
    return {task: list(_tables(measured)) for task, measured in found.items() if measured}


def _tables(rows: Sequence[Row]) -> Iterator[Table]:
    if scored := [row for row in rows if row.metrics]:
        yield _by_columns("Quality", scored, list(_metrics(scored)))
    if any(row.heat for row in rows):
        yield _heat(rows)
    if used := [row for row in rows if row.prefill_ms or row.decode_ms or row.kv_bytes is not None]:
        yield _by_columns("Memory and time", used, _RESOURCES)
    if lengths := sorted({at.context_tokens for row in rows for at in row.contexts}):
        for title, value in _BY_CONTEXT.items():
            cells = partial(_at_length, default=default_row(rows), value=value)
            columns = [(str(length), partial(cells, length=length)) for length in lengths]
            yield _by_columns(title, rows, [("cache", lambda row: row.cache), *columns])


def _by_columns(title: str, rows: Sequence[Row], columns: Columns) -> Table:
    lines = [[text(row) for _, text in columns] for row in rows]
    return table(title, [heading for heading, _ in columns], lines)


def _metrics(rows: Sequence[Row]) -> Iterator[tuple[str, Callable[[Row], str]]]:
    def written(row: Row, key: str, write: Callable[[Metric], str]) -> str:
        return next((write(metric) for metric in row.metrics if metric.key == key), NOTHING)

    def difference(row: Row, key: str) -> str:
        return NOTHING if row.cache == DEFAULT_CACHE else written(row, key, numbers.difference_interval)

    def divergence(row: Row) -> str:
        return NOTHING if row.first_divergence_tokens is None else f"{row.first_divergence_tokens:g}"

    yield "cache", lambda row: row.cache
    for metric in {metric.key: metric for row in rows for metric in row.metrics}.values():
        yield numbers.name(metric), partial(written, key=metric.key, write=numbers.interval)
        yield f"Δ to {DEFAULT_CACHE}", partial(difference, key=metric.key)
    if agreement := next((row.agreement for row in rows if row.agreement), None):
        heading = f"{numbers.name(agreement)} {_AGREEMENT}"
        yield heading, lambda row: numbers.interval(row.agreement) if row.agreement else NOTHING
    yield _DIVERGENCE, divergence


def _heat(rows: Sequence[Row]) -> Table:
    depths = sorted({cell.depth_percent for row in rows for cell in row.heat})
    lines = []
    for row in rows:
        exact = {(cell.length_tokens, cell.depth_percent): f"{cell.exact_percent:.0f}" for cell in row.heat}
        for length in sorted({length for length, _ in exact}):
            lines.append([row.cache, str(length), *(exact.get((length, depth), NOTHING) for depth in depths)])
    title = "Exact match % by length and depth"
    return table(title, ["cache", "tokens", *(f"at {depth} %" for depth in depths)], lines)


_RESOURCES: Columns = (
    ("cache", lambda row: row.cache),
    ("KV MiB", lambda row: numbers.mib(row.kv_bytes)),
    ("set aside MiB", lambda row: numbers.mib(row.kv_allocated_bytes)),
    ("peak MiB", lambda row: numbers.mib(row.peak_bytes)),
    ("rise MiB", lambda row: numbers.mib(row.rise_bytes)),
    ("prefill ms", lambda row: numbers.spread(row.prefill_ms)),
    ("decode ms/token", lambda row: numbers.spread(row.decode_ms)),
)

Value = Callable[[AtContext, AtContext | None], str]  # (of the cache, of the default cache) at one length


def _at_length(row: Row, length: int, default: Row | None, value: Value) -> str:
    at, other = at_context(row, length), at_context(default, length) if default else None
    return NOTHING if at is None else value(at, other)


def _decode(at: AtContext, default: AtContext | None) -> str:
    times = numbers.ratio(at.decode_ms, default.decode_ms if default else None)
    return f"{numbers.spread(at.decode_ms)} {times}".rstrip()


# Title -> what it shows of each length.
_BY_CONTEXT: dict[str, Value] = {
    "KV MiB by tokens in the cache": lambda at, _: numbers.mib(at.kv_bytes),
    "Memory set aside, MiB, by tokens in the cache": lambda at, _: numbers.mib(at.kv_allocated_bytes),
    "Rise of memory, MiB, by tokens in the cache": lambda at, _: numbers.mib(at.rise_bytes),
    "Prefill ms by tokens in the cache": lambda at, _: numbers.spread(at.prefill_ms),
    "Decode ms/token by tokens in the cache": _decode,
    "Tokens/s by tokens in the cache": lambda at, _: numbers.significant(at.tokens_per_s),
}
