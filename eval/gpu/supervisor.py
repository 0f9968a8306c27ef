"""Starts workers, follows them, restarts those that die, stops those that are late.

A kernel that was never run on a device may hang it, or make an illegal access after which nothing works in
its process. Neither may cost more than one item.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eval.gpu.items import NO_TIME, Item, Record
from eval.gpu.settings import Settings
from eval.gpu.worker import Job

MAX_STARTS = 6
"""Processes for one share of the items; each one more means that an item took the last one down."""
GRACE_S = 10.0
"""How long after its limit an item's process is killed: the item can not stop itself."""
POLL_S = 0.1
LOG_TAIL_CHARS = 1500
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Share:
    """Items of one section that one process after another works off."""

    section: str
    items: list[Item]
    starts: int = 0
    process: subprocess.Popen[bytes] | None = None
    folder: Path | None = None
    begun: str | None = None
    begun_s: float = 0.0
    done: set[str] = field(default_factory=set)
    done_before: int = 0
    read_chars: int = 0

    @property
    def left(self) -> list[Item]:
        """Items without a record."""
        return [item for item in self.items if item.key not in self.done]

    def item(self, key: str) -> Item:
        """The item of that key."""
        return next(item for item in self.items if item.key == key)


def shares_of(section: str, items: Sequence[Item], count: int) -> list[Share]:
    """Deal the items out to so many shares, like cards."""
    count = max(1, min(count, len(items)))
    return [Share(section, list(items[index::count])) for index in range(count)]


class Supervisor:
    """Runs shares of items in worker processes.

    Args:
        settings: of the run.
        on_record: told of each record as it comes, with the letter of its section.
        command: what starts a worker; the job's file is appended.
    """

    def __init__(
        self,
        settings: Settings,
        on_record: Callable[[str, Record], None],
        command: Sequence[str] = (sys.executable, "-m", "eval.gpu.worker"),
    ) -> None:
        self._settings = settings
        self._on_record = on_record
        self._command = list(command)
        self._running: list[Share] = []

    def run(self, shares: Sequence[Share], deadline: float, jobs: int = 1) -> None:
        """Work off all shares, so many at a time; returns when each item has a record.

        Args:
            shares: begun in this order.
            deadline: seconds since the epoch; whatever is not done then is recorded as skipped.
            jobs: processes at one time.
        """
        waiting = list(shares)
        with tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
            try:
                while waiting or self._running:
                    while waiting and len(self._running) < jobs:
                        self._start(waiting.pop(0), Path(folder), deadline)
                    for share in list(self._running):
                        self._follow(share, Path(folder), deadline)
                    time.sleep(POLL_S)
            finally:
                self.stop()

    def stop(self) -> None:
        """Kill every worker."""
        for share in self._running:
            _kill(share)
        self._running = []

    def _start(self, share: Share, folder: Path, deadline: float) -> None:
        if time.time() >= deadline or not share.left:
            self._give_up(share, NO_TIME)
            return
        share.starts += 1
        share.folder = Path(tempfile.mkdtemp(dir=folder))
        share.begun, share.read_chars, share.done_before = None, 0, len(share.done)
        keys = tuple(item.key for item in share.left)
        job = Job(self._settings, share.section, keys, deadline, share.folder / "results")
        job.results.touch()
        (share.folder / "job").write_text(job.to_json(), encoding="utf-8")
        with (share.folder / "log").open("wb") as log:
            share.process = subprocess.Popen(
                [*self._command, str(share.folder / "job")],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": _python_path(), "PYTHONUNBUFFERED": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # compilers that a worker starts are stopped with it
            )
        self._running.append(share)

    def _follow(self, share: Share, folder: Path, deadline: float) -> None:
        assert share.process is not None, "a running share has a process"
        status = share.process.poll()  # before reading, so that nothing written before the end is missed
        self._read(share)
        if status is None:
            self._stop_if_late(share, deadline)
            return
        self._running.remove(share)
        if share.begun is not None:
            self._crashed(share, share.begun, f"the worker died with status {status}")
        elif share.left and len(share.done) == share.done_before:
            self._crashed(share, share.left[0].key, f"the worker does not start: status {status}")
            self._give_up(share, "the worker does not start")
        if share.left and share.starts >= MAX_STARTS:
            self._give_up(share, f"{MAX_STARTS} workers died before it")
        if share.left:
            self._start(share, folder, deadline)

    def _read(self, share: Share) -> None:
        assert share.folder is not None, "a running share has a folder"
        text = (share.folder / "results").read_text(encoding="utf-8")
        end = text.rfind("\n") + 1
        for line in text[share.read_chars : end].splitlines():
            entry = json.loads(line)
            if "begun" in entry:
                share.begun, share.begun_s = entry["begun"], time.time()
            else:
                share.begun = None
                self._note(share, Record.from_dict(entry["done"]))
        share.read_chars = end

    def _stop_if_late(self, share: Share, deadline: float) -> None:
        now = time.time()
        item = None if share.begun is None else share.item(share.begun)
        if now > deadline:
            _kill(share)
            self._read(share)
            self._running.remove(share)
            if share.begun is not None:
                self._note_skip(share, share.item(share.begun), f"{NO_TIME}: stopped while it ran")
            self._give_up(share, NO_TIME)
        elif item is not None and now > share.begun_s + item.limit_s + GRACE_S:
            _kill(share)

    def _crashed(self, share: Share, key: str, how: str) -> None:
        assert share.folder is not None, "a running share has a folder"
        log = (share.folder / "log").read_text(encoding="utf-8", errors="replace")[-LOG_TAIL_CHARS:]
        item, seconds = share.item(key), time.time() - share.begun_s if share.begun else 0.0
        crash = f"{log}\n{how}, {seconds:.0f} s after it began {key}"
        self._note(share, Record(key, crash=crash, optional=item.optional, seconds=seconds))
        share.begun = None

    def _give_up(self, share: Share, reason: str) -> None:
        for item in share.left:
            self._note_skip(share, item, reason)

    def _note_skip(self, share: Share, item: Item, reason: str) -> None:
        self._note(share, Record(item.key, skipped=reason, optional=item.optional))

    def _note(self, share: Share, record: Record) -> None:
        if record.key not in share.done:
            share.done.add(record.key)
            self._on_record(share.section, record)


def _kill(share: Share) -> None:
    if share.process is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(share.process.pid, signal.SIGKILL)
        share.process.wait()


def _python_path() -> str:
    before = os.environ.get("PYTHONPATH")
    return str(ROOT) if not before else f"{ROOT}{os.pathsep}{before}"
