"""Results of a run, plain numbers that JSON can hold: a row for each task and cache; questions to rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from eval.core.statistics import Spread

DEFAULT_CACHE = "dynamic"  # the cache that the others are compared with
MIB = 2**20


@dataclass(frozen=True)
class Metric:
    """One number of quality with its 95 % bootstrap confidence interval over the samples."""

    key: str  # for programs: `rouge_l`
    label: str  # for people: `ROUGE-L`
    unit: str  # `%`, `nats`, `tokens`, or nothing
    value: float
    low: float  # lower end of the interval
    high: float  # upper end
    higher_is_better: bool = True
    difference: float | None = None  # to the default cache on the same samples; None where that did not run
    # ends of its interval, the samples taken in pairs, which with too few samples to tell reaches zero
    difference_low: float | None = None
    difference_high: float | None = None

    @property
    def verdict(self) -> str | None:
        """`same`, `noise` (zero lies in the interval of the difference), `better` or `worse`; or None."""
        low, high = self.difference_low, self.difference_high
        if self.difference is None or low is None or high is None or math.isnan(self.difference + low + high):
            return None
        if low == high == 0.0:
            return "same"
        if low <= 0.0 <= high:
            return "noise"
        return "better" if (self.difference > 0.0) == self.higher_is_better else "worse"


@dataclass(frozen=True)
class HeatCell:
    """Answers of the retrieval task at one length and depth."""

    length_tokens: int  # of the text that was searched
    depth_percent: int  # where the entry lay: 0 at the beginning, 100 at the end
    exact_percent: float  # share of answers that are word for word right
    samples: int  # how many were asked


@dataclass(frozen=True)
class AtContext:
    """Speed and memory with so many tokens in the cache."""

    context_tokens: int  # of every sequence, when decoding begins
    prefill_ms: Spread  # the forward of the whole prompt
    decode_ms: Spread  # one decode step, which gives one token to every sequence
    tokens_per_s: float  # decoded tokens of all sequences in a second, at the median step
    kv_bytes: int  # keys and values held at the end
    kv_allocated_bytes: int  # memory set aside for them
    rise_bytes: int  # rise of memory above what was held before, the median of the rounds


@dataclass(frozen=True)
class Row:
    """One line of the table: a task with a cache. Where `problem` is set nothing was measured."""

    task: str  # its name
    cache: str  # its name
    samples: int = 0
    metrics: tuple[Metric, ...] = ()  # against the references; the first is the task's main one
    # These, and `bits_per_value`, compare with the default cache, and are None where that did not run.
    agreement: Metric | None = None  # the main metric with its texts as references, if answers are texts
    identical_percent: float | None = None  # share of samples whose tokens are equal
    first_divergence_tokens: float | None = None  # median place of the first other token, where there is one
    kv_bytes: int | None = None  # keys and values held at the end of a batch, the largest batch
    kv_allocated_bytes: int | None = None  # memory set aside for them, the largest batch
    bits_per_value: float | None = None  # `kv_bytes` for each number of K and V that the default cache holds
    kv_details: dict[str, Any] | None = None  # all that the cache reports, the largest batch
    peak_bytes: int | None = None  # peak memory, all included
    rise_bytes: int | None = None  # largest rise of memory during one batch
    prefill_ms: Spread | None = None  # first forwards
    decode_ms: Spread | None = None  # decode steps; a step gives one token to every sequence of the batch
    tokens_per_s: float | None = None  # decoded tokens of all sequences in a second, at the median step
    heat: tuple[HeatCell, ...] = ()  # of the retrieval task
    contexts: tuple[AtContext, ...] = ()  # of the latency task
    problem: str | None = None  # why there is nothing to show
    failed: bool = False  # the problem is an error, not something that is missing on this machine


@dataclass(frozen=True)
class Prediction:
    """What one cache answered to one sample."""

    task: str  # name of the task
    cache: str  # name of the cache
    id: str  # of the sample
    prediction: str  # the answer
    reference: str  # what it is scored against
    identical: bool | None  # whether its tokens equal the default cache's; None where that did not run


@dataclass(frozen=True)
class Run:
    """All that a run leaves behind."""

    settings: dict[str, Any]  # what was asked for, as JSON writes it
    source: str  # where the model's weights came from
    environment: dict[str, Any]  # see `eval.core.device.describe`
    memory_method: str  # what the peak memory numbers are
    seconds: float  # wall time of this call, the model's loading included
    processes: int  # how many shared the samples
    rows: list[Row]  # the table
    predictions: list[Prediction]  # every answer of every cache
    titles: dict[str, str] = field(default_factory=dict)  # name of a cache -> one line about it


def by_task(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each task, both in the order they come in."""
    tasks: dict[str, list[Row]] = {}
    for row in rows:
        tasks.setdefault(row.task, []).append(row)
    return tasks


def default_row(rows: Sequence[Row]) -> Row | None:
    """Return the default cache's row among those of one task; None where it was not measured."""
    return next((row for row in rows if row.cache == DEFAULT_CACHE and row.problem is None), None)


def shared_context(rows: Sequence[Row]) -> int | None:
    """Return the most tokens at which every measured row of one task has numbers; None: at no such length."""
    measured = [{at.context_tokens for at in row.contexts} for row in rows if row.problem is None]
    return max(set.intersection(*measured), default=None) if measured else None


def at_context(row: Row, context_tokens: int) -> AtContext | None:
    """Return what was measured at one length, or None."""
    return next((at for at in row.contexts if at.context_tokens == context_tokens), None)


def at_shared_context(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of one task with the speed and memory of its shared context, where it has contexts."""
    tokens, filled = shared_context(rows), []
    for row in rows:
        at = None if tokens is None else at_context(row, tokens)
        # It has a row's fields, but for the length itself.
        measured = {} if at is None else {name: x for name, x in vars(at).items() if hasattr(row, name)}
        filled.append(replace(row, **measured))
    return filled


class Problem(NamedTuple):
    """A cache that could not run, why, and in which tasks."""

    cache: str
    reason: str
    failed: bool  # it is an error, not something that is missing on this machine
    tasks: Sequence[str]  # none: every one


def problems(rows: Sequence[Row]) -> list[Problem]:
    """Return what kept caches from running, each once."""
    tasks: dict[tuple[str, str, bool], list[str]] = {}
    for row in rows:
        if row.problem is not None:
            tasks.setdefault((row.cache, row.problem, row.failed), []).append(row.task)
    every = len({row.task for row in rows})
    return [Problem(*key, () if len(names) == every > 1 else names) for key, names in tasks.items()]


def problem_lines(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each problem."""
    return [
        f"{each.cache} {'failed' if each.failed else 'is not available'}"
        f" ({', '.join(each.tasks) or 'every task'}): {each.reason}"
        for each in problems(rows)
    ]
