"""Everything that a run found, kept in a JSON file that is replaced as records come, and its tables."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from eval.bench.layers import attention_step
from eval.bench.models import generate_steps
from eval.core import table
from eval.core.results import document, to_json
from eval.core.table import Column, Result, Row, fixed
from eval.gpu.plan import SECTIONS, Record, Settings

SAY_EVERY_S = 5.0
MAX_LISTED = 12  # failures, and skipped items, that are listed; the file has all
MAX_CHARS = 160
DTYPES = ("float32", "bfloat16", "float16")


@dataclass
class Report:
    """What is known so far, said as it comes."""

    settings: Settings  # of the run
    path: Path  # the JSON file
    environment: dict[str, Any] = field(default_factory=dict)  # what it runs on
    # by the letter of a section:
    records: dict[str, dict[str, Record]] = field(default_factory=dict)  # by the key of the item
    crashes: dict[str, str] = field(default_factory=dict)  # the traceback, if it could not be begun
    expected: dict[str, int] = field(default_factory=dict)  # how many items it has
    seconds: dict[str, float] = field(default_factory=dict)  # that of all that ran at one time
    finished: bool = False  # whether the run came to its end
    _started_s: float = field(default_factory=time.monotonic, repr=False)
    _said_s: float = field(default=0.0, repr=False)

    def say(self, text: str) -> None:
        """Print a line with the time."""
        print(f"[{time.monotonic() - self._started_s:4.0f} s] {text}", flush=True)

    def crash(self, letter: str, error: str) -> None:
        """Note that a section could not be begun."""
        self.crashes[letter] = error
        self.say(f"section {letter} crashed: {error.strip().splitlines()[-1]}")

    def add(self, letter: str, record: Record) -> None:
        """Take a record in. Failures are said at once, the rest every few seconds, as the file is written."""
        self.records.setdefault(letter, {})[record.key] = record
        if record.is_failure:
            self.say(f"{letter}:{record.key} {record.status}: {record.reason[:MAX_CHARS]}")
        if time.monotonic() - self._said_s >= SAY_EVERY_S:
            self._said_s = time.monotonic()
            done = (f"{name} {len(self.records.get(name, {}))}/{n}" for name, n in self.expected.items())
            self.say(f"{', '.join(done)}; last {letter}:{record.key} ({record.seconds:.1f} s)")
            self.write()

    def failures(self) -> list[str]:
        """What is wrong, a line each."""
        return [
            *(f"section {x} crashed: {why.strip().splitlines()[-1]}" for x, why in self.crashes.items()),
            *(
                f"{record.status.upper()} {letter}:{record.key}: {record.reason[:MAX_CHARS]}"
                for letter, records in self.records.items()
                for record in records.values()
                if record.is_failure
            ),
        ]

    @property
    def exit_code(self) -> int:
        """1 if something is wrong, crashed or broken off; missed numbers and skipped items do not count."""
        return 1 if self.failures() or not self.finished else 0

    def results(self) -> list[Result]:
        """A table for each section that was asked for."""
        return [_result(letter, self) for letter in self.settings.sections]

    def write(self) -> None:
        """Replace the file, at once and as a whole."""
        sections = {
            letter: {
                "seconds": self.seconds.get(letter),
                "crash": self.crashes.get(letter),
                "counts": dict(_counts(self.records.get(letter, {}))),
                "records": [record.to_dict() for record in self.records.get(letter, {}).values()],
            }
            for letter in self.settings.sections
        }
        more = {"finished": self.finished, "exit_code": self.exit_code, "sections": sections}
        results = [result.to_dict() for result in self.results()]
        content = document(self.environment, asdict(self.settings), results, **more)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".json.part")
        draft.write_text(to_json(content, indent=1) + "\n", encoding="utf-8")
        os.replace(draft, self.path)

    def show(self, console: Console) -> None:
        """Print the tables, what was skipped, what failed, and the outcome, what matters most at the end."""
        results, failures = self.results(), self.failures()
        for result in results:
            if result.rows:
                table.show(console, result)
        counts = sum(map(_counts, self.records.values()), Counter[str]())
        outcome = (
            f"{len(failures)} FAILED" if failures else "ALL RIGHT" if self.finished else "BROKEN OFF",
            f"{counts['ok']} of {counts.total()} items ok",
            f"{counts['skipped']} skipped",
            f"backend {self.settings.backend}, seed {self.settings.seed}",
            *(["dry run: no speed here means anything"] if self.settings.dry_run else []),
        )
        required = [table.summary(results)] if any(r.bounds for x in results for r in x.rows) else []
        more = [f"and {len(failures) - MAX_LISTED} more failures"] if len(failures) > MAX_LISTED else []
        for line in (*self._skipped(), *failures[:MAX_LISTED], *more, *required, "; ".join(outcome)):
            console.print(line, highlight=False, markup=False)

    def _skipped(self) -> Iterator[str]:
        """Skipped items, those of one reason in one line."""
        by_reason: dict[str, list[str]] = {}
        for letter, records in self.records.items():
            for record in records.values():
                if record.status in ("skipped", "unavailable"):
                    reason = f"{record.status}: {record.reason}"[:MAX_CHARS]
                    by_reason.setdefault(reason, []).append(f"{letter}:{record.key}")
        for reason, keys in by_reason.items():
            more = f" and {len(keys) - MAX_LISTED} more" if len(keys) > MAX_LISTED else ""
            yield f"{reason}: {', '.join(keys[:MAX_LISTED])}{more}"


def _counts(records: dict[str, Record]) -> Counter[str]:
    return Counter(record.status for record in records.values())


def _result(letter: str, report: Report) -> Result:
    records = report.records.get(letter, {})
    counts = ", ".join(f"{count} {status}" for status, count in sorted(_counts(records).items()))
    title = f"{SECTIONS[letter].title}: {counts or 'nothing ran'}"
    name, parts = _TABLES[letter]
    return Result(name, title, *parts(records), report.seconds.get(letter, 0.0))


_Parts = tuple[tuple[Column, ...], list[Row], tuple[str, ...]]


def _kernels(records: dict[str, Record]) -> _Parts:
    """The worst case of each kernel and dtype."""
    columns = (Column("kernel", "RMS ratio, worst case"), *table.plain(*DTYPES))
    found: dict[str, dict[str, list[Record]]] = {}
    for key, record in records.items():
        kind, *parts = key.split("/")
        dtype = next(part for part in parts if part in DTYPES)
        found.setdefault(kind, {}).setdefault(dtype, []).append(record)
    rows = [
        Row({"kernel": kind, **{dtype: _worst(of_dtype) for dtype, of_dtype in by_dtype.items()}})
        for kind, by_dtype in found.items()
    ]
    return columns, rows, ()


def _worst(records: Sequence[Record]) -> str | None:
    measured = [record for record in records if "rms_ratio" in record.values]
    crashed = sum(record.status == "crashed" for record in records)
    if not measured:
        return f"{crashed} crashed" if crashed else None
    worst = max(measured, key=lambda record: float(record.values["rms_ratio"]))
    ratio = float(worst.values["rms_ratio"])
    case = next(part for part in reversed(worst.key.split("/")) if part not in DTYPES)[:24]
    return f"{ratio:.1e} {case}" if ratio else f"exact ({len(measured)})"


def _parity(records: dict[str, Record]) -> _Parts:
    columns = *table.plain("check", "result", "tokens"), Column("over_host", "error / host's", fixed(3))
    rows = [Row({"check": key, "result": record.status, **record.values}) for key, record in records.items()]
    return columns, rows, ()


def _bench(columns: tuple[Column, ...], notes: tuple[str, ...], records: dict[str, Record]) -> _Parts:
    launches = (
        f"{record.values['launches']} launches per layer: {', '.join(record.values['kernels'])}"
        for record in records.values()
        if "launches" in record.values
    )
    return columns, [row for record in records.values() for row in record.rows], (*notes, *launches)


# Letter of a section -> the name of its table, and what fills that.
_TABLES: dict[str, tuple[str, Callable[[dict[str, Record]], _Parts]]] = {
    "a": ("a", _kernels),
    "b": ("b", _parity),
    "c": ("kernels", partial(_bench, attention_step.KERNEL_COLUMNS, attention_step.KERNEL_NOTES)),
    "d": ("generate", partial(_bench, generate_steps.COLUMNS, generate_steps.NOTES)),
}
