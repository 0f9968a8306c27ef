"""BLEU."""

from __future__ import annotations

import sacrebleu

from eval.metrics.base import TextMetric


class Bleu(TextMetric):
    """Corpus BLEU-4 with sacrebleu's defaults: 13a tokenisation, exponential smoothing."""

    description = "corpus BLEU in percent (sacrebleu)"
    citation = "Post, M. (2018). A Call for Clarity in Reporting BLEU Scores."

    def score(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        """Return `bleu`."""
        return {"bleu": float(sacrebleu.corpus_bleu(predictions, [references]).score)}
