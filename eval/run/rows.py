"""Results of a run: one row for each task and cache, plain numbers that JSON can hold."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from eval.core.statistics import Spread


@dataclass(frozen=True)
class Metric:
    """One number of quality with its 95 % bootstrap confidence interval over the samples.

    Attributes:
        key: for programs: `rouge_l`.
        label: for people: `ROUGE-L`.
        unit: `%`, `nats`, `tokens`, or nothing.
        value: what was measured.
        low: lower end of the interval.
        high: upper end.
        higher_is_better: which way is up.
        difference: `value` less that of the default cache on the same samples; None where that did not run.
        difference_low: lower end of the interval of the difference, the samples taken in pairs; with too few
            samples to tell, the interval reaches as far as zero.
        difference_high: its upper end.
    """

    key: str
    label: str
    unit: str
    value: float
    low: float
    high: float
    higher_is_better: bool = True
    difference: float | None = None
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
    """Answers of the retrieval task at one length and depth.

    Attributes:
        length_tokens: of the text that was searched.
        depth_percent: where the entry lay: 0 at the beginning, 100 at the end.
        exact_percent: share of answers that are word for word right.
        samples: how many were asked.
    """

    length_tokens: int
    depth_percent: int
    exact_percent: float
    samples: int


@dataclass(frozen=True)
class AtContext:
    """Speed and memory with so many tokens in the cache.

    Attributes:
        context_tokens: of every sequence, when decoding begins.
        prefill_ms: the forward of the whole prompt.
        decode_ms: one decode step, which gives one token to every sequence.
        tokens_per_s: decoded tokens of all sequences in a second, at the median step.
        kv_bytes: keys and values held at the end.
        kv_allocated_bytes: memory set aside for them.
        rise_bytes: rise of memory above what was held before, the median of the rounds.
    """

    context_tokens: int
    prefill_ms: Spread
    decode_ms: Spread
    tokens_per_s: float
    kv_bytes: int
    kv_allocated_bytes: int
    rise_bytes: int


@dataclass(frozen=True)
class Row:
    """One line of the table: a task with a cache. Where `problem` is set nothing was measured.

    Attributes:
        task: name of the task.
        cache: name of the cache.
        samples: how many.
        metrics: against the references; the first is the task's main one. None for a task without any.
        agreement: the main metric with the default cache's own answers as references; None where that did
            not run or answers are no texts.
        identical_percent: share of samples whose tokens equal the default cache's; None where that did not
            run.
        first_divergence_tokens: median position of the first token that differs, over the samples that do.
        kv_bytes: keys and values held at the end of a batch, the largest batch.
        kv_allocated_bytes: memory set aside for them, the largest batch.
        bits_per_value: `kv_bytes` in bits for each number of K and V that the default cache holds for the
            same batch; None where that did not run.
        kv_details: all that the cache reports, the largest batch.
        peak_bytes: peak memory, all included.
        rise_bytes: largest rise of memory during one batch.
        prefill_ms: first forwards.
        decode_ms: decode steps; a step gives one token to every sequence of the batch.
        tokens_per_s: decoded tokens of all sequences in a second, at the median step.
        heat: of the retrieval task.
        contexts: of the latency task.
        problem: why there is nothing to show.
        failed: the problem is an error, not something that is missing on this machine.
    """

    task: str
    cache: str
    samples: int = 0
    metrics: tuple[Metric, ...] = ()
    agreement: Metric | None = None
    identical_percent: float | None = None
    first_divergence_tokens: float | None = None
    kv_bytes: int | None = None
    kv_allocated_bytes: int | None = None
    bits_per_value: float | None = None
    kv_details: dict[str, Any] | None = None
    peak_bytes: int | None = None
    rise_bytes: int | None = None
    prefill_ms: Spread | None = None
    decode_ms: Spread | None = None
    tokens_per_s: float | None = None
    heat: tuple[HeatCell, ...] = ()
    contexts: tuple[AtContext, ...] = ()
    problem: str | None = None
    failed: bool = False


@dataclass(frozen=True)
class Prediction:
    """What one cache answered to one sample.

    Attributes:
        task: name of the task.
        cache: name of the cache.
        id: of the sample.
        prediction: the answer.
        reference: what it is scored against.
        identical: whether its tokens equal the default cache's; None where that did not run.
    """

    task: str
    cache: str
    id: str
    prediction: str
    reference: str
    identical: bool | None


@dataclass(frozen=True)
class Run:
    """All that a run leaves behind.

    Attributes:
        settings: what was asked for, as JSON writes it.
        source: where the model's weights came from.
        environment: see `eval.core.device.describe`.
        memory_method: what the peak memory numbers are.
        seconds: wall time of this call, the model's loading included.
        processes: how many shared the samples.
        rows: the table.
        predictions: every answer of every cache.
        titles: name of a cache -> one line about it.
    """

    settings: dict[str, Any]
    source: str
    environment: dict[str, Any]
    memory_method: str
    seconds: float
    processes: int
    rows: list[Row]
    predictions: list[Prediction]
    titles: dict[str, str] = field(default_factory=dict)
