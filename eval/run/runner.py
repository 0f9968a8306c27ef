"""The run of every unit of a task with every cache, the contenders interleaved, into the journal."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from eval.caches import CacheEntry, CacheUnavailable, restore_attention
from eval.core.models import LoadedModel
from eval.run.generate import warm_up
from eval.run.journal import Journal, Key
from eval.run.processes import Processes
from eval.tasks.base import Outcome, Task, Unit

Advance = Callable[[str, int], None]
"""Progress callback: (what is running, contenders of units done since the last call)."""


def run_task(
    loaded: LoadedModel,
    task: Task,
    units: Sequence[Unit],
    entries: Sequence[CacheEntry],
    journal: Journal,
    processes: Processes,
    advance: Advance = lambda label, steps: None,
    warmed: set[str] | None = None,
) -> None:
    """Run what is this process's to run and not in the journal yet; a cache with a problem is left out.

    A timed task belongs to the first process. The model's attention is as before afterwards. Caches that were
    used before this task need no warm-up; those that are warmed up are added to their names.
    """
    warmed = set() if warmed is None else warmed
    done = journal.done()
    mine = [unit for unit in units if (processes.is_main if task.is_timed else processes.share(unit.index))]
    left = {unit.index: [e for e in entries if (task.name, unit.index, e.name) not in done] for unit in mine}
    advance(task.name, sum(len(entries) - len(left[unit.index]) for unit in mine))
    problems = _warm_up(loaded, task, entries, left, advance, warmed)
    for name, problem in problems.items():
        first = next(unit.index for unit in mine if any(e.name == name for e in left[unit.index]))
        journal.add((task.name, first, name), problem)
    for turn, unit in enumerate(mine):
        _run_unit(loaded, task, unit, left[unit.index][:: -1 if turn % 2 else 1], problems, journal, advance)
    restore_attention(loaded.model)


def _warm_up(
    loaded: LoadedModel,
    task: Task,
    entries: Sequence[CacheEntry],
    left: dict[int, list[CacheEntry]],
    advance: Advance,
    warmed: set[str],
) -> dict[str, Outcome]:
    """Use every cache that is needed once, unmeasured; those that cannot run."""
    needed = {entry.name for waiting in left.values() for entry in waiting} - warmed
    problems = {}
    for entry in (entry for entry in entries if entry.name in needed):
        advance(f"{task.name} · {entry.name} · warm-up", 0)
        outcome = _attempt(functools.partial(_warmed, loaded, entry))
        if outcome.problem is None:
            warmed.add(entry.name)
        else:
            problems[entry.name] = outcome
    return problems


def _warmed(loaded: LoadedModel, entry: CacheEntry) -> Outcome:
    warm_up(loaded, entry)
    return Outcome()


def _run_unit(
    loaded: LoadedModel,
    task: Task,
    unit: Unit,
    waiting: Sequence[CacheEntry],
    problems: dict[str, Outcome],
    journal: Journal,
    advance: Advance,
) -> None:
    # Made for the first contender that asks for it: a failure is theirs, and none is made where none run.
    reference = functools.cache(lambda: task.reference(loaded, unit))
    for entry in waiting:
        label = f"{task.name} · {entry.name} · {unit.label}"
        advance(label, 0)
        if entry.name not in problems:
            key: Key = task.name, unit.index, entry.name
            outcome = _attempt(functools.partial(_measured, loaded, task, unit, entry, reference))
            journal.add(key, outcome)
            if outcome.problem is not None:
                problems[entry.name] = outcome
        advance(label, 1)


def _measured(
    loaded: LoadedModel, task: Task, unit: Unit, entry: CacheEntry, reference: Callable[[], Any]
) -> Outcome:
    return task.run(loaded, unit, entry, reference())


def _attempt(action: Callable[[], Outcome]) -> Outcome:
    try:
        with _quiet():
            return action()
    except CacheUnavailable as error:
        return Outcome(problem=str(error))
    # One cache's error is its row in the table; the others' results are not thrown away for it.
    except Exception as error:
        return Outcome(problem=f"{type(error).__name__}: {' '.join(str(error).split())}", failed=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
