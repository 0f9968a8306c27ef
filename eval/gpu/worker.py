"""Items in a process of their own: errors are recorded, and one that makes the device unusable ends it."""

import contextlib
import signal
import time
import traceback
import warnings
from collections.abc import Iterator
from functools import cache
from types import FrameType
from typing import Any

import torch

from eval.core.hardware import TOY, Device, Skip
from eval.core.isolation import Last
from eval.core.table import WrongAnswer
from eval.gpu import plan
from eval.gpu.plan import Item, Record, Settings


def run_one(settings: Settings, letter: str, key: str) -> Record | Last:
    """Run an item of a section; its record, the last one of this process if the device answers no more."""
    device = open_device(settings.dry_run)
    record = run_item(_items(letter, settings)[key], device)
    return Last(record) if record.crash is not None and device.is_lost() else record


@cache
def open_device(dry_run: bool) -> Device:
    """The device of a run."""
    torch.set_num_threads(1)  # several workers share the cores, and the work is on the device
    return TOY if dry_run else Device("cuda:0")


@cache
def _items(letter: str, settings: Settings) -> dict[str, Item]:
    return {item.key: item for item in plan.items_of(letter, settings)}


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
    except WrongAnswer as error:
        record.check("the answer", False, str(error))
    except Exception:
        record.crash = traceback.format_exc()
    try:
        device.release()
    except RuntimeError:
        record.crash = record.crash or traceback.format_exc()
    record.seconds = time.perf_counter() - started_s
    return record


@contextlib.contextmanager
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
