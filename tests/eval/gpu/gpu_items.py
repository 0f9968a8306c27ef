"""Two items for tests of what runs items."""

from __future__ import annotations

from eval.core.hardware import Device
from eval.gpu.plan import Record


def crash(record: Record, device: Device) -> None:
    raise RuntimeError("illegal memory access")


def fine(record: Record, device: Device) -> None:
    record.values["n"] = 1
