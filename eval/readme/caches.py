"""The table that compares the caches a user can pick, from one run of `python -m eval`."""

from __future__ import annotations

from eval.lookups import DEFAULT_CACHE, MIB
from eval.readme import show
from eval.readme.results import Results
from eval.rows import AtContext, Metric, Row

FILE = "eval_smollm2.json"
_QUALITY = (
    ("summarization", "rouge_l", "ROUGE-L", ".1f"),
    ("translation", "chrf", "chrF", ".1f"),
    ("retrieval", "exact", "retrieval %", ".0f"),
    ("perplexity", "perplexity", "perplexity", ".3f"),
    ("fidelity", "kl", "KL", ".1e"),
)
"""(task, metric, heading, how a number is written)."""
_NOTHING = 1e-6


def table(results: Results) -> str:
    """Quality, bits, bytes and speed of every cache that ran; what did not run is said below."""
    rows = results.run(FILE).rows
    caches = list(dict.fromkeys(row.cache for row in rows))
    of = {(row.task, row.cache): row for row in rows}
    base = of["latency", DEFAULT_CACHE].contexts[-1]
    header = [
        "cache",
        *(heading for *_, heading, _ in _QUALITY),
        f"K and V at {base.context_tokens} tokens",
        "bits per value there",
        "decode step there",
    ]
    lines = [
        _line(cache, of, base)
        for cache in caches
        if any(row.problem is None for row in rows if row.cache == cache)
    ]
    return "\n\n".join([show.table(header, lines), show.hardware(results, [FILE]), *_problems(rows)])


def _line(cache: str, of: dict[tuple[str, str], Row], base: AtContext) -> list[str]:
    quality = [_metric(of[task, cache], key, spec) for task, key, _, spec in _QUALITY]
    bits, at = of["latency", cache].bits_per_value, of["latency", cache].contexts
    return [
        f"`{cache}`",
        *quality,
        f"{at[-1].kv_bytes / MIB:.0f} MiB" if at else "",
        "" if bits is None else f"{bits:.1f}",
        _step(at[-1], base) if at else "",
    ]


def _step(at: AtContext, base: AtContext) -> str:
    milliseconds = at.decode_ms.median
    return f"{milliseconds:.0f} ms, {show.ratio(base.decode_ms.median / milliseconds)}"


def _metric(row: Row, key: str, spec: str) -> str:
    """The value; bold where it differs from the default cache's by more than noise."""
    found = [metric for metric in row.metrics if metric.key == key]
    return _written(found[0], spec) if found else "failed"


def _written(metric: Metric, spec: str) -> str:
    text = "0" if abs(metric.value) < _NOTHING else format(metric.value, spec)
    return f"**{text}**" if metric.verdict in ("better", "worse") else text


def _problems(rows: list[Row]) -> list[str]:
    said: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.problem is not None:
            said.setdefault((row.cache, row.problem), []).append(row.task)
    every = len({row.task for row in rows})
    words = [
        f"`{cache}`{'' if len(tasks) == every else ' (' + ', '.join(tasks) + ')'}: {problem}."
        for (cache, problem), tasks in said.items()
    ]
    return ["Not run: " + " ".join(words)] if words else []
