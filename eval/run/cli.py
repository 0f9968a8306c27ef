"""The command line of `python -m eval run`."""

import os
from collections.abc import Callable
from dataclasses import fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer

from eval.core.console import EXIT_USAGE, EXIT_WRONG
from eval.core.errors import UsageError
from eval.run.settings import MINIMUM, Settings, resolve

EXIT_INTERRUPTED = 130

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each setting; without a default, which a file of settings may change."""

    def option(name: str, kind: Any, about: str) -> Parameter:
        annotation = Annotated[kind | None, typer.Option(help=about)]
        return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    options = [
        *(option(f.name, int if f.name in MINIMUM else str, f.metadata["help"]) for f in fields(Settings)),
        option("config", Path, "YAML file of settings; options override it."),
        option("resume", Path, "Go on with the run in this folder."),
    ]
    command.__signature__ = Signature(options)  # type: ignore[attr-defined]  # where typer looks
    command.__annotations__ = {option.name: option.annotation for option in options}
    return command


@app.command()
@_with_options
def run(config: Path | None, resume: Path | None, **options: Any) -> None:
    """Compare caches on texts: quality, memory and speed with each, in one table and a report.

    What is finished is kept: an interrupted run goes on with `--resume FOLDER`. Under `accelerate launch`
    the samples are shared among the processes.
    """
    given = {name: value for name, value in options.items() if value is not None}
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
        raise typer.Exit(EXIT_WRONG)


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
