"""How long the bookkeeping of one block takes: `python -m eval.bench_blocks`.

Takes and returns whole pools of 1k, 10k and 100k blocks in requests of a few blocks, as sequences do. The
sizes take turns within every repetition, so that a change of the machine's speed meets them all. The time is
the thread's own CPU time, so that other processes count little; medians. Requests are returned in random
order: what a large pool costs more is the processor's cache missing, the number of steps is the same.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

from hf_paged_cache.blocks import BlockPool

POOL_SIZES = (1_000, 10_000, 100_000)
BLOCKS_PER_REQUEST = 8
MIN_BLOCKS_PER_TIMING = 100_000
REPETITIONS = 9
LIMIT_US = 2.0

Requests = list[list[int]]


def main() -> None:
    """Print µs per block of every operation and pool size, with the ratio to the smallest pool."""
    timings: dict[tuple[str, int], list[float]] = {}
    for _ in range(REPETITIONS):
        for num_blocks in POOL_SIZES:
            for operation, microseconds in time_pool(num_blocks).items():
                timings.setdefault((operation, num_blocks), []).append(microseconds)
    print(f"µs of CPU time per block, median of {REPETITIONS}, requests of {BLOCKS_PER_REQUEST} blocks")
    print(f"{'':24}" + "".join(f"{f'{size:,} blocks':>22}" for size in POOL_SIZES))
    worst = 0.0
    for operation in dict.fromkeys(operation for operation, _ in timings):
        medians = [statistics.median(timings[operation, size]) for size in POOL_SIZES]
        worst = max(worst, *medians)
        print(f"{operation:24}" + "".join(f"{m:>14.3f} ({m / medians[0]:4.2f}x)" for m in medians))
    print(f"slowest {worst:.3f} µs, limit {LIMIT_US} µs: {'kept' if worst <= LIMIT_US else 'EXCEEDED'}")


def time_pool(num_blocks: int) -> dict[str, float]:
    """µs per block of each operation, taking and returning all blocks of a pool."""
    pool = BlockPool(num_blocks)
    rounds = max(1, MIN_BLOCKS_PER_TIMING // num_blocks)
    operations = ("allocate", "release", "release, keep", "share (revive)", "allocate (evict)")
    seconds = dict.fromkeys(operations, 0.0)
    for i in range(rounds):
        requests = _requests_of(pool)
        seconds["allocate"] += _time(partial(_fill, pool, requests))
        random.Random(i).shuffle(requests)  # sequences end in any order
        seconds["release"] += _time(partial(_release, pool, requests))
        _fill(pool, requests)
        for block_id in range(num_blocks):
            pool.seal(block_id)
        random.Random(i).shuffle(requests)
        seconds["release, keep"] += _time(partial(_release, pool, requests, keep=True))
        random.Random(-i).shuffle(requests)
        seconds["share (revive)"] += _time(partial(_share, pool, requests))
        _release(pool, requests, keep=True)
        seconds["allocate (evict)"] += _time(partial(_fill, pool, requests))
        _release(pool, requests)
    return {operation: 1e6 * total / (rounds * num_blocks) for operation, total in seconds.items()}


def _requests_of(pool: BlockPool) -> Requests:
    return [[] for _ in range(pool.num_blocks // BLOCKS_PER_REQUEST)]


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


def _time(action: Callable[[], None]) -> float:
    gc.disable()  # a collection would be billed to whichever operation it happens to meet
    begin = time.thread_time()
    action()
    seconds = time.thread_time() - begin
    gc.enable()
    return seconds


if __name__ == "__main__":
    main()
