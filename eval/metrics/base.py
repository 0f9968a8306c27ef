"""What the metrics share: one prediction and one reference a sample, both strings, kept in memory."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate


class TextMetric(evaluate.Metric):  # type: ignore[misc]  # evaluate ships no types
    """An `evaluate.Metric` over (prediction, reference) strings. Subclasses set the texts and `score`."""

    description = ""
    citation = ""

    def __init__(self) -> None:
        super().__init__(keep_in_memory=True)

    def score(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        """Return percentages by name for equally long, non-empty lists."""
        raise NotImplementedError

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=self.description,
            citation=self.citation,
            inputs_description="predictions, references: lists of strings of one length",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return self.score(list(predictions), list(references))
