"""Translate a software description from English to French; scored by BLEU and chrF."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from eval.tasks.base import DATA_DIR, Task


@dataclass(frozen=True)
class Translation(Task):
    """Descriptions of software in English, and the French that translators wrote for them."""

    name: str = "translation"
    data_file: Path = DATA_DIR / "translation_en_fr.jsonl"
    id_column: str = "id"
    input_column: str = "en"
    reference_column: str = "fr"
    instruction: str = "Translate the following English text to French:\n\n{input}"
    max_new_tokens: int = 96
    metrics: ClassVar[str] = "BLEU/chrF"
    metric_keys: ClassVar[tuple[str, ...]] = ("bleu", "chrf")

    def score(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        """Return corpus BLEU and corpus chrF."""
        from eval.metrics import Bleu, Chrf

        texts = {"predictions": predictions, "references": references}
        return {**Bleu().compute(**texts), **Chrf().compute(**texts)}
