"""The files of `eval/results/`, and rows looked up in them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from eval.errors import UsageError
from eval.rows import Run

FOLDER = Path(__file__).resolve().parents[1] / "results"


class Results:
    """A folder of JSON files, each read once.

    A file holds `environment` and `results`: tables with a name under `bench` and their `rows`.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder = folder
        self.document = cache(self._read)

    def _read(self, file: str) -> dict[str, Any]:
        try:
            return dict(json.loads((self.folder / file).read_text(encoding="utf-8")))
        except OSError as error:
            raise UsageError(f"cannot read {self.folder / file}: {error.strerror}") from error
        except ValueError as error:
            raise UsageError(f"{self.folder / file} is no JSON object: {error}") from error

    def row(self, file: str, bench: str, **cells: object) -> dict[str, Any]:
        """The one row of a table in a file that has these cells.

        Raises:
            UsageError: The file cannot be read, or no row or several have them.
        """
        found = [
            row
            for result in self.document(file).get("results", [])
            if result.get("bench") == bench
            for row in result["rows"]
            if all(row.get(key) == value for key, value in cells.items())
        ]
        if len(found) != 1:
            asked = ", ".join(f"{key}={value!r}" for key, value in cells.items())
            raise UsageError(f"{file}: {len(found)} rows of {bench!r} with {asked}, instead of one")
        return dict(found[0])

    def run(self, file: str) -> Run:
        """What a call of `python -m eval` found.

        Raises:
            UsageError: The file cannot be read.
        """
        from eval import report

        return report.read(self.folder / file)
