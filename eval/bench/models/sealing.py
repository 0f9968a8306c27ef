"""The cost of encoding a block when it is full, spread over the steps that fill it."""

from typing import Any

import torch

from eval.bench import readers
from eval.bench.context import Bench, Context
from eval.bench.models import workload
from eval.core.table import Cell, Column, Row, fixed, plain, required, scientific
from eval.core.timing import STEPS, Contender

FORMATS = ("int4", "int8_block", "int4_group")  # that encode whole blocks; others encode token by token
REQUIRED = "int4"
CONTEXT_TOKENS = (128, 2048, 8192)
MAX_SHARE_PERCENT = 3.0  # of a decode step, per token
TOLERANCE = 1e-2  # RMS ratio to the block that plain torch encodes: where a value lies between two codes

COLUMNS = (
    *plain("format", "tokens"),
    Column("step_ms", "step ms", fixed(2)),
    Column("seal_ms", "seal ms", fixed(3)),
    Column("per_token_us", "µs a token", fixed(1)),
    Column("share_percent", "% of a step", fixed(2)),
    *readers.COLUMNS,
    Column("error", "error", scientific),
)


def _measure_all(context: Context) -> tuple[list[Row], tuple[str, ...]]:
    model, source = context.model(torch.float32)
    rows = []
    with torch.inference_mode():
        for name in (REQUIRED,) if context.quick else FORMATS:
            for tokens in CONTEXT_TOKENS if name == REQUIRED else CONTEXT_TOKENS[-1:]:
                context.progress(f"sealing: {name}, {tokens} tokens")
                rows.append(measure(context, model, name, tokens))
    return rows, (
        f"{source}. step: a forward of one token over K and V of the others; seal: one block.",
        "% of a step: seal over the tokens of a block over a step; median of quotients within a round.",
        "GB/s: K and V of the block over sealing it, which may lie in the processor's caches; "
        f"{context.bandwidth[0].note}",
        "error: RMS ratio of what the sealed block gives back against one sealed by plain torch.",
    )


TITLE = "encoding a full block of all layers and heads, batch 1, float32 model"
BENCH = Bench("sealing", TITLE, COLUMNS, _measure_all)


def measure(context: Context, model: Any, name: str, tokens: int) -> Row:
    """Time a decode step and the sealing of a block beside it."""
    cache = workload.new_cache(name, model)
    workload.fill([cache], model, tokens - STEPS)
    pool, slot, record = _open_block(cache)
    pool.seal([slot], [record])
    expected = torch.empty_like(pool.records[record])
    pool.layout.encode(pool.keys[slot], pool.values[slot], expected)
    sides = zip(pool.layout.decode(pool.records[record]), pool.layout.decode(expected), strict=True)
    error = max(workload.check(f"a block sealed in {name}", *side, TOLERANCE) for side in sides)
    step = workload.forward_contender(name, model, cache, torch.tensor([[42]]))
    timings = context.race([step, Contender("seal", lambda: pool.seal([slot], [record]))], 5.0, 9)
    block_size, seal_s = cache.stats().block_size, timings.median_s("seal")
    share = 100 / block_size / timings.speedup("seal", name)
    cells: dict[str, Cell] = {
        "format": name,
        "tokens": tokens,
        "step_ms": 1e3 * timings.median_s(name),
        "seal_ms": 1e3 * seal_s,
        "per_token_us": 1e6 * seal_s / block_size,
        "share_percent": share,
        **context.cells(timings, "seal", pool.keys[slot].nbytes + pool.values[slot].nbytes),
        "error": error,
    }
    limit = MAX_SHARE_PERCENT if name == REQUIRED else None
    return Row(cells, required("of a step", share, limit, at_least=False, unit=" %"))


def _open_block(cache: Any) -> tuple[Any, int, int]:
    """The pool of all layers, a slot with K and V in it, and the record of its block, not yet in use."""
    (group,) = cache._state.groups
    (pool,) = group.pools
    table = group.manager.tables[0]
    column, slot = min(group.dense.columns_of(table))
    written = int(cache.get_seq_length()) - column * cache.stats().block_size
    for states in (pool.keys, pool.values):
        states[slot, ..., written:, :] = 0  # memory that nobody has written may hold NaN
    return pool, slot, table.ids[column]
