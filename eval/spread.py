"""Repeated measurements in three numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eval.rows import Spread


def spread(values: Sequence[float]) -> Spread:
    """Median, 10th and 90th percentile of at least one measurement."""
    low, median, high = np.percentile(np.asarray(values, dtype=float), [10, 50, 90])
    return Spread(float(median), float(low), float(high), len(values))
