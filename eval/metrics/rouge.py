"""ROUGE-1, ROUGE-2 and ROUGE-L."""

from __future__ import annotations

from rouge_score.rouge_scorer import RougeScorer

from eval.metrics.base import TextMetric

VARIANTS = {"rouge1": "rouge_1", "rouge2": "rouge_2", "rougeL": "rouge_l"}


class Rouge(TextMetric):
    """Mean F-measure over the samples of shared unigrams, bigrams and longest common subsequence, stemmed."""

    description = "ROUGE F-measures in percent (rouge_score, Porter stemmer)"
    citation = "Lin, C.-Y. (2004). ROUGE: A Package for Automatic Evaluation of Summaries."

    def score(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        """Return `rouge_1`, `rouge_2` and `rouge_l`."""
        scorer = RougeScorer(list(VARIANTS), use_stemmer=True)
        scores = [scorer.score(ref, pred) for ref, pred in zip(references, predictions, strict=True)]
        return {
            name: 100 * sum(score[variant].fmeasure for score in scores) / len(scores)
            for variant, name in VARIANTS.items()
        }
