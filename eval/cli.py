"""The command line of `python -m eval`."""

from __future__ import annotations

import datetime
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from eval.console import progress_bar
from eval.errors import UsageError
from eval.settings import Settings, resolve

EXIT_FAILED = 1
EXIT_USAGE = 2

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
RUNS_DIR = Path(__file__).resolve().parent / "runs"


@app.command()
def evaluate(
    model: Annotated[str | None, typer.Option(help="smollm2, a hub id, a folder or a .gguf file.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Comma-separated names of tasks.")] = None,
    caches: Annotated[str | None, typer.Option(help="Comma-separated names of caches.")] = None,
    limit: Annotated[int | None, typer.Option(help="Samples of each task.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Prompts generated together.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest answer; default: the task's.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = None,
    seed: Annotated[int | None, typer.Option(help="Chooses the samples.")] = None,
    output: Annotated[str | None, typer.Option(help="Run folder; default: eval/runs/<timestamp>.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings; options override it.")] = None,
) -> None:
    """Compare caches: summarise and translate real texts with each, and print one table."""
    given: dict[str, Any] = {
        "model": model,
        "tasks": tasks,
        "caches": caches,
        "limit": limit,
        "batch_size": batch_size,
        "max_new_tokens": max_new_tokens,
        "dtype": dtype,
        "device": device,
        "seed": seed,
        "output": output,
    }
    try:
        failed = run(resolve(config, given))
    except UsageError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_USAGE) from error
    if failed:
        raise typer.Exit(EXIT_FAILED)


def run(settings: Settings) -> bool:
    """Run the evaluation, print the table, write the run folder; return whether a cache failed with an error.

    Raises:
        UsageError: when the model, the data or the device cannot be had.
    """
    started_s = time.monotonic()
    # Everything below takes seconds to import; a mistake in the settings is reported before that.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from rich.console import Console
    from transformers import set_seed

    from eval import caches, environment, measure, models, plots, report, runner
    from eval.tasks import TASKS

    console = Console()
    console = console if console.is_terminal else Console(width=120)
    folder = _run_folder(settings)
    described = environment.describe(models.resolve_device(settings.device))
    set_seed(settings.seed)
    work = {name: TASKS[name].load(settings.limit, settings.seed) for name in settings.tasks}
    with console.status(f"loading {settings.model}"):
        loaded = models.load(settings)
    console.print(f"{loaded.source} on {loaded.device}, {settings.dtype}; {described['cpu']}")
    entries = [caches.CACHES[name] for name in settings.caches]
    results = []
    with progress_bar(console) as progress:
        batches = sum(-(-len(samples) // settings.batch_size) for samples in work.values())
        bar = progress.add_task("", total=batches * len(entries))
        for name, samples in work.items():
            results.append(
                runner.run_task(
                    loaded,
                    TASKS[name],
                    samples,
                    entries,
                    settings,
                    lambda label, units: progress.update(bar, description=label, advance=units),
                )
            )
        progress.update(bar, description="generated")
    finished = report.Run(
        settings=settings,
        source=loaded.source,
        environment=described,
        memory_method=measure.peak_memory(loaded.device).method,
        seconds=time.monotonic() - started_s,
        rows=[row for result in results for row in result.rows],
        predictions=[prediction for result in results for prediction in result.predictions],
    )
    report.write(finished, folder, plots.draw(finished, folder))
    console.print(report.table(finished.rows, console.width))
    console.print(f"{finished.seconds:.0f} s; results.json and report.md are in {folder}", soft_wrap=True)
    return any(row.failed for row in finished.rows)


def _run_folder(settings: Settings) -> Path:
    if settings.output is not None:
        folder = Path(settings.output)
    else:
        folder = RUNS_DIR / datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the output folder {folder}: {error.strerror}") from error
    return folder


def main() -> None:
    """Run the command line; the exit code is 0, 1 (a cache failed) or 2 (a request that cannot be met)."""
    sys.exit(app())
