"""The GPU."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import torch

from eval.gpu.device import Device
from eval.gpu.items import Skip


class CudaDevice(Device):
    """The first GPU."""

    torch_device = torch.device("cuda", 0)
    is_gpu = True

    def synchronize(self) -> None:
        """All streams."""
        torch.cuda.synchronize()

    def seconds_of(self, step: Callable[[], object], repeats: int) -> float:
        """Between two events."""
        begin = self.mark()
        for _ in range(repeats):
            step()
        return self.seconds_between([begin, self.mark()])[0] / repeats

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
