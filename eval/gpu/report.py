"""Everything that a run found, kept in a JSON file that is replaced as records come."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.gpu.goals import Goal, goals_of
from eval.gpu.items import Record
from eval.gpu.settings import Settings

WRITE_EVERY_S = 2.0


@dataclass
class Report:
    """What is known so far.

    Attributes:
        settings: of the run.
        path: the JSON file.
        environment: what it runs on.
        records: section letter -> item key -> record.
        crashes: section letter -> traceback of a section that could not be begun.
        seconds: section letter -> how long it took; sections that ran at one time have the same.
        finished: whether the run came to its end.
    """

    settings: Settings
    path: Path
    environment: dict[str, Any] = field(default_factory=dict)
    records: dict[str, dict[str, Record]] = field(default_factory=dict)
    crashes: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    finished: bool = False
    _written_s: float = field(default=-WRITE_EVERY_S, repr=False)

    def add(self, letter: str, record: Record) -> None:
        """Take a record in; the file follows within seconds."""
        self.records.setdefault(letter, {})[record.key] = record
        if time.monotonic() - self._written_s >= WRITE_EVERY_S:
            self.write()

    def goals(self) -> list[Goal]:
        """The state of the goals; none in a dry run, whose sizes say nothing."""
        return [] if self.settings.dry_run else goals_of(self.records, self.settings.sections)

    def counts(self, letter: str) -> Counter[str]:
        """How many records of a section have which status."""
        return Counter(record.status for record in self.records.get(letter, {}).values())

    def failures(self) -> list[tuple[str, Record]]:
        """Section letters and records of what is wrong."""
        return [
            (letter, record)
            for letter, records in self.records.items()
            for record in records.values()
            if record.is_failure
        ]

    @property
    def exit_code(self) -> int:
        """1 if something is wrong, or crashed, or the run was broken off.

        Missed goals and skipped items do not count.
        """
        return 1 if self.failures() or self.crashes or not self.finished else 0

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "finished": self.finished,
            "exit_code": self.exit_code,
            "settings": self.settings.to_dict(),
            "environment": self.environment,
            "goals": [goal.to_dict() for goal in self.goals()],
            "sections": {
                letter: {
                    "seconds": self.seconds.get(letter),
                    "crash": self.crashes.get(letter),
                    "counts": dict(self.counts(letter)),
                    "records": [record.to_dict() for record in self.records.get(letter, {}).values()],
                }
                for letter in self.settings.sections
            },
        }

    def write(self) -> None:
        """Replace the file, at once and as a whole."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".json.part")
        draft.write_text(json.dumps(_plain(self.to_dict()), indent=1) + "\n", encoding="utf-8")
        os.replace(draft, self.path)
        self._written_s = time.monotonic()


def _plain(value: Any) -> Any:
    """The same with numbers that JSON does not have as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
