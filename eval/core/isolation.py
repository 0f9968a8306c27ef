"""Work in processes of its own: what a call costs, breaks or hangs is its own alone.

A worker is a process in a group of its own that makes one call after another. One that dies or is late is
killed with all that it has started, and another goes on with the rest.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

NO_TIME = "no time"
LOG_TAIL_CHARS = 1500
_PATIENCE_S = 2.0
_READY, _EVENT, _DONE, _LAST, _FAILED = "ready", "event", "done", "last", "failed"


@dataclass(frozen=True)
class Call:
    """Something to do in a worker."""

    arguments: tuple[Any, ...]  # of the function
    limit_s: float = math.inf  # it is given up after so long
    needs_s: float = 0.0  # it is not begun with less time than this


@dataclass(frozen=True)
class Outcome:
    """What came of a call."""

    call: Call  # which one
    value: Any = None  # what the function returned
    problem: str | None = None  # why there is no value, in one line, or None
    is_skipped: bool = False  # nothing is known against the call: it was not made, or stopped at the deadline
    exit_code: int | None = None  # of a worker that died of it
    log: str = ""  # the last of what the worker printed, and the traceback of an error
    seconds: float = 0.0  # how long it took


@dataclass(frozen=True)
class Last:
    """Returned by a function in a worker that is of no more use: another one makes the calls that follow."""

    value: Any


@dataclass(frozen=True)
class Workers:
    """How calls of a function are made."""

    function: Callable[..., Any]  # of a module, so that a new process finds it
    jobs: int = 1  # processes at a time
    one_call_each: bool = False  # whether every call has a process of its own
    preload: Sequence[str] = ()  # modules of a server that forks workers; without, each is a new interpreter
    environment: dict[str, str] = field(default_factory=dict)  # variables that new interpreters start with
    on_event: Callable[[Any], object] = lambda event: None  # takes what the function hands to `tell`
    max_deaths: float = math.inf  # workers that may die before the calls that are left are given up

    def run(self, calls: Sequence[Call], deadline: float = math.inf) -> Generator[Outcome]:
        """Outcomes as they are known. Calls begin in order; what runs at `deadline` (epoch) is killed."""
        waiting, workers, deaths = deque(calls), list[_Worker](), 0
        with tempfile.TemporaryDirectory() as folder:
            try:
                while waiting or any(worker.call is not None for worker in workers):
                    yield from self._hand_out(waiting, workers, Path(folder), deadline)
                    for worker, outcome in self._answers(workers, deadline):
                        yield outcome
                        if not worker.is_over:
                            continue
                        workers.remove(worker)
                        deaths += outcome.exit_code is not None
                        if outcome.exit_code is not None and not worker.is_ready:
                            yield from _skip_all(waiting, "the process does not start")
                        elif deaths >= self.max_deaths:
                            yield from _skip_all(waiting, f"{deaths} processes died before it")
            finally:
                for worker in workers:
                    worker.end() if worker.call is None else worker.kill()

    def one(self, *arguments: Any) -> Outcome:
        """Make one call."""
        (outcome,) = self.run([Call(arguments)])
        return outcome

    def _hand_out(
        self, waiting: deque[Call], workers: list[_Worker], folder: Path, deadline: float
    ) -> Iterator[Outcome]:
        while waiting:
            if time.time() + waiting[0].needs_s > deadline:
                yield Outcome(waiting.popleft(), problem=NO_TIME, is_skipped=True)
                continue
            idle = [worker for worker in workers if worker.call is None]
            if not idle and len(workers) >= self.jobs:
                return
            if not idle:
                idle.append(self._start(Path(tempfile.mkstemp(dir=folder)[1])))
                workers += idle
            idle[0].take(waiting.popleft())

    def _start(self, log: Path) -> _Worker:
        context: Any = multiprocessing.get_context("forkserver" if self.preload else "spawn")
        if self.preload:
            context.set_forkserver_preload(list(self.preload))
        pipe, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(self.function, theirs, str(log)))
        with mock.patch.dict(os.environ, self.environment):
            process.start()
        theirs.close()
        return _Worker(process, pipe, log)

    def _answers(self, workers: list[_Worker], deadline: float) -> Iterator[tuple[_Worker, Outcome]]:
        """Wait for the next thing that happens; the outcomes that follow from it."""
        busy = [worker for worker in workers if worker.call is not None]
        ends = min((worker.ends for worker in busy), default=math.inf)
        timeout_s = max(0.0, min(ends, deadline) - time.time())
        awaited = [each for worker in busy for each in (worker.pipe, worker.process.sentinel)]
        wait(awaited, timeout=None if math.isinf(timeout_s) else timeout_s)
        for worker in busy:
            outcome = self._answer(worker, deadline)
            if outcome is not None:
                if worker.is_over:
                    worker.kill()
                elif self.one_call_each:
                    worker.is_over = True
                    worker.end()
                yield worker, outcome

    def _answer(self, worker: _Worker, deadline: float) -> Outcome | None:
        is_dead = not worker.process.is_alive()  # before reading, so that its last words are not missed
        for what, value in worker.read():
            if what == _EVENT:
                self.on_event(value)
            elif what == _READY:
                worker.is_ready, worker.begun = True, time.time()
            elif what == _FAILED:
                return worker.outcome(problem=value.strip().splitlines()[-1], error=value)
            else:
                worker.is_over = what == _LAST
                return worker.outcome(value=value)
        worker.is_over = is_dead or time.time() >= min(worker.ends, deadline)
        if not worker.is_over:
            return None
        if is_dead:
            code = worker.process.exitcode
            return worker.outcome(problem=f"its process died with exit code {code}", exit_code=code)
        if time.time() < worker.ends:
            return worker.outcome(problem=f"{NO_TIME}: stopped while it ran", is_skipped=True)
        assert worker.call is not None, "only workers with a call are asked"
        return worker.outcome(problem=f"no answer within {worker.call.limit_s:g} s")


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    log: Path
    call: Call | None = None
    begun: float = 0.0
    is_ready: bool = False
    is_over: bool = False

    @property
    def ends(self) -> float:
        """When its call is given up."""
        return math.inf if self.call is None else self.begun + self.call.limit_s

    def take(self, call: Call) -> None:
        self.call, self.begun = call, time.time()
        with contextlib.suppress(OSError):  # a dead one is found out when it is asked
            self.pipe.send(call.arguments)

    def read(self) -> Iterator[tuple[str, Any]]:
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll():
                yield self.pipe.recv()

    def outcome(self, *, error: str = "", **fields: Any) -> Outcome:
        assert self.call is not None, "an outcome is that of a call"
        call, self.call = self.call, None
        log = self.log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL_CHARS:] + error
        return Outcome(call, log=log, seconds=time.time() - self.begun, **fields)

    def end(self) -> None:
        """Let it tidy up, for a moment."""
        self.pipe.close()
        self.process.join(_PATIENCE_S)
        self.kill()

    def kill(self) -> None:
        """Its group, compilers that it has started included."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _skip_all(waiting: deque[Call], problem: str) -> Iterator[Outcome]:
    while waiting:
        yield Outcome(waiting.popleft(), problem=problem, is_skipped=True)


# --- in the worker ------------------------------------------------------------------------------------------

_pipe: Connection | None = None


def tell(event: Any) -> None:
    """Hand something to `on_event` of the process that has started this worker; elsewhere, do nothing."""
    if _pipe is not None:
        _pipe.send((_EVENT, event))


def _serve(function: Callable[..., Any], pipe: Connection, log: str) -> None:
    global _pipe
    os.setpgid(0, 0)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    _pipe = pipe
    threading.Thread(target=_end_with_parent, daemon=True).start()
    pipe.send((_READY, None))
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(_call(function, pipe.recv()))


def _end_with_parent() -> None:
    """Nobody else would end this process if its parent was killed during a call."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has been started by somebody"
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        value = function(*arguments)
    except Exception:
        return _FAILED, traceback.format_exc()
    return (_LAST, value.value) if isinstance(value, Last) else (_DONE, value)
