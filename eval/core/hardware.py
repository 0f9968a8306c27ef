"""Devices to measure on: their clock, their memory, and what the CPU stands in for in a dry run."""

import contextlib
import gc
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

NEEDS_GPU = "needs a GPU"
_L3_SIZE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_DEFAULT_L3_BYTES = 32 << 20
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_TOY_CACHE_BYTES = 64 << 10


class Skip(Exception):
    """Raised by what cannot run here; the message says why."""


class Device:
    """The CPU, the CPU of a dry run, where layers are few, or the first GPU."""

    def __init__(self, name: str = "cpu", *, is_toy: bool = False) -> None:
        self.torch_device, self.is_toy = torch.device(name), is_toy
        self.is_gpu = self.torch_device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for everything that was launched."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def step_s(self, step: Callable[[], object], steps: int) -> float:
        """Seconds of one of so many steps in a row: the median, or on a GPU the mean, no wait between."""
        if self.is_gpu:
            begin = self.mark()
            for _ in range(steps):
                step()
            return self.seconds_between([begin, self.mark()])[0] / steps
        gc.collect(0)
        gc.disable()
        try:
            marks = [self.mark()]
            for _ in range(steps):
                step()
                marks.append(self.mark())
        finally:
            gc.enable()
        return statistics.median(self.seconds_between(marks))

    def mark(self) -> Any:
        """A point in the device's time, without waiting for it."""
        if not self.is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds_between(self, marks: list[Any]) -> list[float]:
        """Seconds from each mark to the next. Waits for the last."""
        if not self.is_gpu:
            return [later - earlier for earlier, later in itertools.pairwise(marks)]
        marks[-1].synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]

    def graph_of(self, step: Callable[[], object]) -> Callable[[], object]:
        """The launches of a step, recorded after three runs on a side stream, to replay; or `Skip`."""
        if not self.is_gpu:
            raise Skip(NEEDS_GPU)
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
        """Names of the kernels that a step launches, memory copies included, as the profiler sees them."""
        from torch.profiler import ProfilerActivity, profile

        if not self.is_gpu:
            raise Skip(NEEDS_GPU)
        self.synchronize()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
            step()
            self.synchronize()
        events: Any = profiled.events()
        found = [event.name for event in events if "CUDA" in str(event.device_type)]
        if not found:
            raise Skip("the profiler saw no kernels")
        return found

    def check_room(self, needed: float) -> None:
        """Raise `Skip` where this is a GPU that cannot allocate so many bytes any more."""
        if not self.is_gpu:
            return
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if free < needed:
            raise Skip(f"needs {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free")

    def reset_peak(self) -> None:
        """Begin counting the peak anew."""
        if self.is_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int | None:
        """The most memory that tensors took at one time since then; None if nobody counts."""
        return int(torch.cuda.max_memory_allocated()) if self.is_gpu else None

    def cache_bytes(self) -> int:
        """Size of the cache between the memory and the cores; 32 MiB where the system does not say."""
        if self.is_gpu:
            return torch.cuda.get_device_properties(0).L2_cache_size
        if self.is_toy:
            return _TOY_CACHE_BYTES
        try:
            text = _L3_SIZE.read_text(encoding="ascii").strip()
        except OSError:
            return _DEFAULT_L3_BYTES
        return int(text.rstrip("KMG")) * _UNITS.get(text[-1], 1)

    def release(self) -> None:
        """Give unused memory back."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()

    def is_lost(self) -> bool:
        """Whether an error has made the device unusable for this process: then every later call fails."""
        try:
            self.synchronize()
            torch.zeros(1, device=self.torch_device).item()
        except RuntimeError:
            return True
        return False

    @contextlib.contextmanager
    def compiles(self) -> Iterator[None]:
        """Inside, a `PagedCache` that is asked to be compileable is so on this device."""
        from hf_paged_cache.store import static_group

        with mock.patch.object(static_group, "DEVICES", static_group.DEVICES | {self.torch_device.type}):
            yield

    def compile_options(self) -> dict[str, Any]:
        """Arguments with which `generate` compiles the decode step here as by itself on a GPU."""
        if self.is_gpu:
            return {}
        from transformers import CompileConfig

        config: Any = CompileConfig(backend="aot_eager")
        config.mode = None  # that of inductor
        config._compile_all_devices = True
        return {"compile_config": config}

    @contextlib.contextmanager
    def poisoned(self) -> Iterator[None]:
        """Inside, memory that nobody has written is NaN (integers: the largest)."""
        filling: Any = torch.utils.deterministic
        is_on = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        with warnings.catch_warnings(), contextlib.ExitStack() as before:
            warnings.simplefilter("ignore")
            before.callback(torch.use_deterministic_algorithms, is_on, warn_only=warn_only)
            before.callback(setattr, filling, "fill_uninitialized_memory", filling.fill_uninitialized_memory)
            torch.use_deterministic_algorithms(True, warn_only=True)
            filling.fill_uninitialized_memory = True
            # What is allocated next re-uses these, also where it does not go through `torch.empty`.
            freed = [torch.full((1 << n,), torch.nan, device=self.torch_device) for n in range(7, 23)]
            del freed
            yield


CPU = Device()
TOY = Device(is_toy=True)
