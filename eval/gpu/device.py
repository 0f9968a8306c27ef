"""Everything in which a GPU and the CPU of a dry run differ."""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from eval.gpu.items import Skip
from eval.gpu.settings import Settings

NEEDS_GPU = "needs a GPU"
_POISON_BYTES = tuple(1 << power for power in range(9, 25))


class Device:
    """What the sections ask of the device. The base class is the CPU of a dry run."""

    torch_device = torch.device("cpu")
    is_gpu = False

    def synchronize(self) -> None:
        """Wait for everything that was launched."""

    def seconds_of(self, step: Callable[[], object], repeats: int) -> float:
        """Seconds of one step, over so many in a row."""
        started_s = time.perf_counter()
        for _ in range(repeats):
            step()
        return (time.perf_counter() - started_s) / repeats

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

    def reset_peak(self) -> None:
        """Begin counting the peak anew."""

    def peak_bytes(self) -> int | None:
        """The most memory that tensors took at one time since then; None if nobody counts."""
        return None

    def cache_bytes(self) -> int:
        """Size of the cache between the memory and the cores, which timings must not re-read."""
        return 64 << 10

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
            self._poison_freed_memory()
            try:
                yield
            finally:
                torch.use_deterministic_algorithms(before, warn_only=warn_only)
                filling.fill_uninitialized_memory = fill

    def _poison_freed_memory(self) -> None:
        # What is allocated next re-uses these, also where an allocation does not go through `torch.empty`.
        held = [
            torch.full((size // 4,), torch.nan, dtype=torch.float32, device=self.torch_device)
            for size in _POISON_BYTES
        ]
        del held


def open_device(settings: Settings) -> Device:
    """The device of a run."""
    if settings.dry_run:
        return Device()
    from eval.gpu.cuda import CudaDevice

    return CudaDevice()
