"""Metrics of answers as statistics that a bootstrap can resample; libraries are imported when one is made."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from eval.core.statistics import Statistic
from eval.tasks.base import Answer

_VARIANTS = ("rouge1", "rouge2", "rougeL")


def rouge(variant: str) -> Callable[[Sequence[Answer]], Statistic]:
    """The mean F-measure in percent of `rouge1`, `rouge2` or `rougeL`, stemmed (Lin 2004)."""

    def make(answers: Sequence[Answer]) -> Statistic:
        values = np.array([_rouge(answer.reference, answer.text)[variant] for answer in answers])
        return lambda indices: float(values[indices].mean())

    return make


def bleu(answers: Sequence[Answer]) -> Statistic:
    """Corpus BLEU-4 in percent with sacrebleu's defaults (Post 2018)."""
    from sacrebleu.metrics.bleu import BLEU

    return _corpus(BLEU(), answers)


def chrf(answers: Sequence[Answer]) -> Statistic:
    """Corpus chrF2 in percent with sacrebleu's defaults: n-grams up to 6, no words (Popović 2015)."""
    from sacrebleu.metrics.chrf import CHRF

    return _corpus(CHRF(), answers)


@functools.cache
def _rouge(reference: str, prediction: str) -> dict[str, float]:
    from rouge_score.rouge_scorer import RougeScorer

    scores = RougeScorer(_VARIANTS, use_stemmer=True).score(reference, prediction)
    return {variant: 100 * score.fmeasure for variant, score in scores.items()}


def _corpus(metric: Any, answers: Sequence[Answer]) -> Statistic:
    # The two steps of `corpus_score`, which is all that sacrebleu offers publicly; its own significance tests
    # take them apart in the same way.
    counts = metric._extract_corpus_statistics([a.text for a in answers], [[a.reference for a in answers]])
    return lambda indices: float(metric._aggregate_and_compute([counts[index] for index in indices]).score)
