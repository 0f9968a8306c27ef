"""chrF."""

from __future__ import annotations

import sacrebleu

from eval.metrics.base import TextMetric


class Chrf(TextMetric):
    """Corpus chrF2 with sacrebleu's defaults: character n-grams up to 6, beta 2, no word n-grams."""

    description = "corpus chrF in percent (sacrebleu)"
    citation = "Popović, M. (2015). chrF: character n-gram F-score for automatic MT evaluation."

    def score(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        """Return `chrf`."""
        return {"chrf": float(sacrebleu.corpus_chrf(predictions, [references]).score)}
