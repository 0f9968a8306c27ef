"""How far a number of a sample of texts may lie from that of all such texts: percentile bootstrap.

Efron (1979). Differences are resampled in pairs: both caches answered the same samples.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import scipy.stats

from eval.rows import Metric
from eval.tasks.base import Answer, MetricSpec, Statistic

RESAMPLES = 1000
FEWEST_SAMPLES = 6
"""That can tell two caches apart: of five, all lie on one side by chance more often than once in 20."""
CONFIDENCE = 0.95
_SEED = 0


def metric(spec: MetricSpec, answers: Sequence[Answer], default: Sequence[Answer] | None) -> Metric:
    """A metric of one cache with its interval, and its difference to that of the default cache.

    Args:
        spec: which.
        answers: of the cache.
        default: of the default cache to the same samples in the same order; None if there are none.
    """
    mine = spec.statistic(answers)
    low, high = _interval(mine, len(answers))
    alone = Metric(
        spec.key,
        spec.label,
        spec.unit,
        mine(np.arange(len(answers))),
        low,
        high,
        spec.higher_is_better,
    )
    return alone if default is None else _compared(alone, mine, spec.statistic(default), len(answers))


def _compared(alone: Metric, mine: Statistic, theirs: Statistic, count: int) -> Metric:
    def difference(indices: Any) -> float:
        return mine(indices) - theirs(indices)

    low, high = _interval(difference, count)
    if count < FEWEST_SAMPLES:
        low, high = min(low, 0.0), max(high, 0.0)
    return replace(alone, difference=difference(np.arange(count)), difference_low=low, difference_high=high)


def _interval(statistic: Statistic, count: int) -> tuple[float, float]:
    """Of a statistic over `count` samples; of one sample nothing is known but itself."""
    if count < 2:
        value = statistic(np.arange(count))
        return value, value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a constant is a degenerate distribution, and its interval right
        found = scipy.stats.bootstrap(
            (np.arange(count),),
            statistic,
            vectorized=False,
            n_resamples=RESAMPLES,
            confidence_level=CONFIDENCE,
            method="percentile",
            rng=np.random.default_rng(_SEED),
        )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)
