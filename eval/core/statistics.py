"""Statistics of all commands, each by one rule: divergence, agreement, RMS ratio, bootstrap, percentiles."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_paged_cache.tools.profiler.step_errors import kl_divergence as kl_divergence
from hf_paged_cache.tools.profiler.step_errors import top1_agreement as top1_agreement

RESAMPLES = 1000
CONFIDENCE = 0.95
_SEED = 0

Statistic = Callable[[np.ndarray[Any, Any]], float]  # value over samples of these indices, some maybe twice


@dataclass(frozen=True)
class Spread:
    """The middle of repeated measurements, and how far they lie apart."""

    median: float  # of all
    low: float  # the 10th percentile
    high: float  # the 90th percentile
    count: int  # how many


def spread(values: Sequence[float]) -> Spread:
    """Median, 10th and 90th percentile of at least one measurement."""
    low, median, high = np.percentile(np.asarray(values, dtype=float), [10, 50, 90])
    return Spread(float(median), float(low), float(high), len(values))


def rms_ratio(got: Any, want: Any) -> float:
    """RMS of the difference over RMS of what is wanted, in float64; NaN if one tensor is not finite."""
    if not (got.isfinite().all() and want.isfinite().all()):
        return float("nan")
    got, want = got.double(), want.double()
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt())


def bootstrap_interval(statistic: Statistic, count: int) -> tuple[float, float]:
    """The percentile bootstrap's interval over `count` samples (Efron 1979); of one sample it is a point."""
    if count < 2:
        return (statistic(np.arange(count)),) * 2
    import scipy.stats

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
