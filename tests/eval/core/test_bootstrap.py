from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from eval.core.statistics import Statistic, spread
from eval.run.rows import Metric
from eval.run.summary import metric
from eval.tasks.base import Answer, MetricSpec, mean_of
from eval.tasks.fidelity import Fidelity
from eval.tasks.metrics import bleu, chrf, rouge
from eval.tasks.perplexity import perplexity
from tests.eval.text_scores import METRICS, score

SPEC = MetricSpec("score", "score", "%", mean_of("score"))
PREDICTIONS = [
    "the cat sat on a mat",
    "a dog",
    "birds fly over the old house at night",
    "",
    "no match at all",
]
REFERENCES = ["the cat sat on the mat", "the dog barks", "birds fly above an old house by night", "x", "y z"]
TEXTS = [
    Answer(str(n), text, reference)
    for n, (text, reference) in enumerate(zip(PREDICTIONS, REFERENCES, strict=True))
]
EVERY = np.arange(len(TEXTS))


def _answers(scores: Sequence[float]) -> list[Answer]:
    return [Answer(str(n), values={"score": float(score)}) for n, score in enumerate(scores)]


def _compared(mine: Sequence[float], theirs: Sequence[float]) -> Metric:
    return metric(SPEC, _answers(mine), _answers(theirs))


@pytest.mark.parametrize("count", [1, 2, 40])
def test_the_interval_of_a_constant_is_the_constant(count: int) -> None:
    found = metric(SPEC, _answers([7.5] * count), None)
    assert (found.low, found.value, found.high) == (7.5, 7.5, 7.5)
    assert found.difference is found.verdict is None


def test_the_interval_of_a_normal_sample_is_that_of_the_textbook() -> None:
    scores = np.random.default_rng(0).normal(50.0, 10.0, 400)
    found = metric(SPEC, _answers(scores), None)
    half = 1.96 * scores.std(ddof=1) / math.sqrt(len(scores))
    assert found.value == pytest.approx(scores.mean())
    assert found.low == pytest.approx(scores.mean() - half, abs=0.15 * half)
    assert found.high == pytest.approx(scores.mean() + half, abs=0.15 * half)


def test_samples_are_compared_in_pairs() -> None:
    theirs = np.random.default_rng(0).normal(50.0, 30.0, 40)
    found = _compared(theirs - 1.0, theirs)
    assert (found.difference, found.difference_low, found.difference_high) == pytest.approx(
        (-1.0, -1.0, -1.0)
    )
    assert found.high - found.low > 10


SCORES = [float(n % 7) for n in range(30)]


@pytest.mark.parametrize(
    ("mine", "verdict"),
    [
        (SCORES, "same"),
        ([score + 1 + n % 2 for n, score in enumerate(SCORES)], "better"),
        ([score - 1 - n % 2 for n, score in enumerate(SCORES)], "worse"),
        ([score + (-1) ** n for n, score in enumerate(SCORES)], "noise"),
        ([math.nan, *SCORES[1:]], None),
    ],
)
def test_a_difference_is_called_by_its_name(mine: list[float], verdict: str | None) -> None:
    assert _compared(mine, SCORES).verdict == verdict


def test_less_is_better_where_the_metric_says_so() -> None:
    spec = MetricSpec("score", "score", "", mean_of("score"), higher_is_better=False)
    mine = _answers([score - 1 for score in SCORES])
    assert metric(spec, mine, _answers(SCORES)).verdict == "better"


@pytest.mark.parametrize(("count", "verdict"), [(1, "noise"), (2, "noise"), (5, "noise"), (6, "worse")])
def test_a_few_samples_on_one_side_are_noise(count: int, verdict: str) -> None:
    found = _compared([1.0] * count, [2.0] * count)
    assert found.difference == -1.0
    assert found.verdict == verdict


def test_one_sample_that_is_equal_is_the_same() -> None:
    assert _compared([3.0], [3.0]).verdict == "same"


@pytest.mark.parametrize("name", METRICS)
def test_a_text_metric_over_all_samples_is_that_of_the_library(name: str) -> None:
    import sacrebleu
    from rouge_score.rouge_scorer import RougeScorer

    def rouge_mean(variant: str) -> float:
        scorer = RougeScorer([variant], use_stemmer=True)
        found = [scorer.score(ref, pred) for ref, pred in zip(REFERENCES, PREDICTIONS, strict=True)]
        return 100 * sum(score[variant].fmeasure for score in found) / len(found)

    expected = {
        "bleu": lambda: sacrebleu.corpus_bleu(PREDICTIONS, [REFERENCES]).score,
        "chrf": lambda: sacrebleu.corpus_chrf(PREDICTIONS, [REFERENCES]).score,
        "rouge_1": lambda: rouge_mean("rouge1"),
        "rouge_2": lambda: rouge_mean("rouge2"),
        "rouge_l": lambda: rouge_mean("rougeL"),
    }[name]()
    assert score(name, PREDICTIONS, REFERENCES) == pytest.approx(expected)
    assert 0 < expected < 100


@pytest.mark.parametrize("statistic", [bleu, chrf, rouge("rougeL")])
def test_a_sample_that_is_drawn_twice_counts_twice(statistic: object) -> None:
    make: Statistic = statistic(TEXTS)  # type: ignore[operator]
    twice: Statistic = statistic([TEXTS[0], TEXTS[0], TEXTS[2]])  # type: ignore[operator]
    assert make(np.array([0, 0, 2])) == pytest.approx(twice(np.arange(3)))
    assert make(np.array([0, 0, 2])) != pytest.approx(make(EVERY))


def test_perplexity_weighs_tokens_and_not_windows() -> None:
    windows = [
        Answer("a", values={"nll": 30.0, "tokens": 10.0}),
        Answer("b", values={"nll": 10.0, "tokens": 30.0}),
    ]
    assert perplexity(windows)(np.arange(2)) == pytest.approx(math.exp(1.0))
    assert perplexity(windows)(np.array([0, 0])) == pytest.approx(math.exp(3.0))


def test_a_spread_is_the_middle_and_the_tenths() -> None:
    found = spread([*range(11)])
    assert (found.low, found.median, found.high, found.count) == (1.0, 5.0, 9.0, 11)


@pytest.mark.parametrize(("kl", "verdict"), [(4e-9, "same"), (4e-4, "worse")])
def test_a_difference_of_rounding_is_none(kl: float, verdict: str) -> None:
    spec = Fidelity.metrics[0]
    mine = [Answer(str(n), values={"kl": kl * (1 + n % 3)}) for n in range(9)]
    theirs = [Answer(str(n), values={"kl": 0.0}) for n in range(9)]
    assert metric(spec, mine, theirs).verdict == verdict
