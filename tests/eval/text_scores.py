"""Metrics of texts by name, over all of some predictions and references."""

from __future__ import annotations

import numpy as np

from eval.tasks.base import Answer
from eval.tasks.metrics import bleu, chrf, rouge

METRICS = {
    "rouge_1": rouge("rouge1"),
    "rouge_2": rouge("rouge2"),
    "rouge_l": rouge("rougeL"),
    "bleu": bleu,
    "chrf": chrf,
}


def score(name: str, predictions: list[str], references: list[str]) -> float:
    answers = [Answer("", *texts) for texts in zip(predictions, references, strict=True)]
    return METRICS[name](answers)(np.arange(len(answers)))
