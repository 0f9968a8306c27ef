"""The bookkeeping of blocks, as `python -m eval.bench_blocks` measures it."""

from __future__ import annotations

import statistics
import time

from eval import bench_blocks
from eval.bench.context import Context
from eval.bench.results import Bound, Cell, Column, Result, Row, fixed


def run(context: Context) -> Result:
    """The `blocks` bench."""
    started_s = time.perf_counter()
    timings: dict[str, dict[int, list[float]]] = {}
    for repetition in range(context.rounds(bench_blocks.REPETITIONS)):
        context.progress(f"blocks: repetition {repetition + 1}")
        for num_blocks in bench_blocks.POOL_SIZES:
            for operation, microseconds in bench_blocks.time_pool(num_blocks).items():
                timings.setdefault(operation, {}).setdefault(num_blocks, []).append(microseconds)
    columns = (
        Column("operation", "operation"),
        *(Column(_key(size), f"{size:,} blocks: µs", fixed(3)) for size in bench_blocks.POOL_SIZES),
    )
    return Result(
        "blocks",
        "bookkeeping of one block, by size of the pool",
        columns,
        [_row(operation, by_size) for operation, by_size in timings.items()],
        (f"CPU time per block, requests of {bench_blocks.BLOCKS_PER_REQUEST} blocks, medians",),
        time.perf_counter() - started_s,
    )


def _row(operation: str, by_size: dict[int, list[float]]) -> Row:
    medians = {size: statistics.median(values) for size, values in by_size.items()}
    cells: dict[str, Cell] = {
        "operation": operation,
        **{_key(size): value for size, value in medians.items()},
    }
    slowest = Bound("slowest", max(medians.values()), bench_blocks.LIMIT_US, at_least=False, unit=" µs")
    return Row(cells, (slowest,))


def _key(num_blocks: int) -> str:
    return f"us_at_{num_blocks}"
