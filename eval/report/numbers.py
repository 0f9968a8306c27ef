"""Numbers as they are written: as many digits as a reader can use, and a dash for what was not measured."""

import math
import re

from eval.core.statistics import Spread
from eval.run.rows import MIB, Metric

NOTHING = "-"


def significant(value: float | None, digits: int = 3) -> str:
    """Write `value` with so many significant digits: `78.9`, `0.0123`, `12346`, `2.1e-4`."""
    if value is None:
        return NOTHING
    if value == 0.0 or not math.isfinite(value):
        return format(value, "g")
    exponent = _exponent(value)
    if exponent < -3:
        return re.sub("e-0", "e-", f"{value:.{digits - 1}e}")
    return f"{value:.{max(0, digits - 1 - exponent)}f}"


def _exponent(value: float) -> int:
    return math.floor(math.log10(abs(value))) if value and math.isfinite(value) else 0


def mib(size_bytes: int | None) -> str:
    """Write bytes in MiB, without the unit."""
    return significant(None if size_bytes is None else size_bytes / MIB)


def ratio(value: Spread | None, default: Spread | None) -> str:
    """Write how many times the default's median a median is: `x1.12`; nothing where one is missing."""
    if value is None or default is None or default.median == 0.0:
        return ""
    return f"x{value.median / default.median:.2f}"


def spread(value: Spread | None) -> str:
    """Write the median and, between brackets, the 10th and 90th percentile."""
    if value is None:
        return NOTHING
    return f"{significant(value.median)} [{significant(value.low)}, {significant(value.high)}]"


def name(metric: Metric) -> str:
    """Write what a metric is called, with its unit."""
    return f"{metric.label} {metric.unit}".strip()


def score(metric: Metric) -> str:
    """Write the value and half the width of its interval."""
    half = (metric.high - metric.low) / 2
    # Of an error one digit is known, where the number's own digits are counted and not its decimals.
    margin = significant(half, 1) if _decimals(metric) is None else _number(metric, half)
    return f"{_number(metric, metric.value)} ±{margin}"


def interval(metric: Metric) -> str:
    """Write the value and the ends of its interval."""
    return f"{_number(metric, metric.value)} [{_number(metric, metric.low)}, {_number(metric, metric.high)}]"


def difference(metric: Metric, ends: str = "") -> str:
    """Write the difference to the default cache and what is to be made of it: `-0.31 noise`."""
    if metric.difference is None:
        return NOTHING
    text = _signed(metric, metric.difference)
    # A zero that is called worse would be a riddle.
    if not text.strip("0.") and metric.verdict in ("better", "worse"):
        text = f"{metric.difference:+.0e}".replace("e-0", "e-")
    return " ".join(filter(None, (text, ends, metric.verdict)))


def difference_interval(metric: Metric) -> str:
    """Write the difference, the ends of its interval and the verdict."""
    low, high = metric.difference_low, metric.difference_high
    if low is None or high is None:
        return difference(metric)
    return difference(metric, f"[{_signed(metric, low)}, {_signed(metric, high)}]")


def _signed(metric: Metric, value: float) -> str:
    text = _number(metric, abs(value), more_decimals=1)
    return f"{'-' if value < 0 else '+'}{text}" if float(text) else text


def _number(metric: Metric, value: float, more_decimals: int = 0) -> str:
    decimals = _decimals(metric)
    if decimals is None or not math.isfinite(value):
        return significant(value, 2)
    return f"{value:.{decimals + more_decimals}f}"


def _decimals(metric: Metric) -> int | None:
    """Return how many decimals all numbers of a metric get; None: they spread over powers of ten."""
    if metric.unit in ("%", "tokens"):
        return 1
    return None if metric.unit else min(3, max(0, 3 - _exponent(metric.value)))
