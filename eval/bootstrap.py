"""How far a number of a sample of texts may lie from that of all such texts: percentile bootstrap.

Efron (1979). Differences are resampled in pairs: both caches answered the same samples.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import scipy.stats  # type: ignore[import-untyped]  # scipy ships no types

from eval.rows import Metric
from eval.tasks.base import Answer, MetricSpec, Statistic

RESAMPLES = 1000
CONFIDENCE = 0.95
_SEED = 0


def metric(spec: MetricSpec, answers: Sequence[Answer], default: Sequence[Answer] | None) -> Metric:
    """A metric of one cache with its interval, and its difference to that of the default cache.

    Args:
        spec: which.
        answers: of the cache.
        default: of the default cache to the same samples in the same order; None if there are none.
    """
    samples = np.arange(len(answers))
    mine = spec.statistic(answers)
    low, high = _interval(mine, len(answers))
    result = {
        "key": spec.key,
        "label": spec.label,
        "unit": spec.unit,
        "value": mine(samples),
        "low": low,
        "high": high,
        "higher_is_better": spec.higher_is_better,
    }
    if default is None:
        return Metric(**result)
    theirs = spec.statistic(default)
    return Metric(**result, **_difference(mine, theirs, len(answers)))


def _difference(mine: Statistic, theirs: Statistic, count: int) -> dict[str, float]:
    low, high = _interval(lambda indices: mine(indices) - theirs(indices), count)
    samples = np.arange(count)
    return {
        "difference": mine(samples) - theirs(samples),
        "difference_low": low,
        "difference_high": high,
    }


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
