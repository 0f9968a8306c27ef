"""A process for every type, so that a crash or a hang is one type's alone."""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from eval.zoo.examine import Options, Report
from eval.zoo.registry import Entry

Examine = Callable[[Entry, Options], Report]


@dataclass
class _Running:
    entry: Entry
    process: BaseProcess
    answer: Connection
    ends_s: float


def reports(
    entries: list[Entry], options: Options, *, jobs: int, limit_s: float, examine: Examine
) -> Iterator[Report]:
    """Look at every entry, a few at a time; reports come as they are ready.

    Args:
        entries: What to look at.
        options: How.
        jobs: Processes at a time.
        limit_s: Seconds after which a type is given up.
        examine: What looks at one, in a process of its own: a function of a module.
    """
    # A server that has imported everything and started no thread forks in milliseconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["eval.zoo.examine", "transformers.generation"])
    waiting, running = list(entries), list[_Running]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_start(context, waiting.pop(0), options, limit_s, examine))
            soonest_s = min(one.ends_s for one in running) - time.monotonic()
            wait([one.answer for one in running], timeout=max(0.0, soonest_s))
            for one in list(running):
                if one.answer.poll() or time.monotonic() >= one.ends_s:
                    running.remove(one)
                    yield _finish(one, limit_s)
    finally:
        for one in running:
            one.process.kill()


def _start(context: Any, entry: Entry, options: Options, limit_s: float, examine: Examine) -> _Running:
    answer, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(examine, entry, options, theirs), daemon=True)
    process.start()
    theirs.close()
    return _Running(entry, process, answer, time.monotonic() + limit_s)


def _finish(one: _Running, limit_s: float) -> Report:
    """The report of a process that has answered, died, or run out of time."""
    entry = one.entry
    report = Report(entry.name, entry.model_type, entry.class_name, seconds=limit_s)
    if one.answer.poll():
        try:
            report = one.answer.recv()
            one.process.join()
        except EOFError:
            one.process.join()
            report.has_died = True
            report.problem = f"its process died with exit code {one.process.exitcode}"
    else:
        report.has_died = True
        report.problem = f"no answer within {limit_s:g} s"
    one.process.kill()
    one.answer.close()
    return report


def _work(examine: Examine, entry: Entry, options: Options, answer: Connection) -> None:
    import torch
    import transformers

    warnings.simplefilter("ignore")
    logging: Any = transformers.logging
    logging.set_verbosity_error()
    torch.set_num_threads(1)  # tiny models gain nothing from more, and processes share the cores
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(quiet, stream)
    answer.send(examine(entry, options))
    answer.close()
