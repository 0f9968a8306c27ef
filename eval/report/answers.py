"""An answer of each task by each cache; caches that answer alike share a line."""

from __future__ import annotations

from collections.abc import Sequence

from eval.report.document import Bullets, Section
from eval.rows import Prediction

_MOST_CHARACTERS = 600


def answers(predictions: Sequence[Prediction]) -> list[Section]:
    """Return a section for each task: its first sample, the reference, and what the caches answered."""
    first: dict[str, str] = {}
    for prediction in predictions:
        first.setdefault(prediction.task, prediction.id)
    return [
        Section(
            f"{task}, {sample}", [_of_sample([p for p in predictions if (p.task, p.id) == (task, sample)])]
        )
        for task, sample in first.items()
    ]


def _of_sample(predictions: Sequence[Prediction]) -> Bullets:
    caches: dict[str, list[str]] = {}
    for prediction in predictions:
        caches.setdefault(prediction.prediction, []).append(prediction.cache)
    answered = [(", ".join(names), _shown(text)) for text, names in caches.items()]
    return Bullets([("reference", _shown(predictions[0].reference)), *answered])


def _shown(text: str) -> str:
    line = " ".join(text.split()) or "(nothing)"
    left = len(line) - _MOST_CHARACTERS
    return line if left <= 0 else f"{line[:_MOST_CHARACTERS]}… ({left} more characters)"
