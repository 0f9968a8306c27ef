"""The bookkeeping of blocks: how long taking and returning one takes, in whole pools and requests of a few.

The sizes take turns within every repetition, so that a change of the machine's speed meets them all. The time
is the thread's own CPU time, so other processes count little. Requests are returned in random order: what a
large pool costs more is the processor's cache missing, the number of steps is the same.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

from eval.bench.context import Bench, Context
from eval.core.table import Cell, Column, Row, fixed, required
from hf_paged_cache.blocks import BlockPool

POOL_SIZES = (1_000, 10_000, 100_000)
BLOCKS_PER_REQUEST = 8
MIN_BLOCKS_PER_TIMING = 100_000
REPETITIONS = 9
LIMIT_US = 2.0

Requests = list[list[int]]


def _measure(context: Context) -> tuple[list[Row], tuple[str, ...]]:
    repetitions: list[dict[int, dict[str, float]]] = []
    for repetition in range(context.rounds(REPETITIONS)):
        context.progress(f"blocks: repetition {repetition + 1}")
        repetitions.append({num_blocks: time_pool(num_blocks) for num_blocks in POOL_SIZES})
    return [_row(operation, repetitions) for operation in repetitions[0][POOL_SIZES[0]]], (
        f"CPU time per block, requests of {BLOCKS_PER_REQUEST} blocks, medians; "
        f"x: over the pool of {POOL_SIZES[0]:,} blocks.",
    )


def _columns() -> tuple[Column, ...]:
    columns = [Column("operation", "operation")]
    for size in POOL_SIZES:
        columns.append(Column(f"us_at_{size}", f"{size:,} blocks: µs", fixed(3)))
        columns.append(Column(f"ratio_at_{size}", "x", fixed(2)))
    del columns[2]  # of the smallest pool to itself
    return tuple(columns)


BENCH = Bench("blocks", "bookkeeping of one block, by size of the pool", _columns(), _measure)


def _row(operation: str, repetitions: list[dict[int, dict[str, float]]]) -> Row:
    cells: dict[str, Cell] = {"operation": operation}
    medians = [statistics.median(timed[size][operation] for timed in repetitions) for size in POOL_SIZES]
    for size, median in zip(POOL_SIZES, medians, strict=True):
        cells[f"us_at_{size}"] = median
        cells[f"ratio_at_{size}"] = None if size == POOL_SIZES[0] else median / medians[0]
    return Row(cells, required("slowest", max(medians), LIMIT_US, at_least=False, unit=" µs"))


def time_pool(num_blocks: int) -> dict[str, float]:
    """µs per block of each operation, taking and returning all blocks of a pool."""
    pool = BlockPool(num_blocks)
    rounds = max(1, MIN_BLOCKS_PER_TIMING // num_blocks)
    seconds: dict[str, float] = {}

    def timed(operation: str, action: Callable[[], None]) -> None:
        gc.disable()  # a collection would be billed to whichever operation it happens to meet
        begin = time.thread_time()
        action()
        seconds[operation] = seconds.get(operation, 0.0) + time.thread_time() - begin
        gc.enable()

    for i in range(rounds):
        requests: Requests = [[] for _ in range(num_blocks // BLOCKS_PER_REQUEST)]
        timed("allocate", partial(_fill, pool, requests))
        random.Random(i).shuffle(requests)  # sequences end in any order
        timed("release", partial(_release, pool, requests))
        _fill(pool, requests)
        for block_id in range(num_blocks):
            pool.seal(block_id)
        random.Random(i).shuffle(requests)
        timed("release, keep", partial(_release, pool, requests, keep=True))
        random.Random(-i).shuffle(requests)
        timed("share (revive)", partial(_share, pool, requests))
        _release(pool, requests, keep=True)
        timed("allocate (evict)", partial(_fill, pool, requests))
        _release(pool, requests)
    return {operation: 1e6 * total / (rounds * num_blocks) for operation, total in seconds.items()}


def _fill(pool: BlockPool, requests: Requests) -> None:
    for i in range(len(requests)):
        block_ids = pool.allocate(BLOCKS_PER_REQUEST)
        if block_ids is None:
            raise AssertionError(f"The pool was short of blocks at request {i} of {len(requests)}.")
        requests[i] = block_ids


def _release(pool: BlockPool, requests: Requests, *, keep: bool = False) -> None:
    for block_ids in requests:
        pool.release(block_ids, keep=keep)


def _share(pool: BlockPool, requests: Requests) -> None:
    for block_ids in requests:
        pool.share(block_ids)
