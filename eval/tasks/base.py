"""What a task is: where its data lie, how a sample becomes a prompt, how answers are scored."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from eval.errors import UsageError

DATA_DIR = Path(__file__).resolve().parent.parent / "data"


@dataclass(frozen=True)
class Sample:
    """One prompt as a chat user would write it, and the answer it is scored against."""

    id: str
    prompt: str
    reference: str


@dataclass(frozen=True)
class Task:
    """A data set of (input, reference) texts and what to do with it.

    Attributes:
        name: what `--tasks` and the table call it.
        data_file: a JSON-lines file.
        id_column: names the sample in the outputs.
        input_column: fills `{input}` of `instruction`.
        reference_column: the text that answers are scored against.
        instruction: the user's message.
        max_new_tokens: default length of an answer.
        metrics: label of the metrics, in the order of `metric_keys`; for people.
        metric_keys: the keys `score` returns.
    """

    name: str
    data_file: Path
    id_column: str
    input_column: str
    reference_column: str
    instruction: str
    max_new_tokens: int
    metrics: ClassVar[str] = ""
    metric_keys: ClassVar[tuple[str, ...]] = ()

    def load(self, limit: int, seed: int) -> list[Sample]:
        """Return `limit` samples (or all, when there are fewer), chosen by `seed`, the same for every cache.

        Raises:
            UsageError: when the file or one of the columns is missing; names the columns there are.
        """
        rows = self._read()
        chosen = rows.shuffle(seed=seed).select(range(min(limit, len(rows))))
        return [self._sample(row) for row in chosen]

    def score(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        """Return the metrics of `metric_keys`, in percent."""
        raise NotImplementedError

    def _sample(self, row: dict[str, Any]) -> Sample:
        text, reference = str(row[self.input_column]), str(row[self.reference_column])
        return Sample(str(row[self.id_column]), self.instruction.format(input=text), reference)

    def _read(self) -> Any:
        # Imported late: it takes seconds, and a mistake in the settings should not.
        import datasets

        datasets.disable_progress_bars()
        if not self.data_file.is_file():
            raise UsageError(f"the data file of task {self.name!r} is missing: {self.data_file}")
        rows = datasets.load_dataset("json", data_files=str(self.data_file), split="train")
        wanted = (self.id_column, self.input_column, self.reference_column)
        missing = [column for column in wanted if column not in rows.column_names]
        if missing:
            there = ", ".join(sorted(rows.column_names))
            names = ", ".join(repr(column) for column in missing)
            raise UsageError(f"unknown column {names} in {self.data_file.name}; choose from: {there}")
        return rows
