"""The short table that is printed last: plain text, aligned, what matters most at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from eval.gpu.environment import headline
from eval.gpu.items import Record
from eval.gpu.report import Report
from eval.gpu.sections import SECTIONS

MAX_LISTED = 12
"""Failures, and skipped items, that are listed; the file has all."""
WIDTH = 108
DTYPES = ("float32", "bfloat16", "float16")
CACHES = ("dynamic", "static", "quantized", "paged", "paged_compiled")

Rows = list[list[str]]


def text_of(report: Report) -> str:
    """The whole table."""
    lines = [headline(report.environment)] if report.environment else []
    for letter in report.settings.sections:
        lines += ["", *_section(letter, report)]
    lines += ["", *_skipped(report), *_failures(report), *_goals(report), _verdict(report)]
    return "\n".join(line.rstrip() for line in lines)


def aligned(rows: Rows) -> list[str]:
    """Columns as wide as their longest cell, the first to the left, the others to the right."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _section(letter: str, report: Report) -> list[str]:
    records = report.records.get(letter, {})
    counts = ", ".join(f"{count} {status}" for status, count in sorted(report.counts(letter).items()))
    seconds = report.seconds.get(letter)
    took = "" if seconds is None else f", {seconds:.0f} s"
    lines = [f"{letter}  {SECTIONS[letter].title}: {counts or 'nothing ran'}{took}"]
    if letter in report.crashes:
        lines.append(f"   section crashed: {report.crashes[letter].strip().splitlines()[-1]}")
    rows = ROWS[letter](records)
    if len(rows) > 1:
        lines += [f"   {line}" for line in aligned(rows)]
    return lines + [f"   {line}"[:WIDTH] for line in _launches(records)]


def _launches(records: dict[str, Record]) -> list[str]:
    return [
        f"{record.values['launches']} launches per layer: {', '.join(record.values['kernels'])}"
        for record in records.values()
        if "launches" in record.values
    ]


def _kernel_rows(records: dict[str, Record]) -> Rows:
    """The worst case of each kernel and dtype."""
    rows = [["RMS ratio, worst case", *DTYPES]]
    for kind in dict.fromkeys(key.split("/")[0] for key in records):
        cells = [kind]
        for dtype in DTYPES:
            prefix = f"{kind}/{dtype}/"
            cells.append(_worst([record for key, record in records.items() if key.startswith(prefix)]))
        rows.append(cells)
    return rows


def _worst(records: Sequence[Record]) -> str:
    measured = [record for record in records if "rms_ratio" in record.values]
    crashed = sum(record.status == "crashed" for record in records)
    if not measured:
        return f"{crashed} crashed" if crashed else "-"
    worst = max(measured, key=lambda record: float(record.values["rms_ratio"]))
    ratio = float(worst.values["rms_ratio"])
    case = worst.key.split("/")[-1][:24]
    return f"{ratio:.1e} {case}" if ratio else f"exact ({len(measured)})"


def _parity_rows(records: dict[str, Record]) -> Rows:
    rows = [["check", "result", "tokens", "error / host's"]]
    for key, record in records.items():
        values = record.values
        rows.append([key, record.status, _number(values, "tokens", "d"), _number(values, "over_host", ".3f")])
    return rows


