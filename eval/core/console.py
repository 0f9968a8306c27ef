"""Means of all command lines: the terminal, errors in one line, a file of results."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from eval.core.errors import UsageError

EXIT_WRONG = 1
EXIT_USAGE = 2
_PACKAGES = ("torch", "transformers", "hf-paged-cache", "numpy", "triton")


def terminal() -> Console:
    """Where tables go; wide where nobody has said how wide."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # it would warn of every process that is started
    console = Console()
    return console if console.is_terminal else Console(width=160)


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turn a request that cannot be met into one line on stderr and the exit code for it."""
    try:
        yield
    except UsageError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_USAGE) from error


def header(environment: dict[str, Any], backend: str) -> str:
    """The machine, the threads and the versions, two lines."""
    versions = environment["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in _PACKAGES if versions.get(name))
    gpu = f"{environment['gpu']['name']}, " if "gpu" in environment else ""
    cores = f"{environment['cpu_count']} cores, {environment['torch_threads']} threads"
    return (
        f"{gpu}{environment['cpu']}, {cores}, "
        f"{environment['memory_bytes'] / 1e9:.0f} GB, load {environment['load_average_1_min']}\n"
        f"{environment['machine']}, Python {environment['python']}, {packages}, kernels: {backend}"
    )


def check_writable(path: Path | None) -> None:
    """Refuse a path now and not after minutes; older results stay until there are new ones."""
    if path is not None:
        write_results(path, "", mode="a")


def write_results(path: Path, content: str, mode: str = "w") -> None:
    """Write a file; `UsageError` if it cannot be written."""
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(content)
    except OSError as error:
        raise UsageError(f"cannot write the results to {path}: {error.strerror}") from error
