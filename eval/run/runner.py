"""The run of every unit of a task with every cache, the contenders interleaved, into the journal."""

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from eval.caches import CacheEntry, CacheUnavailable
from eval.core.models import LoadedModel
from eval.run.generate import warm_up
from eval.run.journal import Journal
from eval.run.processes import Processes
from eval.tasks.base import Outcome, Task, Unit
from hf_paged_cache import disable


@dataclass
class Runner:
    """What this process does of a run: the units that are its own and not in the journal yet."""

    loaded: LoadedModel
    entries: Sequence[CacheEntry]  # the contenders
    journal: Journal
    processes: Processes
    # Told what runs, and contenders done since.
    advance: Callable[[str, int], None] = lambda label, steps: None
    warmed: set[str] = field(default_factory=set)  # names of caches that have been used before

    def run(self, task: Task, units: Sequence[Unit]) -> None:
        """Run this process's units of a task; a cache with a problem is left out from there on."""
        done, entries = self.journal.done(), self.entries
        mine = self.mine(task, units)
        left = {u.index: [e for e in entries if (task.name, u.index, e.name) not in done] for u in mine}
        self.advance(task.name, sum(len(entries) - len(waiting) for waiting in left.values()))
        problems = self._warm_up(task, left)
        for turn, unit in enumerate(mine):
            self._run_unit(task, unit, left[unit.index][:: -1 if turn % 2 else 1], problems)
        disable(self.loaded.model)

    def mine(self, task: Task, units: Sequence[Unit]) -> list[Unit]:
        """The units of a task that are this process's."""
        is_main = self.processes.is_main
        return [unit for unit in units if (is_main if task.is_timed else self.processes.share(unit.index))]

    def _warm_up(self, task: Task, left: dict[int, list[CacheEntry]]) -> set[str]:
        """Use every cache that is needed once, unmeasured; names of those that cannot run."""
        problems = set()
        for entry in self.entries:
            first = next((index for index, waiting in left.items() if entry in waiting), None)
            if first is None or entry.name in self.warmed:
                continue
            self.advance(f"{task.name} · {entry.name} · warm-up", 0)
            outcome = _attempt(warm_up, self.loaded, entry)
            if outcome is None:
                self.warmed.add(entry.name)
            else:
                problems.add(entry.name)
                self.journal.add((task.name, first, entry.name), outcome)
        return problems

    def _run_unit(self, task: Task, unit: Unit, waiting: Sequence[CacheEntry], problems: set[str]) -> None:
        # Made for the first contender that asks for it: a failure is theirs, and none is made where none run.
        reference = functools.cache(lambda: task.reference(self.loaded, unit))
        for entry in waiting:
            label = f"{task.name} · {entry.name} · {unit.label}"
            self.advance(label, 0)
            if entry.name not in problems:
                outcome = _attempt(lambda each: task.run(self.loaded, unit, each, reference()), entry)
                self.journal.add((task.name, unit.index, entry.name), outcome)
                if outcome.problem is not None:
                    problems.add(entry.name)
            self.advance(label, 1)


def _attempt(action: Callable[..., Any], *arguments: Any) -> Any:
    """What an action returns, or the `Outcome` that says why it could not."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return action(*arguments)
    except CacheUnavailable as error:
        return Outcome(problem=str(error))
    # One cache's error is its row in the table; the others' results are not thrown away for it.
    except Exception as error:
        return Outcome(problem=f"{type(error).__name__}: {' '.join(str(error).split())}", failed=True)
