"""The contract of a task: its samples, what a cache does with them, and what that is worth."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from eval.caches import CacheEntry
from eval.core.measure import Measures
from eval.core.models import LoadedModel
from eval.core.statistics import Statistic
from eval.run.settings import Settings


@dataclass(frozen=True)
class Sample:
    """One question to a model, and the answer it is scored against."""

    id: str  # names it in the outputs
    prompt: str  # text, as a chat user would write it
    reference: str = ""  # the answer
    facts: dict[str, float] = field(default_factory=dict)  # what else is known of it, by name


@dataclass(frozen=True)
class Unit:
    """Samples that a cache serves together: the smallest thing that is run, recorded and resumed."""

    index: int  # its place among the units of the task, the same in every process
    label: str  # for the progress bar
    samples: tuple[Sample, ...]  # in order
    inputs: Any  # what the task prepared for them, the same for every cache


@dataclass(frozen=True)
class Answer:
    """What came of one sample."""

    id: str  # of the sample
    text: str = ""  # the answer, if it is one
    reference: str = ""  # what it is scored against
    tokens: tuple[int, ...] = ()  # ids of the answer, up to and including the end-of-sequence token
    values: dict[str, float] = field(default_factory=dict)  # numbers by name


@dataclass(frozen=True)
class Outcome:
    """One unit with one cache. `problem` says why there are no answers."""

    answers: tuple[Answer, ...] = ()
    measures: Measures | None = None
    problem: str | None = None
    failed: bool = False


@dataclass(frozen=True)
class MetricSpec:
    """A metric of a task."""

    key: str  # for programs
    label: str  # for people
    unit: str  # `%`, `nats`, `tokens`, or nothing
    statistic: Callable[[Sequence[Answer]], Statistic]  # makes the statistic of some answers
    higher_is_better: bool = True  # which way is up
    resolution: float = 0.0  # differences up to this are those of sums in another order; they count as none


def mean_of(name: str, factor: float = 1.0) -> Callable[[Sequence[Answer]], Statistic]:
    """The mean of one of the answers' values, times a factor."""

    def make(answers: Sequence[Answer]) -> Statistic:
        values = factor * np.array([answer.values[name] for answer in answers])
        return lambda indices: float(values[indices].mean())

    return make


class Task(ABC):
    """A registry entry; see the module for the words."""

    name: ClassVar[str]  # what `--tasks` and the table call it
    title: ClassVar[str]  # one line for the report
    # the first is the main one; none if only time and memory are looked at
    metrics: ClassVar[tuple[MetricSpec, ...]] = ()
    # the metric that is also computed against the default cache's own answers
    agreement: ClassVar[MetricSpec | None] = None
    needs_chat: ClassVar[bool] = False  # whether prompts go through the tokenizer's chat template
    takes_dataset: ClassVar[bool] = False  # whether `--dataset` can give it texts
    is_timed: ClassVar[bool] = False  # whether its times are its result: then it runs alone, in one process

    @abstractmethod
    def units(self, loaded: LoadedModel, settings: Settings) -> list[Unit]:
        """All that is to be run, the same in every process, for every cache; or a `UsageError`."""

    @abstractmethod
    def run(self, loaded: LoadedModel, unit: Unit, entry: CacheEntry, reference: Any) -> Outcome:
        """Run a unit with a fresh cache, given what `reference` gave for it; raises `CacheUnavailable`."""

    def reference(self, loaded: LoadedModel, unit: Unit) -> Any:
        """What every contender of a unit is held against, if the task needs more than answers."""
        return None

    def details(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        """Fields of a `Row` that only this task fills."""
        return {}
