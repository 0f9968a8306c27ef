"""The rows of the table, from the outcomes in the journal."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, takewhile
from operator import eq
from typing import Any

import numpy as np

from eval.core.measure import Measures
from eval.core.statistics import bootstrap_interval, spread
from eval.run.journal import Key
from eval.run.rows import DEFAULT_CACHE, Metric, Prediction, Row
from eval.tasks.base import Answer, MetricSpec, Outcome, Task

FEWEST_SAMPLES = 6  # five lie on one side by chance more often than once in 20, and tell no caches apart
_BITS = {"float32": 32, "bfloat16": 16, "float16": 16}


def rows_of(
    task: Task, units: int, caches: Sequence[str], outcomes: Mapping[Key, Outcome], dtype: str
) -> tuple[list[Row], list[Prediction]]:
    """The rows of one task of so many units, and all its answers, from what the journal holds."""
    by_cache = {
        cache: [outcomes[key] for index in range(units) if (key := (task.name, index, cache)) in outcomes]
        for cache in caches
    }
    finished = {
        cache: found
        for cache, found in by_cache.items()
        if len(found) == units and all(outcome.problem is None for outcome in found)
    }
    default = finished.get(DEFAULT_CACHE)
    rows = [
        _row(task, cache, found, default, dtype) if cache in finished else _problem(task, cache, found)
        for cache, found in by_cache.items()
    ]
    predictions = [_predictions(task, cache, _answers(found), default) for cache, found in finished.items()]
    return rows, [*chain.from_iterable(predictions)]


def metric(spec: MetricSpec, answers: Sequence[Answer], default: Sequence[Answer] | None) -> Metric:
    """A metric of one cache with its interval, and its difference to the default's, samples in pairs."""
    count, mine = len(answers), spec.statistic(answers)
    every, interval = np.arange(count), bootstrap_interval(mine, count)
    alone = Metric(spec.key, spec.label, spec.unit, mine(every), *interval, spec.higher_is_better)
    if default is None:
        return alone
    theirs = spec.statistic(default)
    value = mine(every) - theirs(every)
    low, high = bootstrap_interval(lambda indices: mine(indices) - theirs(indices), count)
    if count < FEWEST_SAMPLES:
        low, high = min(low, 0.0), max(high, 0.0)
    if max(abs(value), abs(low), abs(high)) <= spec.resolution:
        value = low = high = 0.0
    return replace(alone, difference=value, difference_low=low, difference_high=high)


def _problem(task: Task, cache: str, found: Sequence[Outcome]) -> Row:
    unfinished = Outcome(problem="not all of its samples were run", failed=True)
    outcome = next((each for each in found if each.problem is not None), unfinished)
    return Row(task.name, cache, problem=outcome.problem, failed=outcome.failed)


def _row(
    task: Task, cache: str, outcomes: Sequence[Outcome], default: Sequence[Outcome] | None, dtype: str
) -> Row:
    answers = _answers(outcomes)
    theirs, agreement = None if default is None else _answers(default), None
    if task.agreement is not None and theirs is not None:
        against = [replace(mine, reference=their.text) for mine, their in zip(answers, theirs, strict=True)]
        agreement = metric(task.agreement, against, None)
    return Row(
        task=task.name,
        cache=cache,
        samples=len(answers),
        metrics=tuple(metric(spec, answers, theirs) for spec in task.metrics),
        agreement=agreement,
        bits_per_value=_bits_per_value(outcomes, default, _BITS[dtype]),
        **_same_tokens(answers, theirs),
        **_cost([outcome.measures for outcome in outcomes if outcome.measures is not None]),
        **task.details(outcomes),
    )


def _answers(outcomes: Sequence[Outcome]) -> list[Answer]:
    return [answer for outcome in outcomes for answer in outcome.answers]


def _same_tokens(answers: Sequence[Answer], theirs: Sequence[Answer] | None) -> dict[str, Any]:
    if theirs is None or not all(answer.tokens for answer in answers):
        return {}
    pairs = [(mine.tokens, their.tokens) for mine, their in zip(answers, theirs, strict=True)]
    # Tokens before the first that differs, or before the end of the shorter.
    parted = [len(list(takewhile(bool, map(eq, *pair)))) for pair in pairs if pair[0] != pair[1]]
    return {
        "identical_percent": 100 * (len(pairs) - len(parted)) / len(pairs),
        "first_divergence_tokens": float(statistics.median(parted)) if parted else None,
    }


def _bits_per_value(
    outcomes: Sequence[Outcome], default: Sequence[Outcome] | None, default_bits: int
) -> float | None:
    """Of the unit that takes the default cache the most memory."""
    if default is None:
        return None
    pairs = [
        (mine.measures.kv.used_bytes, their.measures.kv.used_bytes)
        for mine, their in zip(outcomes, default, strict=True)
        if mine.measures is not None and their.measures is not None
    ]
    used, reference = max(pairs, key=lambda pair: pair[1])
    return default_bits * used / reference if reference else None


def _cost(measures: Sequence[Measures]) -> dict[str, Any]:
    """Time and memory over all units."""
    largest = max(measures, key=lambda each: each.kv.used_bytes)
    prefills = [ms for each in measures for ms in each.prefill_ms]
    steps = [ms for each in measures for ms in each.step_ms]
    # A smaller batch than a full one has quicker steps, and they give less.
    rows = max(each.rows for each in measures)
    full = [ms for each in measures if each.rows == rows for ms in each.step_ms]
    return {
        "kv_bytes": largest.kv.used_bytes,
        "kv_allocated_bytes": max(each.kv.allocated_bytes for each in measures),
        "kv_details": largest.kv.details,
        "peak_bytes": max(each.peak_bytes for each in measures),
        "rise_bytes": max(each.rise_bytes for each in measures),
        "prefill_ms": spread(prefills) if prefills else None,
        "decode_ms": spread(steps) if steps else None,
        "tokens_per_s": 1000 * rows / statistics.median(full) if full else None,
    }


def _predictions(
    task: Task, cache: str, answers: Sequence[Answer], default: Sequence[Outcome] | None
) -> list[Prediction]:
    identical: list[bool | None] = [None] * len(answers)
    if default is not None:
        pairs = zip(answers, _answers(default), strict=True)
        identical = [answer.tokens == their.tokens for answer, their in pairs]
    return [
        Prediction(task.name, cache, answer.id, answer.text, answer.reference, is_same)
        for answer, is_same in zip(answers, identical, strict=True)
        if answer.text or answer.reference
    ]
