"""The journal of a run, on disk unit by unit: an interrupted run goes on where it was.

Every process appends to a file of its own, one line a unit and cache. A line is a finished unit or a problem;
a last line that was cut off counts as nothing.
"""

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eval.core import results
from eval.core.errors import UsageError
from eval.run.settings import Settings, read_yaml
from eval.tasks.base import Outcome

CONFIG = "config.yaml"

Key = tuple[str, int, str]  # (task, index of the unit, cache)


class Journal:
    """The lines of a run folder, which exists; `process` is the number of this one."""

    def __init__(self, folder: Path, process: int = 0) -> None:
        self._folder = folder
        self._path = folder / f"journal.{process}.jsonl"

    def done(self) -> dict[Key, Outcome]:
        """What any process has finished; a problem is not finished, and will be tried again."""
        return {key: outcome for key, outcome in self.latest().items() if outcome.problem is None}

    def latest(self) -> dict[Key, Outcome]:
        """The last line of every key; a finished one is kept before a problem."""
        found: dict[Key, Outcome] = {}
        for path in sorted(self._folder.glob("journal.*.jsonl")):
            for key, outcome in _read(path):
                if key not in found or found[key].problem is not None:
                    found[key] = outcome
        return found

    def add(self, key: Key, outcome: Outcome) -> None:
        """Append a line, and see to it that it is on disk; a `UsageError` where it cannot be written."""
        line = dict(zip(("task", "unit", "cache"), key, strict=True)) | dataclasses.asdict(outcome)
        try:
            self._append(json.dumps(line, ensure_ascii=False) + "\n")
        except OSError as error:
            raise UsageError(
                f"cannot write to {self._path}: {error.strerror}; what was finished before is kept: make "
                f"room, and go on with --resume {self._folder}"
            ) from error

    def _append(self, line: str) -> None:
        with self._path.open("a+b") as file:
            # A line that was cut off must not swallow the next one.
            if file.tell():
                file.seek(-1, os.SEEK_END)
                line = line if file.read() == b"\n" else f"\n{line}"
            file.write(line.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())


def check_continues(folder: Path, settings: Settings) -> None:
    """Raise a `UsageError` that says which where the folder holds a run with other settings."""
    if not (folder / CONFIG).is_file():
        return
    before, now = read_yaml(folder / CONFIG), settings.to_dict()
    different = [
        f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
        for name in sorted({*before, *now})
        # Where a run lies is known already when it goes on.
        if name != "output" and before.get(name) != now.get(name)
    ]
    if different:
        raise UsageError(
            f"{folder} holds a run with other settings ({'; '.join(different)}): go on with it by --resume "
            f"{folder}, or choose another --output"
        )


def _read(path: Path) -> Iterator[tuple[Key, Outcome]]:
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            written: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            continue  # nothing, or cut off when the run was interrupted
        key = written.pop("task"), written.pop("unit"), written.pop("cache")
        yield key, results.build(Outcome, written)
