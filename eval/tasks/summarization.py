"""Summarise a software description in one line; scored by ROUGE."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from eval.tasks.base import DATA_DIR, Task


@dataclass(frozen=True)
class Summarization(Task):
    """Long descriptions of software, and the one-line summaries people wrote for them."""

    name: str = "summarization"
    data_file: Path = DATA_DIR / "summarization.jsonl"
    id_column: str = "id"
    input_column: str = "document"
    reference_column: str = "summary"
    instruction: str = "Describe the following software package in at most ten words.\n\n{input}"
    max_new_tokens: int = 32
    metrics: ClassVar[str] = "ROUGE-1/2/L"
    metric_keys: ClassVar[tuple[str, ...]] = ("rouge_1", "rouge_2", "rouge_l")

    def score(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        """Return ROUGE-1, ROUGE-2 and ROUGE-L."""
        from eval.metrics import Rouge

        result: dict[str, float] = Rouge().compute(predictions=predictions, references=references)
        return result