def _attention_rows(records: dict[str, Record]) -> Rows:
    rows = [
        [
            "batch x tokens",
            "eager µs",
            "masked µs",
            "graph µs",
            "GB/s",
            "% copy",
            "eager %",
            "SDPA µs",
            "copy GB/s",
            "RMS",
        ]
    ]
    for key, record in records.items():
        kind, _, size = key.partition("/")
        if kind != "decode" or "eager_us" not in record.values:
            continue
        values = record.values
        best = "graph" if "graph_us" in values else "eager"
        cells = [
            (f"{best}_gb_per_s", ".0f"),
            (f"{best}_percent_of_copy", ".1f"),
            ("eager_percent_of_copy", ".1f"),
        ]
        rows.append(
            [
                size,
                *(_number(values, name, ".1f") for name in ("eager_us", "masked_us", "graph_us")),
                *(_number(values, name, form) for name, form in cells),
                _number(values, "sdpa_us", ".1f"),
                _number(values, "copy_gb_per_s", ".0f"),
                _number(values, "rms_ratio", ".1e"),
            ]
        )
    for key, record in records.items():
        if "rival_us" in record.values:
            values = record.values
            share = _number(values, "rival_percent_of_copy", ".1f")
            gb_per_s = _number(values, "rival_gb_per_s", ".0f")
            rows.append([key, _number(values, "rival_us", ".1f"), "", gb_per_s, share, *[""] * 4])
    return rows


def _end_to_end_rows(records: dict[str, Record]) -> Rows:
    rows = [["batch x tokens", "cache", "ms/step", "tokens/s", "peak GiB", "x dynamic"]]
    for size in dict.fromkeys(key.partition("/")[2] for key in records):
        found = {
            name: record.values[name]
            for key, record in records.items()
            if key.partition("/")[2] == size
            for name in CACHES
            if name in record.values
        }
        dynamic = found.get("dynamic", {}).get("tokens_per_s")
        for name in (name for name in CACHES if name in found):
            values = found[name]
            speedup = f"{values['tokens_per_s'] / dynamic:.2f}" if dynamic else "-"
            cells = [_number(values, "step_ms", ".2f"), _number(values, "tokens_per_s", ".1f")]
            rows.append([size, name, *cells, _number(values, "peak_gib", ".1f"), speedup])
    return rows


ROWS: dict[str, Callable[[dict[str, Record]], Rows]] = {
    "a": _kernel_rows,
    "b": _parity_rows,
    "c": _attention_rows,
    "d": _end_to_end_rows,
}


def _number(values: dict[str, Any], name: str, form: str) -> str:
    value = values.get(name)
    return "-" if value is None else format(value, form)


def _skipped(report: Report) -> list[str]:
    """Skipped items, those of one reason in one line."""
    by_reason: dict[str, list[str]] = {}
    for letter, records in report.records.items():
        for record in records.values():
            if record.status in ("skipped", "unavailable"):
                by_reason.setdefault(f"{record.status}: {record.reason}", []).append(f"{letter}:{record.key}")
    lines = [
        f"{reason[:WIDTH]}: {', '.join(keys[:MAX_LISTED])}"
        + (f" and {len(keys) - MAX_LISTED} more" if len(keys) > MAX_LISTED else "")
        for reason, keys in by_reason.items()
    ]
    return lines


def _failures(report: Report) -> list[str]:
    failures = report.failures()
    lines = [
        f"{record.status.upper()} {letter}:{record.key}: {record.reason[:WIDTH]}"
        for letter, record in failures[:MAX_LISTED]
    ]
    if len(failures) > MAX_LISTED:
        lines.append(f"and {len(failures) - MAX_LISTED} more failures")
    return lines


def _goals(report: Report) -> list[str]:
    return [f"goal {goal}" for goal in report.goals()]


def _verdict(report: Report) -> str:
    failures = len(report.failures()) + len(report.crashes)
    statuses = [record.status for records in report.records.values() for record in records.values()]
    skipped = sum(status == "skipped" for status in statuses)
    goals = report.goals()
    reached = sum(goal.state == "reached" for goal in goals)
    verdict = "ALL RIGHT" if report.finished else "BROKEN OFF"
    parts = [
        verdict if not failures else f"{failures} FAILED",
        f"{statuses.count('ok')} of {len(statuses)} items ok",
        f"{skipped} skipped",
        *([f"{reached} of {len(goals)} goals reached"] if goals else []),
        f"backend {report.settings.backend}, seed {report.settings.seed}",
        *(["dry run: no speed here means anything"] if report.settings.dry_run else []),
    ]
    return "; ".join(parts)
