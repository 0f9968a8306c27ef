"""Questions that the table, the report and the pictures all ask of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from eval.run.rows import AtContext, Row

DEFAULT_CACHE = "dynamic"
"""The cache that the others are compared with."""
MIB = 2**20


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
    tokens = shared_context(rows)
    return [_filled(row, None if tokens is None else at_context(row, tokens)) for row in rows]


def _filled(row: Row, at: AtContext | None) -> Row:
    """The row with what was measured at one length, which has a row's fields but for the length itself."""
    measured = {} if at is None else {name: value for name, value in vars(at).items() if hasattr(row, name)}
    return dataclasses.replace(row, **measured)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A cache that could not run, why, and in which tasks."""

    cache: str  # its name
    reason: str  # why
    failed: bool  # it is an error, not something that is missing on this machine
    tasks: Sequence[str]  # names; none: every one


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
