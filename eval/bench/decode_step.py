"""Whole decode steps of a real model."""

from __future__ import annotations

import time
from typing import Any

import torch

from eval.bench import workload
from eval.bench.context import Context
from eval.bench.results import Bound, Cell, Column, Result, Row, fixed, scientific
from eval.bench.timing import STEPS, Contender, interleave

CONTEXT_TOKENS = (128, 2048, 8192)
MIN_SPEEDUP = {128: 0.97, 2048: 1.2, 8192: 1.6}
"""Of a float32 step."""

COLUMNS = (
    Column("dtype", "dtype"),
    Column("tokens", "tokens"),
    Column("dynamic_ms", "Dynamic ms", fixed(1)),
    Column("paged_ms", "Paged ms", fixed(1)),
    Column("over_dynamic", "x Dynamic", fixed(2)),
    Column("without_ms", "no history ms", fixed(1)),
    Column("limit", "limit", fixed(2)),
    Column("error", "error", scientific),
)


def run(context: Context) -> Result:
    """The `decode` bench."""
    started_s = time.perf_counter()
    rows = []
    for dtype in (torch.float32,) if context.quick else (torch.float32, torch.bfloat16):
        model, source = context.model(dtype)
        for tokens in CONTEXT_TOKENS:
            context.progress(f"decode: {workload.dtype_name(dtype)}, {tokens} tokens")
            with torch.inference_mode():
                rows.append(_measure(context, model, dtype, tokens))
    return Result(
        "decode",
        "a decode step of the whole model, batch 1",
        COLUMNS,
        rows,
        (
            f"{source}; one forward of one token over K and V of the others.",
            "no history: the same forward without a cache, which is all of a step but reading K and V; "
            "limit: Dynamic over that, which a cache that costs nothing would reach.",
            "x: median over rounds of the quotient within a round. "
            "error: RMS ratio of the logits, Paged against Dynamic.",
        ),
        time.perf_counter() - started_s,
    )


def _measure(context: Context, model: Any, dtype: torch.dtype, tokens: int) -> Row:
    names = ("dynamic", "paged")
    caches = {name: workload.new_cache(name, model) for name in names}
    # The last step of a turn attends `tokens` tokens: the model was made for no more than the longest.
    workload.fill(list(caches.values()), model, tokens - STEPS)
    token = torch.tensor([[42]])
    error = workload.compare_logits(model, caches, token, dtype)
    timings = interleave(
        [
            *(workload.forward_contender(name, model, caches[name], token) for name in names),
            Contender(
                "without",
                lambda: model(token, use_cache=False),
                prepare=lambda: workload.use("dynamic", model),
            ),
        ],
        budget_s=context.budget_s(10.0),
        min_rounds=context.rounds(7),
    )
    speedup = timings.speedup("paged", "dynamic")
    cells: dict[str, Cell] = {
        "dtype": workload.dtype_name(dtype),
        "tokens": tokens,
        **{f"{name}_ms": 1e3 * timings.median_s(name) for name in names},
        "over_dynamic": speedup,
        "without_ms": 1e3 * timings.median_s("without"),
        "limit": timings.speedup("without", "dynamic"),
        "error": error,
        "rounds": len(timings.seconds["paged"]),
    }
    bounds = (Bound("Dynamic", speedup, MIN_SPEEDUP[tokens]),) if dtype == torch.float32 else ()
    return Row(cells, bounds)
