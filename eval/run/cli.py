"""The command line of `python -m eval run`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from eval.core.errors import UsageError
from eval.run.settings import Settings, resolve

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(
    model: Annotated[str | None, typer.Option(help="smollm2, a hub id, a folder or a .gguf file.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Comma-separated names of tasks, or all.")] = None,
    caches: Annotated[str | None, typer.Option(help="Comma-separated names of caches, or all.")] = None,
    limit: Annotated[int | None, typer.Option(help="Samples of each task.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Prompts generated together.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest answer; default: the task's.")] = None,
    contexts: Annotated[
        str | None, typer.Option(help="Comma-separated lengths for retrieval, perplexity and latency.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, float16; or fp32, bf16, fp16.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = None,
    seed: Annotated[int | None, typer.Option(help="Chooses the samples.")] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="cnn_dailymail, xsum, wmt16, any name of `datasets`, or a file; for one task."),
    ] = None,
    dataset_config: Annotated[str | None, typer.Option(help="Configuration of the data set.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of the data set; default: test.")] = None,
    id_column: Annotated[str | None, typer.Option(help="Column that names a sample.")] = None,
    input_column: Annotated[str | None, typer.Option(help="Column of texts; a dot goes inside.")] = None,
    reference_column: Annotated[str | None, typer.Option(help="Column of the right answers.")] = None,
    instruction: Annotated[str | None, typer.Option(help="The user's message, with {input} in it.")] = None,
    output: Annotated[str | None, typer.Option(help="Run folder; default: eval/runs/<timestamp>.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings; options override it.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
) -> None:
    """Compare caches on texts: quality, memory and speed with each, in one table and a report.

    What is finished is kept: an interrupted run goes on with `--resume FOLDER`. Under `accelerate launch`
    the samples are shared among the processes.
    """
    options = {name: value for name, value in locals().items() if value is not None}
    given = {name: value for name, value in options.items() if name not in ("config", "resume")}
    try:
        settings = _settings(config, given, resume)
        # What follows takes seconds to import; a mistake in the settings is reported before that.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from eval.run.session import Session

        failed = Session(settings).run()
    except UsageError as error:
        _tell(error)
        raise typer.Exit(EXIT_USAGE) from error
    except KeyboardInterrupt as stop:
        raise typer.Exit(EXIT_INTERRUPTED) from stop
    if failed:
        raise typer.Exit(EXIT_FAILED)


def _settings(config: Path | None, given: dict[str, Any], resume: Path | None) -> Settings:
    if resume is None:
        return resolve(config, given)
    from eval.run.journal import CONFIG

    if extra := [*given, *(["config"] if config is not None else [])]:
        raise UsageError(f"--resume goes on with the settings of its folder; leave away: {', '.join(extra)}")
    if not (resume / CONFIG).is_file():
        raise UsageError(f"there is no run in {resume}: it has no {CONFIG}; give the folder of a run")
    return resolve(resume / CONFIG, {"output": str(resume)})


def _tell(error: UsageError) -> None:
    """Say it once, where every process has come to it, and before the first one leaves: that ends all."""
    from eval.run.processes import join

    processes = join("cpu")
    if processes.is_main:
        typer.echo(f"error: {error}", err=True)
    processes.wait()
    processes.close()
