"""Devices to measure on: their clock, their memory, and what the CPU stands in for in a dry run."""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

NEEDS_GPU = "needs a GPU"
_POISON_BYTES = tuple(1 << power for power in range(9, 25))
_L3_SIZE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_DEFAULT_L3_BYTES = 32 << 20
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_TURN_S = 0.008
_MAX_REPEATS = 200


class Skip(Exception):
    """Raised by what cannot run here; the message says why."""


class Device:
    """The CPU, and what benches and checks ask of any device."""

    torch_device = torch.device("cpu")
    is_gpu = False

    def synchronize(self) -> None:
        """Wait for everything that was launched."""

    def step_s(self, step: Callable[[], object], steps: int) -> float:
        """Seconds of a step, the median of so many in a row."""
        taken = []
        gc.collect(0)
        gc.disable()
        try:
            for _ in range(steps):
                start_s = time.perf_counter()
                step()
                taken.append(time.perf_counter() - start_s)
        finally:
            gc.enable()
        return statistics.median(taken)

    def mark(self) -> Any:
        """A point in the device's time, without waiting for it."""
        return time.perf_counter()

    def seconds_between(self, marks: list[Any]) -> list[float]:
        """Seconds from each mark to the next. Waits for the last."""
        return [later - earlier for earlier, later in itertools.pairwise(marks)]

    def graph_of(self, step: Callable[[], object]) -> Callable[[], object]:
        """The launches of a step, recorded; calling it replays them. The step has run before.

        Raises:
            Skip: not on this device.
        """
        raise Skip(NEEDS_GPU)

    def launches_of(self, step: Callable[[], object]) -> list[str]:
        """Names of the kernels that a step launches.

        Raises:
            Skip: not on this device.
        """
        raise Skip(NEEDS_GPU)

    def free_bytes(self) -> int | None:
        """Memory that can still be allocated; None if nobody counts."""
        return None

    def check_room(self, needed: float) -> None:
        """See that so many bytes can still be allocated.

        Raises:
            Skip: they cannot.
        """
        free = self.free_bytes()
        if free is not None and free < needed:
            raise Skip(f"needs {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free")

    def reset_peak(self) -> None:
        """Begin counting the peak anew."""

    def peak_bytes(self) -> int | None:
        """The most memory that tensors took at one time since then; None if nobody counts."""
        return None

    def cache_bytes(self) -> int:
        """Size of the cache between the memory and the cores; 32 MiB where the system does not say."""
        try:
            text = _L3_SIZE.read_text(encoding="ascii").strip()
        except OSError:
            return _DEFAULT_L3_BYTES
        return int(text.rstrip("KMG")) * _UNITS.get(text[-1], 1)

    def release(self) -> None:
        """Give unused memory back."""
        gc.collect()

    def is_lost(self) -> bool:
        """Whether an error has made the device unusable for this process."""
        return False

    @contextlib.contextmanager
    def compiles(self) -> Iterator[None]:
        """Inside, a `PagedCache` that is asked to be compileable is so on this device."""
        from hf_paged_cache.store import static_group

        before = static_group.DEVICES
        static_group.DEVICES = before | {self.torch_device.type}
        try:
            yield
        finally:
            static_group.DEVICES = before

    def compile_options(self) -> dict[str, Any]:
        """Arguments of `generate` with which it compiles the decode step here as on a GPU."""
        from transformers import CompileConfig

        config: Any = CompileConfig(backend="aot_eager")
        config.mode = None  # that of inductor
        config._compile_all_devices = True
        return {"compile_config": config}

    @contextlib.contextmanager
    def poisoned(self) -> Iterator[None]:
        """Inside, memory that nobody has written is NaN (integers: the largest)."""
        before = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        filling: Any = torch.utils.deterministic
        fill = filling.fill_uninitialized_memory
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.use_deterministic_algorithms(True, warn_only=True)
            filling.fill_uninitialized_memory = True
            # What is allocated next re-uses these, also where it does not go through `torch.empty`.
            freed = [
                torch.full((size // 4,), torch.nan, device=self.torch_device, dtype=torch.float32)
                for size in _POISON_BYTES
            ]
            del freed
            try:
                yield
            finally:
                torch.use_deterministic_algorithms(before, warn_only=warn_only)
                filling.fill_uninitialized_memory = fill


class CudaDevice(Device):
    """The first GPU."""

    torch_device = torch.device("cuda", 0)
    is_gpu = True

    def synchronize(self) -> None:
        """All streams."""
        torch.cuda.synchronize()

    def step_s(self, step: Callable[[], object], steps: int) -> float:
        """Between two events, so many steps and no wait in between: their mean."""
        begin = self.mark()
        for _ in range(steps):
            step()
        return self.seconds_between([begin, self.mark()])[0] / steps

    def mark(self) -> Any:
        """An event in the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds_between(self, marks: list[Any]) -> list[float]:
        """Waits for the last event."""
        marks[-1].synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]

    def graph_of(self, step: Callable[[], object]) -> Callable[[], object]:
        """A CUDA graph, captured after three runs on a side stream."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    def launches_of(self, step: Callable[[], object]) -> list[str]:
        """As the profiler saw them, memory copies included."""
        from torch.profiler import ProfilerActivity, profile

        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
            step()
            torch.cuda.synchronize()
        events: Any = profiled.events()
        found = [event.name for event in events if "CUDA" in str(event.device_type)]
        if not found:
            raise Skip("the profiler saw no kernels")
        return found

    def free_bytes(self) -> int | None:
        """What the driver has, and what torch's allocator keeps unused."""
        free, _ = torch.cuda.mem_get_info()
        return int(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())

    def reset_peak(self) -> None:
        """Of torch's allocator."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int | None:
        """Of torch's allocator."""
        return int(torch.cuda.max_memory_allocated())

    def cache_bytes(self) -> int:
        """The L2."""
        return int(torch.cuda.get_device_properties(0).L2_cache_size)

    def release(self) -> None:
        """To the driver."""
        gc.collect()
        torch.cuda.empty_cache()

    def is_lost(self) -> bool:
        """After an illegal access every later call fails."""
        try:
            torch.cuda.synchronize()
            torch.zeros(1, device=self.torch_device).item()
        except RuntimeError:
            return True
        return False

    def compile_options(self) -> dict[str, Any]:
        """None: `generate` compiles by itself."""
        return {}


class ToyDevice(Device):
    """The CPU of a dry run, where layers are few."""

    def cache_bytes(self) -> int:
        """Next to nothing."""
        return 64 << 10


CPU = Device()


def repeats_of(step_s: float) -> int:
    """Steps in a row, so that one turn takes long enough to be timed."""
    return max(1, min(_MAX_REPEATS, round(_TURN_S / max(step_s, 1e-9))))
