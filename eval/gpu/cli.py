"""The command line of `python -m eval gpu`, and the run as a whole."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from eval.core.console import header, terminal, usage_errors
from eval.core.errors import UsageError
from eval.core.isolation import Call, Outcome, Workers
from eval.core.results import FOLDER
from eval.gpu import plan
from eval.gpu.plan import CORRECTNESS, RESERVE_S, SECTIONS, Item, Record, Settings

MAX_JOBS = 12
MAX_DEATHS = 6  # workers of one job that may die; each one means that an item took it down
GRACE_S = 10.0  # how long after its limit an item's process is killed: the item cannot stop itself
FILE_NAME = "gpu_check.json"
ALL_SECTIONS = ",".join(SECTIONS)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Run = Callable[[Settings, Sequence[Call], float, int], Generator[Outcome]]
ItemsOf = Callable[[str, Settings], list[Item]]


@app.command()
def gpu(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Toy sizes on the CPU, Triton interpreted.")
    ] = False,
    sections: Annotated[str, typer.Option(help="Letters, comma-separated; default: all.")] = ALL_SECTIONS,
    budget_s: Annotated[
        float | None, typer.Option(help=f"Seconds in all; default: {plan.DEFAULT_BUDGET_S:.0f}.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of all random inputs; default: the clock.")] = None,
    backend: Annotated[str, typer.Option(help="Kernels to check.")] = "triton",
    jobs: Annotated[int | None, typer.Option(help="Processes at one time where nothing is timed.")] = None,
) -> None:
    """Check the paged kernels on this GPU against float64, then measure them.

    The exit code is 1 if something is wrong; required numbers that are missed are only reported. Needs only
    torch, numpy, triton and transformers beside this project, and no downloads.
    """
    with usage_errors():
        settings = settings_of(dry_run, sections, budget_s, seed, backend, jobs)
        import torch

        if not dry_run and not torch.cuda.is_available():
            raise UsageError("no CUDA device here; --dry-run takes the same paths at toy sizes on the CPU")
    folder = os.environ.get("OUT") or (tempfile.gettempdir() if dry_run else FOLDER)
    raise typer.Exit(check(settings, Path(folder) / FILE_NAME))


def settings_of(
    dry_run: bool, sections: str, budget_s: float | None, seed: int | None, backend: str, jobs: int | None
) -> Settings:
    """The settings of a run, with defaults for what is not given; `UsageError` if they make no sense."""
    letters = [letter.strip() for letter in sections.split(",") if letter.strip()]
    if not letters or set(letters) - set(SECTIONS):
        raise UsageError(f"--sections takes letters out of {', '.join(SECTIONS)}, got {sections!r}")
    if budget_s is None:
        budget_s = plan.DRY_RUN_BUDGET_S if dry_run else plan.DEFAULT_BUDGET_S
    if not budget_s > RESERVE_S:
        raise UsageError(f"--budget-s must be above {RESERVE_S:g}, which the report takes; got {budget_s:g}")
    if jobs is None:
        jobs = 1 if dry_run else max(1, min(MAX_JOBS, (os.cpu_count() or 3) - 2))
    if jobs < 1:
        raise UsageError(f"--jobs must be a positive number of processes, got {jobs}")
    seed = time.time_ns() % 2**31 if seed is None else seed
    return Settings(dry_run, backend, seed, budget_s, tuple(x for x in SECTIONS if x in letters), jobs)


def in_workers(settings: Settings, calls: Sequence[Call], deadline: float, jobs: int) -> Generator[Outcome]:
    """Run items in processes that never see each other's faults."""
    from eval.gpu.worker import run_one

    environment = {"HF_PAGED_CACHE_BACKEND": settings.backend}
    if settings.dry_run:
        environment["TRITON_INTERPRET"] = "1"  # triton reads it once, when it is imported
    workers = Workers(run_one, jobs, environment=environment, max_deaths=MAX_DEATHS * jobs)
    return workers.run(calls, deadline)


def check(settings: Settings, path: Path, *, items_of: ItemsOf = plan.items_of, run: Run = in_workers) -> int:
    """Run the sections, write the file, print the tables; the exit code."""
    from eval.gpu.report import Report

    started = time.time()
    report = Report(settings, path, _environment(settings))
    described = header(report.environment, settings.backend)
    report.say(f"seed {settings.seed}, {settings.budget_s:.0f} s; {described}")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for phase, letters in plan.phases_of(settings).items():
            begun, ends = time.time(), plan.deadline(settings, phase, started + settings.budget_s - RESERVE_S)
            report.say(f"{phase}: sections {', '.join(letters)}, {ends - begun:.0f} s at most")
            report.write()
            items: dict[tuple[str, str], Item] = {}
            for letter in reversed(letters):  # what takes longest is begun first
                try:
                    found = items_of(letter, settings)
                except Exception:  # the other sections run
                    report.crash(letter, traceback.format_exc())
                else:
                    report.expected[letter] = len(found)
                    items |= {(letter, item.key): item for item in found}
            calls = [Call((settings, *key), x.limit_s + GRACE_S, x.needs_s) for key, x in items.items()]
            jobs = settings.jobs if phase == CORRECTNESS else 1
            with contextlib.closing(run(settings, calls, ends, jobs)) as outcomes:
                for outcome in outcomes:
                    _, letter, key = outcome.call.arguments
                    report.add(letter, _record_of(items[letter, key], outcome))
            report.seconds |= dict.fromkeys(letters, round(time.time() - begun, 1))
        report.finished = True
    except KeyboardInterrupt:
        report.say("interrupted; what is known so far:")
    finally:
        report.write()
        signal.signal(signal.SIGTERM, before)
    report.show(terminal())
    print(f"{time.time() - started:.0f} s in all; all numbers in {path}", flush=True)
    return report.exit_code


def _record_of(item: Item, outcome: Outcome) -> Record:
    record: Record = outcome.value or Record(item.key, optional=item.optional, seconds=outcome.seconds)
    if outcome.is_skipped:
        record.skipped = outcome.problem
    elif outcome.problem is not None:
        record.crash = f"{outcome.log}\n{outcome.problem}"
    return record


def _environment(settings: Settings) -> dict[str, Any]:
    """Machine, versions, GPU and driver, ready for JSON."""
    import torch

    from eval.core.device import describe

    driver = None
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # no such program, no such driver
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    described = describe(torch.device("cpu" if settings.dry_run else "cuda"))
    return {**described, "cuda": torch.version.cuda, "driver": driver and driver.strip()}
