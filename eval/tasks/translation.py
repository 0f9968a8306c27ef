"""Translate a software description from English to French; scored by BLEU and chrF."""

from __future__ import annotations

from typing import ClassVar

from eval.data_source import DATA_DIR, Source
from eval.metrics import resampled

from .base import MetricSpec
from .texts import TextTask


class Translation(TextTask):
    """Descriptions of software in English, and the French that translators wrote for them."""

    name = "translation"
    title = "software descriptions from English to French"
    source: ClassVar[Source] = Source(
        str(DATA_DIR / "translation_en_fr.jsonl"), {"id": "id", "input": "en", "reference": "fr"}
    )
    instruction = "Translate the following English text to French:\n\n{input}"
    max_new_tokens = 96
    metrics = (
        MetricSpec("chrf", "chrF", "%", resampled.chrf),
        MetricSpec("bleu", "BLEU", "%", resampled.bleu),
    )
    agreement = metrics[0]
