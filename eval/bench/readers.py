"""Ways to read memory, to find out how fast this machine does."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from eval.bench.timing import Contender, Timings, interleave
from eval.core.table import Cell, Column, Row, fixed

_L3_SIZE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_DEFAULT_L3_BYTES = 32 << 20
_ROW = 4096
COLUMNS = (
    Column("gb_per_s", "GB/s", fixed(1)),
    Column("read_gb_per_s", "machine", fixed(1)),
    Column("bandwidth_percent", "%", fixed(0)),
)
"""What `Reader.cells` fills."""
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Reader:
    """A way to read `bytes_read` bytes, each once, with torch's number of threads."""

    name: str
    bytes_read: int
    read: Callable[[], object]

    def bytes_per_s(self, timings: Timings) -> float:
        """Bandwidth from the timings of a contender of this name."""
        return self.bytes_read / timings.median_s(self.name)

    def share(self, timings: Timings, name: str, read_bytes: float) -> float:
        """Bandwidth of a contender that reads so many bytes in a step, over this reader's in its rounds."""
        rounds = zip(timings.seconds[name], timings.seconds[self.name], strict=True)
        return statistics.median((read_bytes / theirs) / (self.bytes_read / ours) for theirs, ours in rounds)

    def cells(self, timings: Timings, name: str, read_bytes: float) -> dict[str, Cell]:
        """The cells of `COLUMNS` for a contender that reads so many bytes in a step."""
        return {
            "gb_per_s": read_bytes / timings.median_s(name) / 1e9,
            "read_gb_per_s": self.bytes_per_s(timings) / 1e9,
            "bandwidth_percent": 100 * self.share(timings, name, read_bytes),
        }

    @property
    def note(self) -> str:
        """What the last two of `COLUMNS` say."""
        return f"machine: read bandwidth in the same rounds ({self.name}); %: of that."

    def contender(self) -> Contender:
        """This reader, to be timed in the rounds of others."""
        return Contender(self.name, self.read)


def l3_bytes() -> int:
    """Size of the last-level cache of the first core; 32 MiB where the system does not say."""
    try:
        text = _L3_SIZE.read_text(encoding="ascii").strip()
    except OSError:
        return _DEFAULT_L3_BYTES
    return int(text.rstrip("KMG")) * _UNITS.get(text[-1], 1)


def readers() -> list[Reader]:
    """Several ways to read one buffer, 16 times the last-level cache; machines differ in which is fastest."""
    rows = 16 * l3_bytes() // (4 * _ROW)
    # Random, because a host may keep equal pages of its guests once, and in its cache.
    buffer = _large_pages(torch.empty(rows, _ROW)).uniform_()
    threads = torch.get_num_threads()
    vector, flat = torch.ones(_ROW), buffer.flatten()
    parts = np.array_split(flat.numpy(), threads)
    integers = np.array_split(flat.numpy().view(np.int64), threads)
    workers = ThreadPoolExecutor(threads)
    return [
        Reader("torch sum", buffer.nbytes, flat.sum),
        Reader("torch matrix-vector product", buffer.nbytes, lambda: torch.mv(buffer, vector)),
        Reader("torch maximum of each row", buffer.nbytes, lambda: torch.amax(buffer, dim=1)),
        Reader("numpy sum in threads", buffer.nbytes, lambda: list(workers.map(np.sum, parts))),
        Reader(
            "numpy bitwise-or in threads",
            buffer.nbytes,
            lambda: list(workers.map(np.bitwise_or.reduce, integers)),
        ),
    ]


def fastest(budget_s: float) -> tuple[Reader, list[Row]]:
    """Time all readers; return the fastest one and a row for each."""
    candidates = readers()
    timings = interleave([r.contender() for r in candidates], budget_s=budget_s)
    best = max(candidates, key=lambda reader: reader.bytes_per_s(timings))
    rows = [
        Row(
            {
                "method": r.name,
                "gb_per_s": r.bytes_per_s(timings) / 1e9,
                "best": "best" if r is best else None,
            }
        )
        for r in candidates
    ]
    return best, rows


def _large_pages(tensor: torch.Tensor) -> torch.Tensor:
    from hf_paged_cache.store.device.memory import advise_huge_pages

    # As the cache asks for its pools: the ceiling should not be held down by the page table.
    advise_huge_pages(tensor)
    return tensor
