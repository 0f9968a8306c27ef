"""Reading memory as fast as this machine can: the ceiling of attention over a long context."""

import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from eval.bench.context import Bench, Context
from eval.core.hardware import CPU, Device
from eval.core.table import Cell, Column, Row, fixed
from eval.core.timing import Contender, Timings, interleave

_ROW = 4096
# What `Reader.cells` fills.
COLUMNS = (
    Column("gb_per_s", "GB/s", fixed(1)),
    Column("read_gb_per_s", "machine", fixed(1)),
    Column("bandwidth_percent", "%", fixed(0)),
)


@dataclass(frozen=True)
class Reader:
    """A way to read (or copy) `bytes_read` bytes, each once, with torch's number of threads."""

    name: str
    bytes_read: int
    read: Callable[[], object]

    def bytes_per_s(self, timings: Timings) -> float:
        """Bandwidth from the timings of a contender of this name."""
        return self.bytes_read / timings.median_s(self.name)

    def percent(self, timings: Timings, name: str, read_bytes: float) -> float:
        """Bandwidth of a contender that reads so many bytes in a step, of this reader's in its rounds."""
        rounds = zip(timings.seconds[name], timings.seconds[self.name], strict=True)
        return 100 * statistics.median(read_bytes / a / (self.bytes_read / b) for a, b in rounds)

    def cells(self, timings: Timings, name: str, read_bytes: float) -> dict[str, Cell]:
        """The cells of `COLUMNS` for a contender that reads so many bytes in a step."""
        return {
            "gb_per_s": read_bytes / timings.median_s(name) / 1e9,
            "read_gb_per_s": self.bytes_per_s(timings) / 1e9,
            "bandwidth_percent": self.percent(timings, name, read_bytes),
        }

    @property
    def note(self) -> str:
        """What the last two of `COLUMNS` say."""
        return f"machine: read bandwidth in the same rounds ({self.name}); %: of that."

    def contender(self) -> Contender:
        """This reader, to be timed in the rounds of others."""
        return Contender(self.name, self.read)


def readers() -> list[Reader]:
    """Several ways to read one buffer, 16 times the last-level cache; machines differ in which is fastest."""
    from hf_paged_cache.store.device.memory import advise_huge_pages

    rows = 16 * CPU.cache_bytes() // (4 * _ROW)
    buffer = torch.empty(rows, _ROW)
    advise_huge_pages(buffer)  # as the cache does: the ceiling should not be held down by the page table
    # Random, because a host may keep equal pages of its guests once, and in its cache.
    buffer.uniform_()
    threads = torch.get_num_threads()
    vector, flat = torch.ones(_ROW), buffer.flatten()
    parts = np.array_split(flat.numpy(), threads)
    integers = np.array_split(flat.numpy().view(np.int64), threads)
    workers = ThreadPoolExecutor(threads)
    ways: dict[str, Callable[[], object]] = {
        "torch sum": flat.sum,
        "torch matrix-vector product": lambda: torch.mv(buffer, vector),
        "torch maximum of each row": lambda: torch.amax(buffer, dim=1),
        "numpy sum in threads": lambda: list(workers.map(np.sum, parts)),
        "numpy bitwise-or in threads": lambda: list(workers.map(np.bitwise_or.reduce, integers)),
    }
    return [Reader(name, buffer.nbytes, read) for name, read in ways.items()]


def copy(device: Device, count: int) -> Reader:
    """A copy within a device's memory, which reads and writes so many bytes."""
    source = torch.empty(count // 2, dtype=torch.bfloat16, device=device.torch_device).normal_()
    target = torch.empty_like(source)
    return Reader("copy", 2 * count, lambda: target.copy_(source))


def fastest(budget_s: float) -> tuple[Reader, list[Row]]:
    """Time all readers; return the fastest one and a row for each."""
    candidates = readers()
    timings = interleave([r.contender() for r in candidates], budget_s=budget_s)
    speeds = {reader: reader.bytes_per_s(timings) for reader in candidates}
    best = max(candidates, key=lambda reader: speeds[reader])
    return best, [
        Row({"method": r.name, "gb_per_s": speed / 1e9, "best": "best" if r is best else None})
        for r, speed in speeds.items()
    ]


def _measure(context: Context) -> tuple[list[Row], tuple[str, ...]]:
    return context.bandwidth[1], (
        f"float32 buffer of {16 * CPU.cache_bytes() >> 20} MiB, 16 times the last-level cache, "
        f"{torch.get_num_threads()} threads, medians",
    )


_COLUMNS = (Column("method", "method"), Column("gb_per_s", "GB/s", fixed(1)), Column("best", ""))
BENCH = Bench("bandwidth", "reading memory", _COLUMNS, _measure)
