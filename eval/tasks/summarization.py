"""Summarise a software description in one line; scored by ROUGE."""

from __future__ import annotations

from typing import ClassVar

from eval.data_source import DATA_DIR, Source
from eval.metrics import resampled

from .base import MetricSpec
from .texts import TextTask


class Summarization(TextTask):
    """Long descriptions of software, and the one-line summaries people wrote for them."""

    name = "summarization"
    title = "summaries of software descriptions, in the words people chose"
    source: ClassVar[Source] = Source(
        str(DATA_DIR / "summarization.jsonl"), {"id": "id", "input": "document", "reference": "summary"}
    )
    instruction = "Describe the following software package in at most ten words.\n\n{input}"
    max_new_tokens = 32
    metrics = (
        MetricSpec("rouge_l", "ROUGE-L", "%", resampled.rouge("rougeL")),
        MetricSpec("rouge_1", "ROUGE-1", "%", resampled.rouge("rouge1")),
        MetricSpec("rouge_2", "ROUGE-2", "%", resampled.rouge("rouge2")),
    )
    agreement = metrics[0]
