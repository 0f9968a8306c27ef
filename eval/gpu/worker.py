"""A process that runs items and writes what becomes of each, line by line, as it happens.

An error in an item is recorded and the next item runs. An error that makes the device unusable ends the
process after it is recorded; the supervisor starts another one for the rest.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from eval.gpu.items import NO_TIME, Item, Record, Skip
from eval.gpu.settings import Settings

DEVICE_LOST = 3
"""Exit status: the device answers no more, other items may be fine in another process."""


@dataclass(frozen=True)
class Job:
    """What a worker is given.

    Attributes:
        settings: of the run.
        section: letter of a section.
        keys: its items to run, in this order.
        deadline: seconds since the epoch; no item is begun that needs longer.
        results: file to append lines to.
    """

    settings: Settings
    section: str
    keys: tuple[str, ...]
    deadline: float
    results: Path

    def to_json(self) -> str:
        """One line."""
        fields = {**vars(self), "settings": self.settings.to_dict(), "results": str(self.results)}
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        return cls(
            Settings.from_dict(fields["settings"]),
            fields["section"],
            tuple(fields["keys"]),
            fields["deadline"],
            Path(fields["results"]),
        )


def work(job: Job) -> int:
    """Run a job's items; the exit status."""
    from eval.gpu import sections
    from eval.gpu.device import open_device

    os.environ["HF_PAGED_CACHE_BACKEND"] = job.settings.backend
    device = open_device(job.settings)
    items = {item.key: item for item in sections.items_of(job.section, job.settings)}
    with job.results.open("a", encoding="utf-8") as lines:
        for key in job.keys:
            item = items[key]
            if time.time() + item.needs_s > job.deadline:
                _write(lines, {"done": Record(key, skipped=NO_TIME, optional=item.optional).to_dict()})
                continue
            _write(lines, {"begun": key})
            record = run_item(item, device)
            _write(lines, {"done": record.to_dict()})
            if record.crash is not None and device.is_lost():
                return DEVICE_LOST
    return 0


def run_item(item: Item, device: Any) -> Record:
    """Run one item. Whatever it raises ends up in its record."""
    record = Record(item.key, optional=item.optional)
    started_s = time.perf_counter()
    try:
        with _limit(item.limit_s), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            item.run(record, device)
            device.synchronize()
    except Skip as skip:
        record.skipped = str(skip)
    except Exception:
        record.crash = traceback.format_exc()
    try:
        device.release()
    except RuntimeError:
        record.crash = record.crash or traceback.format_exc()
    record.seconds = time.perf_counter() - started_s
    return record


@contextmanager
def _limit(limit_s: float) -> Iterator[None]:
    """Raise TimeoutError inside after so long, unless the time is spent in a call that never returns."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"took longer than {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _write(lines: TextIO, entry: dict[str, Any]) -> None:
    lines.write(json.dumps(entry) + "\n")
    lines.flush()


def main() -> int:
    """Run the job in the file named on the command line."""
    import torch

    torch.set_num_threads(1)  # several workers share the cores, and the work is on the device
    return work(Job.from_json(Path(sys.argv[1]).read_text(encoding="utf-8")))


if __name__ == "__main__":
    sys.exit(main())
