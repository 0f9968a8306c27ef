"""The command line of `eval/gpu_check.py`, and the run as a whole."""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from eval.gpu.budget import RESERVE_S, Budget
from eval.gpu.items import Item, Record
from eval.gpu.report import Report
from eval.gpu.sections import DRY_RUN_PHASE_WEIGHTS, PHASE_WEIGHTS, SECTIONS, items_of
from eval.gpu.settings import DEFAULT_BUDGET_S, DRY_RUN_BUDGET_S, Settings
from eval.gpu.supervisor import ROOT, Supervisor, shares_of

EXIT_USAGE = 2
MAX_JOBS = 12
SAY_EVERY_S = 5.0
FILE_NAME = "gpu_check.json"


def run(arguments: list[str]) -> int:
    """Run the command line: 0, 1 (something is wrong), 2 (a request that cannot be met)."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        settings = _settings(given)
    except ValueError as error:
        parser.error(str(error))
    if not settings.dry_run and not _has_gpu():
        print("no CUDA device here; --dry-run takes the same paths at toy sizes on the CPU", flush=True)
        return EXIT_USAGE
    return check(settings, _folder(settings) / FILE_NAME)


def check(
    settings: Settings,
    path: Path,
    *,
    items_of: Callable[[str, Settings], list[Item]] = items_of,
    supervisor: Callable[[Settings, Callable[[str, Record], None]], Supervisor] = Supervisor,
) -> int:
    """Run the sections, write the file, print the table; the exit code.

    Args:
        settings: what to run.
        path: the JSON file.
        items_of: the items of a section.
        supervisor: makes what runs them.
    """
    from eval.gpu import environment, table

    phases = _phases(settings)
    weights = DRY_RUN_PHASE_WEIGHTS if settings.dry_run else PHASE_WEIGHTS
    budget = Budget(settings.budget_s, {phase: weights[phase] for phase in phases})
    report = Report(settings, path, environment.describe(settings))
    say = Progress(budget, report)
    report.write()
    say(f"{environment.headline(report.environment)}; seed {settings.seed}, {settings.budget_s:.0f} s")
    runner = supervisor(settings, say.record)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        for phase, letters in phases.items():
            _run_phase(phase, letters, settings, budget, report, runner, say, items_of)
        report.finished = True
    except KeyboardInterrupt:
        say("interrupted; what is known so far:")
    finally:
        runner.stop()
        report.write()
        signal.signal(signal.SIGTERM, before)
    print(f"\n{table.text_of(report)}\n{budget.elapsed_s():.0f} s in all; all numbers in {path}", flush=True)
    return report.exit_code


class Progress:
    """Says what happens, and how far the run is."""

    def __init__(self, budget: Budget, report: Report) -> None:
        self._budget = budget
        self._report = report
        self._said_s = 0.0
        self.expected: dict[str, int] = {}

    def __call__(self, text: str) -> None:
        """Print a line with the time."""
        print(f"[{self._budget.elapsed_s():4.0f} s] {text}", flush=True)

    def record(self, letter: str, record: Record) -> None:
        """Take a record in. Failures are said at once, the rest every few seconds."""
        self._report.add(letter, record)
        if record.is_failure:
            self(f"{letter}:{record.key} {record.status}: {record.reason[:160]}")
        if time.monotonic() - self._said_s >= SAY_EVERY_S:
            self._said_s = time.monotonic()
            counts = [
                f"{name} {len(self._report.records.get(name, {}))}/{count}"
                for name, count in self.expected.items()
            ]
            self(f"{', '.join(counts)}; last {letter}:{record.key} ({record.seconds:.1f} s)")


def _run_phase(
    phase: str,
    letters: list[str],
    settings: Settings,
    budget: Budget,
    report: Report,
    runner: Supervisor,
    say: Progress,
    items_of: Callable[[str, Settings], list[Item]],
) -> None:
    """The sections of a phase at one time. One that cannot be begun is recorded, and the others run."""
    started_s, deadline = time.monotonic(), budget.deadline(phase)
    shares = []
    for letter in letters:
        try:
            items = items_of(letter, settings)
        except Exception:
            report.crashes[letter] = traceback.format_exc()
            say(f"section {letter} crashed: {report.crashes[letter].strip().splitlines()[-1]}")
            continue
        say.expected[letter] = len(items)
        shares += shares_of(letter, items, min(SECTIONS[letter].workers, settings.jobs))
    say(f"{phase}: sections {', '.join(letters)}, {deadline - time.time():.0f} s at most")
    runner.run(shares, deadline, settings.jobs)
    for letter in letters:
        report.seconds[letter] = round(time.monotonic() - started_s, 1)
    report.write()


def _phases(settings: Settings) -> dict[str, list[str]]:
    phases: dict[str, list[str]] = {}
    for letter, section in SECTIONS.items():
        if letter in settings.sections:
            phases.setdefault(section.phase, []).append(letter)
    return phases


def _settings(given: argparse.Namespace) -> Settings:
    letters = [letter.strip() for letter in given.sections.split(",") if letter.strip()]
    unknown = sorted(set(letters) - set(SECTIONS))
    if unknown or not letters:
        raise ValueError(f"--sections takes letters out of {', '.join(SECTIONS)}, got {given.sections!r}")
    default_s = DRY_RUN_BUDGET_S if given.dry_run else DEFAULT_BUDGET_S
    budget_s = default_s if given.budget_s is None else given.budget_s
    if not budget_s > RESERVE_S:
        raise ValueError(f"--budget-s must be above {RESERVE_S:g}, which the report takes; got {budget_s:g}")
    default_jobs = 1 if given.dry_run else max(1, min(MAX_JOBS, (os.cpu_count() or 3) - 2))
    jobs = default_jobs if given.jobs is None else given.jobs
    if jobs < 1:
        raise ValueError(f"--jobs must be a positive number of processes, got {jobs}")
    return Settings(
        dry_run=given.dry_run,
        backend=given.backend,
        seed=time.time_ns() % 2**31 if given.seed is None else given.seed,
        budget_s=budget_s,
        sections=tuple(letter for letter in SECTIONS if letter in letters),
        jobs=jobs,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_check",
        description="Check the paged kernels on this GPU against float64, then measure them. The exit code "
        "is 1 if something is wrong; goals that are missed are only reported.",
    )
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on the CPU, Triton interpreted")
    parser.add_argument(
        "--sections", default=",".join(SECTIONS), help="letters, comma-separated; default: all"
    )
    parser.add_argument("--budget-s", type=float, help=f"seconds in all (default {DEFAULT_BUDGET_S:.0f})")
    parser.add_argument("--seed", type=int, help="of all random inputs (default: the clock)")
    parser.add_argument("--backend", default="triton", help="kernels to check (default triton)")
    parser.add_argument("--jobs", type=int, help="processes at one time where nothing is timed")
    return parser


def _folder(settings: Settings) -> Path:
    """`$OUT`, or where results are kept; those of a dry run are not worth keeping."""
    kept = Path(tempfile.gettempdir()) if settings.dry_run else ROOT / "eval" / "results"
    return Path(os.environ.get("OUT") or kept)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
