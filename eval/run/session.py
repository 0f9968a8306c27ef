"""One run, from loading the model to the report."""

import datetime
import time
from pathlib import Path

import yaml
from rich.console import Console
from transformers import set_seed

from eval.caches import CACHES
from eval.core import device, measure, models
from eval.core.console import write_results
from eval.core.errors import UsageError
from eval.core.models import LoadedModel
from eval.core.progress import Progress
from eval.report import files, terminal
from eval.run import runner, summary
from eval.run.journal import CONFIG, Journal, check_continues
from eval.run.processes import device_of, join
from eval.run.rows import Run
from eval.run.settings import Settings
from eval.tasks import TASKS
from eval.tasks.base import Unit

RUNS_DIR = Path(__file__).resolve().parents[1] / "runs"

Work = dict[str, list[Unit]]  # name of a task -> all its units


class Session:
    """A run in one of its processes; a `UsageError` where the device or the run folder cannot be had."""

    def __init__(self, settings: Settings) -> None:
        self._started_s = time.monotonic()
        self._settings = settings
        self._processes = join(settings.device)
        console = Console(quiet=not self._processes.is_main)
        self._console = console if console.is_terminal else Console(width=120, quiet=console.quiet)
        stamp = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        self._folder = Path(self._processes.agree(settings.output or str(RUNS_DIR / stamp)))
        with self._processes.together():
            self._device = device.resolve_device(device_of(settings.device))
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"cannot make the output folder {self._folder}: {error.strerror}") from error
            check_continues(self._folder, settings)
        self._journal = Journal(self._folder, self._processes.index)

    def run(self) -> bool:
        """Run what is left, and report; whether a cache failed with an error."""
        described = device.describe(self._device)
        with Progress(self._console, f"loading {self._settings.model}") as progress:
            with self._processes.together():
                loaded, work = self._prepare()
            about = f"{loaded.source} on {loaded.device}, {self._settings.dtype}; {described['cpu']}"
            self._console.print(about, highlight=False)
            try:
                self._work(loaded, work, progress)
            except KeyboardInterrupt:
                way_on = f"interrupted; what is finished is kept, go on with --resume {self._folder}"
                self._console.print(way_on, soft_wrap=True)
                raise
            progress.update("resampling and drawing")
            finished = self._report(loaded, work, described) if self._processes.is_main else None
        if finished is not None:
            self._console.print(terminal.table(finished.rows, self._console.width))
            written = f"results.json, report.md and report.html are in {self._folder}"
            self._console.print(f"{finished.seconds:.0f} s; {written}", soft_wrap=True, highlight=False)
        self._processes.wait()
        self._processes.close()
        return finished is not None and any(row.failed for row in finished.rows)

    def _prepare(self) -> tuple[LoadedModel, Work]:
        settings = self._settings
        set_seed(settings.seed)
        loaded = models.load(settings.model, settings.dtype, self._device)
        chats = [name for name in settings.tasks if TASKS[name].needs_chat]
        if chats and loaded.tokenizer.chat_template is None:
            others = ", ".join(name for name, task in TASKS.items() if not task.needs_chat)
            raise UsageError(
                f"the model {settings.model!r} has no chat template, which {', '.join(chats)} needs; choose "
                f"a model tuned to follow instructions, or --tasks from: {others}"
            )
        work = {name: TASKS[name].units(loaded, settings) for name in settings.tasks}
        if self._processes.is_main:
            config = yaml.safe_dump(settings.to_dict(), sort_keys=False, allow_unicode=True)
            write_results(self._folder / CONFIG, config)
        return loaded, work

    def _work(self, loaded: LoadedModel, work: Work, progress: Progress) -> None:
        """All tasks; the timed ones when nobody else is at work any more."""
        entries = [CACHES[name] for name in self._settings.caches]
        mine = runner.Runner(loaded, entries, self._journal, self._processes, progress.update)
        units = sum(len(mine.mine(TASKS[name], units)) for name, units in work.items())
        progress.update("", total=units * len(entries))
        for name in sorted(work, key=lambda name: TASKS[name].is_timed):
            if TASKS[name].is_timed:
                self._processes.wait()
            mine.run(TASKS[name], work[name])
        progress.update("done here")
        self._processes.wait()

    def _report(self, loaded: LoadedModel, work: Work, described: dict[str, object]) -> Run:
        settings = self._settings
        outcomes = self._journal.latest()
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
            rows=[row for rows, _ in found for row in rows],
            predictions=[prediction for _, predictions in found for prediction in predictions],
            titles={name: CACHES[name].title for name in settings.caches},
        )
        files.write(finished, self._folder)
        return finished
