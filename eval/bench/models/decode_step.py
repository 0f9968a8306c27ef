"""Whole decode steps of a real model."""

from typing import Any

import torch

from eval.bench import readers
from eval.bench.context import Bench, Context
from eval.bench.models import workload
from eval.core.table import Cell, Column, Row, fixed, plain, required, scientific
from eval.core.timing import STEPS, Contender

CONTEXT_TOKENS = (128, 2048, 8192)
FORMATS = ("int8", "int4")
MIN_SPEEDUP = {"paged": {128: 0.97, 2048: 1.2, 8192: 1.6}, "int8": {8192: 2.0}, "int4": {8192: 2.0}}
"""Of a float32 step, by cache and tokens."""
FORMAT_TOLERANCE = 1e-3  # RMS error ratio of the logits against a `DynamicCache` with the K and V given back

COLUMNS = (
    *plain("dtype", "tokens", "format"),
    Column("dynamic_ms", "Dynamic ms", fixed(1)),
    Column("paged_ms", "Paged ms", fixed(1)),
    Column("over_dynamic", "x Dynamic", fixed(2)),
    Column("without_ms", "no history ms", fixed(1)),
    Column("limit", "limit", fixed(2)),
    Column("read_mb", "reads MB", fixed(0)),
    *readers.COLUMNS,
    Column("error", "error", scientific),
)


def _measure_all(context: Context) -> tuple[list[Row], tuple[str, ...]]:
    rows = []
    for dtype in (torch.float32,) if context.quick else (torch.float32, torch.bfloat16):
        model, source = context.model(dtype)
        for tokens in CONTEXT_TOKENS:
            context.progress(f"decode: {workload.dtype_name(dtype)}, {tokens} tokens")
            with torch.inference_mode():
                rows += measure(context, model, dtype, tokens)
    return rows, (
        f"{source}; one forward of one token over K and V of the others.",
        "no history: the same forward without a cache, which is all of a step but reading K and V; "
        "limit: Dynamic over that, which a cache that costs nothing would reach.",
        "reads: every weight once, and K and V as the cache holds them; GB/s: that over the step; "
        f"{context.bandwidth[0].note}",
        "x: median over rounds of the quotient within a round. "
        "error: RMS ratio of the logits, Paged against Dynamic; of a format against a DynamicCache "
        "with the K and V that the quantized cache gives back.",
    )


BENCH = Bench("decode", "a decode step of the whole model, batch 1", COLUMNS, _measure_all)


def measure(context: Context, model: Any, dtype: torch.dtype, tokens: int) -> list[Row]:
    """Fill a cache of each sort, check their logits, time a step of each."""
    formats = FORMATS if dtype == torch.float32 else ()
    names = ("dynamic", "paged", *formats)
    caches = {name: workload.new_cache(name, model) for name in names}
    # The last step of a turn attends `tokens` tokens: the model was made for no more than the longest, and no
    # step opens a block.
    workload.fill(list(caches.values()), model, tokens - STEPS)
    token = torch.tensor([[42]])
    exact = {name: caches[name] for name in ("dynamic", "paged")}
    errors = {"paged": workload.compare_logits(model, exact, token, dtype)}
    errors |= {name: _format_error(model, name, caches[name], token) for name in formats}
    contenders = [workload.forward_contender(name, model, caches[name], token) for name in names]
    without = Contender(
        "without", lambda: model(token, use_cache=False), prepare=lambda: workload.use("dynamic", model)
    )
    timings = context.race([*contenders, without], 10.0, 7)
    weight_bytes = sum(weights.nbytes for weights in model.parameters())
    rows = []
    for name in names[1:]:
        speedup = timings.speedup(name, "dynamic")
        read_bytes = weight_bytes + caches[name].memory_footprint().used_bytes
        cells: dict[str, Cell] = {
            "dtype": workload.dtype_name(dtype),
            "tokens": tokens,
            "format": "auto" if name == "paged" else name,
            "dynamic_ms": 1e3 * timings.median_s("dynamic"),
            "paged_ms": 1e3 * timings.median_s(name),
            "over_dynamic": speedup,
            "without_ms": 1e3 * timings.median_s("without"),
            "limit": timings.speedup("without", "dynamic"),
            "read_mb": read_bytes / 1e6,
            **context.cells(timings, name, read_bytes),
            "error": errors[name],
        }
        limit = MIN_SPEEDUP[name].get(tokens) if dtype == torch.float32 else None
        rows.append(Row(cells, required("Dynamic", speedup, limit)))
    return rows


def _format_error(model: Any, name: str, cache: Any, token: torch.Tensor) -> float:
    """Difference of the logits with a quantized cache and with its own K and V in full precision."""
    logits = workload.forward(name, model, cache, token)
    repeated = workload.replay(cache, model, token.shape[1])
    workload.remove_last(cache, token.shape[1])
    want = workload.forward("dynamic", model, repeated, token)
    return workload.check(f"logits with a cache in {name}", logits, want, FORMAT_TOLERANCE)
