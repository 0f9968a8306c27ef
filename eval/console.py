"""What the command lines of this package share: a progress bar, and a file of results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from eval.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def progress_bar(console: Console, *, is_shown: bool = True) -> Progress:
    """A bar with the steps done and the time taken, and a description behind it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        disable=not is_shown,
    )


def write_results(path: Path, content: str, mode: str = "w") -> None:
    """Write a file.

    Raises:
        UsageError: It cannot be written.
    """
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(content)
    except OSError as error:
        raise UsageError(f"cannot write the results to {path}: {error.strerror}") from error
