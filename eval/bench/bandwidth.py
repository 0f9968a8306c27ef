"""How fast this machine reads memory: the ceiling of attention over a long context."""

from __future__ import annotations

import time

import torch

from eval.bench.context import Context
from eval.bench.readers import l3_bytes
from eval.core.table import Column, Result, fixed


def run(context: Context) -> Result:
    """The `bandwidth` bench."""
    started_s = time.perf_counter()
    _, rows = context.bandwidth
    return Result(
        "bandwidth",
        "reading memory",
        (Column("method", "method"), Column("gb_per_s", "GB/s", fixed(1)), Column("best", "")),
        rows,
        (
            f"float32 buffer of {16 * l3_bytes() >> 20} MiB, 16 times the last-level cache, "
            f"{torch.get_num_threads()} threads, medians",
        ),
        time.perf_counter() - started_s,
    )
