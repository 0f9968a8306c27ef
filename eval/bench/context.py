"""The bench, and what the benches of one run share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from eval.core.table import Cell, Column, Result, Row
from eval.core.timing import Contender, Timings, interleave

if TYPE_CHECKING:
    from eval.bench.readers import Reader


@dataclass
class Context:
    """One run."""

    quick: bool = False  # fewer cases and rounds, for a look; numbers are coarse
    progress: Callable[[str], object] = lambda text: None  # told what is being measured
    _model: tuple[torch.dtype, Any, str] | None = field(default=None, repr=False)

    def budget_s(self, seconds: float) -> float:
        """Seconds to spend on rounds where a full run would spend so many."""
        return seconds / 4 if self.quick else seconds

    def rounds(self, count: int) -> int:
        """Rounds to run at least where a full run would run so many."""
        return max(2, count // 3) if self.quick else count

    @cached_property
    def bandwidth(self) -> tuple[Reader, list[Row]]:
        """The fastest reader of memory, measured once, and the rows of all."""
        from eval.bench import readers

        self.progress("read bandwidth")
        return readers.fastest(self.budget_s(3.0))

    def race(self, contenders: Sequence[Contender], seconds: float, rounds: int, **options: Any) -> Timings:
        """Time contenders and that reader, for so many seconds and rounds at least in a full run."""
        beside = [*contenders, self.bandwidth[0].contender()]
        return interleave(beside, budget_s=self.budget_s(seconds), min_rounds=self.rounds(rounds), **options)

    def cells(self, timings: Timings, name: str, read_bytes: float) -> dict[str, Cell]:
        """Bandwidth of a contender of a race that reads so many bytes in a step, and its rounds."""
        reader, _ = self.bandwidth
        return {**reader.cells(timings, name, read_bytes), "rounds": len(timings.seconds[name])}

    def model(self, dtype: torch.dtype) -> tuple[Any, str]:
        """SmolLM2-135M in `dtype` and what it is, for the notes; the last one is kept."""
        from eval.bench.models import workload

        if self._model is None or self._model[0] != dtype:
            self._model = None
            self.progress(f"loading the model in {workload.dtype_name(dtype)}")
            self._model = (dtype, *workload.load_model(dtype))
        return self._model[1:]


@dataclass(frozen=True)
class Bench:
    """Something to measure."""

    name: str  # what `--only` calls it
    title: str  # of its table
    columns: tuple[Column, ...]  # of its table
    # rows, and notes on the columns; raises `WrongAnswer` instead of telling the speed of something wrong
    measure: Callable[[Context], tuple[list[Row], tuple[str, ...]]]

    def run(self, context: Context) -> Result:
        """Its table."""
        started_s = time.perf_counter()
        rows, notes = self.measure(context)
        return Result(self.name, self.title, self.columns, rows, notes, time.perf_counter() - started_s)
