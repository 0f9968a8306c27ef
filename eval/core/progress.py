"""Progress of a long run: a bar in a terminal, and elsewhere a line every few seconds."""

import threading
import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

EVERY_S = 15.0


class Progress:
    """Steps done, of `total` if known: a bar in a terminal, elsewhere a line every `EVERY_S` seconds."""

    def __init__(self, console: Console, label: str, total: int | None = None) -> None:
        self._console = console
        self._label, self._done, self._total = label, 0, total
        columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
        is_hidden = console.quiet or not console.is_terminal
        self._bar = Bar(*columns, console=console, disable=is_hidden, transient=True)
        self._task = self._bar.add_task(label, total=total)
        self._started_s = time.monotonic()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._speak, daemon=True)

    def __enter__(self) -> Self:
        self._bar.start()
        if not self._console.is_terminal:
            self._write()
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()
        self._bar.stop()

    def update(self, label: str, steps: int = 0, *, total: int | None = None) -> None:
        """Say what is going on, how many steps were done since the last call, and how many there will be."""
        self._label, self._done, self._total = label, self._done + steps, total or self._total
        self._bar.update(self._task, description=label, completed=self._done, total=self._total)

    def _speak(self) -> None:
        while not self._end.wait(EVERY_S):
            self._write()

    def _write(self) -> None:
        elapsed_s = time.monotonic() - self._started_s
        steps = "" if self._total is None else f"{self._done}/{self._total}  "
        self._console.print(f"{elapsed_s:4.0f} s  {steps}{self._label}", highlight=False, markup=False)
