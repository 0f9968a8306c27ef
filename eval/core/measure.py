"""Time of prefill and decode steps, and peak memory, of one `generate` call."""

import contextlib
import ctypes
import gc
import itertools
import os
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATM = Path("/proc/self/statm")
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class KvBytes:
    """What a cache holds after a batch, in bytes."""

    used_bytes: int  # keys and values kept, as they are kept, with padding and part-filled blocks
    allocated_bytes: int  # what was set aside for them; memory no one has touched costs nothing on a CPU
    details: dict[str, Any]  # what the cache itself reports


@dataclass(frozen=True)
class Measures:
    """Time and memory of one unit with one cache."""

    rows: int  # sequences that ran together
    prefill_ms: tuple[float, ...]  # first forwards
    step_ms: tuple[float, ...]  # decode steps; one step gives one token to every row
    kv: KvBytes  # what the cache held at the end
    peak_bytes: int  # all included
    rise_bytes: int  # above what was held before


class StepTimer:
    """Times the forward passes of a model by hooks on it, while used as a context manager.

    The first forward is the prefill. A decode step is the time from the end of one forward to the end of the
    next, so it holds all that a user waits for: picking the token, preparing inputs, the forward, the cache.
    On CUDA the device is synchronised at every stamp.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model, self._device = model, device
        self._stamps_s: list[float] = []  # the start of the first forward, and the end of each

    @property
    def prefill_ms(self) -> float:
        """Milliseconds of the first forward."""
        if len(self._stamps_s) < 2:
            raise AssertionError("StepTimer saw no finished forward pass of the model")
        return 1e3 * (self._stamps_s[1] - self._stamps_s[0])

    @property
    def step_ms(self) -> list[float]:
        """Milliseconds of each decode step, in order; empty when one token was generated."""
        return [1e3 * (after - before) for before, after in itertools.pairwise(self._stamps_s[1:])]

    def __enter__(self) -> Self:
        self._hooks = [
            self._model.register_forward_pre_hook(self._before),
            self._model.register_forward_hook(self._after),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: Any, args: Any) -> None:
        if not self._stamps_s:
            self._stamps_s.append(self._now_s())

    def _after(self, module: Any, args: Any, output: Any) -> None:
        self._stamps_s.append(self._now_s())

    def _now_s(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class PeakMemory(ABC):
    """The peak of memory while used as a context manager; its classes say how."""

    method: ClassVar[str]  # one line for the report: what these numbers are
    peak_bytes = 0  # the highest total, weights and everything else included
    rise_bytes = 0  # `peak_bytes` less what was held at the start

    def __enter__(self) -> Self:
        gc.collect()
        # Freed pages go back to the kernel where the C library can (glibc). With another one, what it keeps
        # is counted as resident, for every cache alike.
        with contextlib.suppress(OSError, AttributeError, TypeError):
            ctypes.CDLL(None).malloc_trim(0)
        self._start_bytes = self._begin()
        return self

    def __exit__(self, *error: object) -> None:
        self.peak_bytes = self._end()
        self.rise_bytes = max(0, self.peak_bytes - self._start_bytes)

    @abstractmethod
    def _begin(self) -> int:
        """Bytes held now; from here on the peak counts."""

    @abstractmethod
    def _end(self) -> int:
        """The peak in bytes."""


def peak_memory(device: torch.device) -> PeakMemory:
    """Return the best gauge there is for `device` on this machine."""
    if device.type == "cuda":
        return CudaPeak(device)
    return HighWaterPeak() if _high_water_can_be_reset() else SampledPeak()


class CudaPeak(PeakMemory):
    """Peak of the tensors that torch's allocator handed out on the device; not what it keeps in reserve."""

    method = "torch.cuda.max_memory_allocated: the highest sum of tensors alive on the device"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def _begin(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)

    def _end(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)


class HighWaterPeak(PeakMemory):
    """Peak resident memory of the whole process as the Linux kernel saw it, reset at the start.

    What the C library still holds is handed back before the start, so that one contender's leavings do not
    hide the next one's needs; what it keeps *during* the block is resident and counts. The result is good to
    a few hundred KiB. Memory that was set aside but never touched does not count.
    """

    method = "peak resident memory of the process (VmHWM, reset before every batch)"

    def _begin(self) -> int:
        _CLEAR_REFS.write_text("5")
        return _resident_bytes()

    def _end(self) -> int:
        return _high_water_bytes()


class SampledPeak(PeakMemory):
    """Highest resident memory that a thread sees every millisecond, a lower bound: the last resort."""

    method = "highest resident memory of the process seen by a sampling thread (a lower bound)"

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _begin(self) -> int:
        self.peak_bytes = _resident_bytes()
        self._thread.start()
        return self.peak_bytes

    def _end(self) -> int:
        self._stop.set()
        self._thread.join()
        return max(self.peak_bytes, _resident_bytes())

    def _sample(self) -> None:
        while not self._stop.wait(0.001):
            self.peak_bytes = max(self.peak_bytes, _resident_bytes())


def _high_water_can_be_reset() -> bool:
    try:
        _CLEAR_REFS.write_text("5")
        return _high_water_bytes() > 0
    except (OSError, StopIteration):
        return False


def _high_water_bytes() -> int:
    lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])


def _resident_bytes() -> int:
    if _STATM.exists():
        return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import psutil  # type: ignore[import-untyped]  # comes with accelerate; only needed off Linux

    return int(psutil.Process().memory_info().rss)
