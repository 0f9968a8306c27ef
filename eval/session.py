"""One call of `python -m eval`, from loading the model to the report."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import yaml
from rich.console import Console
from transformers import set_seed

from eval import environment, measure, models, report, runner, summary
from eval.caches import CACHES
from eval.core.console import progress_bar, write_results
from eval.errors import UsageError
from eval.journal import CONFIG, Journal, check_continues
from eval.models import LoadedModel
from eval.processes import device_of, join
from eval.rows import Run
from eval.settings import Settings
from eval.tasks import TASKS
from eval.tasks.base import Unit

T = TypeVar("T")

RUNS_DIR = Path(__file__).resolve().parent / "runs"


class Session:
    """A run in one of its processes.

    Args:
        settings: what was asked for.

    Raises:
        UsageError: there is no such device, or the run folder cannot be had.
    """

    def __init__(self, settings: Settings) -> None:
        self._started_s = time.monotonic()
        self._settings = settings
        self._processes = join(settings.device)
        is_quiet = not self._processes.is_main
        console = Console(quiet=is_quiet)
        self._console = console if console.is_terminal else Console(width=120, quiet=is_quiet)
        with self._processes.together():
            self._device = models.resolve_device(device_of(settings.device))
        self._folder = self._run_folder()
        self._journal = Journal(self._folder, self._processes.index)

    def run(self) -> bool:
        """Run what is left, and report; whether a cache failed with an error.

        Raises:
            UsageError: the model or the data cannot be had, or do not go together.
        """
        described = environment.describe(self._device)
        with self._processes.together():
            loaded, work = self._prepare()
        about = f"{loaded.source} on {loaded.device}, {self._settings.dtype}; {described['cpu']}"
        self._console.print(about, highlight=False)
        try:
            self._work(loaded, work)
        except KeyboardInterrupt:
            self._console.print(
                f"interrupted; what is finished is kept, go on with --resume {self._folder}", soft_wrap=True
            )
            raise
        finally:
            self._journal.close()
        failed = self._processes.is_main and self._report(loaded, work, described)
        self._processes.wait()
        self._processes.close()
        return failed

    def _prepare(self) -> tuple[LoadedModel, dict[str, list[Unit]]]:
        settings = self._settings
        set_seed(settings.seed)
        with self._console.status(f"loading {settings.model}"):
            loaded = models.load(settings, self._device)
        work = {name: TASKS[name].units(loaded, settings) for name in settings.tasks}
        if self._processes.is_main:
            config = yaml.safe_dump(settings.to_dict(), sort_keys=False, allow_unicode=True)
            write_results(self._folder / CONFIG, config)
        return loaded, work

    def _work(self, loaded: LoadedModel, work: dict[str, list[Unit]]) -> None:
        """All tasks; the timed ones when nobody else is at work any more."""
        entries = [CACHES[name] for name in self._settings.caches]
        in_turn = sorted(work, key=lambda name: TASKS[name].is_timed)
        with progress_bar(self._console, is_shown=self._processes.is_main) as progress:
            bar = progress.add_task("", total=self._steps(work))
            for name in in_turn:
                if TASKS[name].is_timed:
                    self._processes.wait()
                runner.run_task(
                    loaded,
                    TASKS[name],
                    work[name],
                    entries,
                    self._journal,
                    self._processes,
                    lambda label, steps: progress.update(bar, description=label, advance=steps),
                )
            progress.update(bar, description="done here")
            self._processes.wait()

    def _steps(self, work: dict[str, list[Unit]]) -> int:
        """Units times caches of this process."""
        mine = [
            unit
            for name, units in work.items()
            for unit in units
            if TASKS[name].is_timed or self._processes.share(unit.index)
        ]
        return len(mine) * len(self._settings.caches)

    def _report(self, loaded: LoadedModel, work: dict[str, list[Unit]], described: dict[str, object]) -> bool:
        settings = self._settings
        outcomes = self._journal.latest()
        with self._console.status("resampling and drawing"):
            found = [
                summary.rows_of(TASKS[name], len(work[name]), settings.caches, outcomes, settings.dtype)
                for name in settings.tasks
            ]
            finished = Run(
                settings=settings.to_dict(),
                source=loaded.source,
                environment=described,
                memory_method=measure.peak_memory(loaded.device).method,
                seconds=time.monotonic() - self._started_s,
                processes=self._processes.count,
                rows=_flat(rows for rows, _ in found),
                predictions=_flat(predictions for _, predictions in found),
                titles={name: CACHES[name].title for name in settings.caches},
            )
            report.write(finished, self._folder)
        self._console.print(report.table(finished.rows, self._console.width))
        self._console.print(
            f"{finished.seconds:.0f} s; results.json, report.md and report.html are in {self._folder}",
            soft_wrap=True,
            highlight=False,
        )
        return any(row.failed for row in finished.rows)

    def _run_folder(self) -> Path:
        stamp = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        folder = Path(self._processes.agree(self._settings.output or str(RUNS_DIR / stamp)))
        with self._processes.together():
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"cannot make the output folder {folder}: {error.strerror}") from error
            check_continues(folder, self._settings)
        return folder


def _flat(parts: Iterable[list[T]]) -> list[T]:
    return [item for part in parts for item in part]
