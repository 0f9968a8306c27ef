"""Prompts: into an empty cache, and as a chunk after a history."""

from functools import partial
from typing import Any

import torch

from eval.bench import readers
from eval.bench.context import Bench, Context
from eval.bench.models import workload
from eval.core.table import Cell, Column, Row, fixed, required, scientific
from eval.core.timing import Contender

PROMPT_TOKENS = 2048
CHUNK_TOKENS = 512
MIN_SPEEDUP = 0.95  # within 5 %
_NAMES = ("dynamic", "paged")

COLUMNS = (
    Column("case", "case"),
    Column("dynamic_ms", "Dynamic ms", fixed(0)),
    Column("paged_ms", "Paged ms", fixed(0)),
    Column("over_dynamic", "x Dynamic", fixed(3)),
    *readers.COLUMNS,
    Column("error", "error", scientific),
)


def _measure(context: Context) -> tuple[list[Row], tuple[str, ...]]:
    model, source = context.model(torch.float32)
    prompt = workload.random_ids(model, PROMPT_TOKENS)
    with torch.inference_mode():
        rows = [_prompt(context, model, prompt), _chunk(context, model, prompt[:, :CHUNK_TOKENS])]
    return rows, (
        f"{source}. The empty cache is a new one each time, so the paged pool's first touch is counted.",
        "GB/s: K and V of the history over the whole forward, which computes more than it reads; "
        f"{context.bandwidth[0].note}",
        "x: median over rounds of the quotient within a round. "
        "error: RMS ratio of the logits, Paged against Dynamic.",
    )


BENCH = Bench("prefill", "prompts of the whole model, batch 1, float32", COLUMNS, _measure)


def _prompt(context: Context, model: Any, prompt: torch.Tensor) -> Row:
    context.progress(f"prefill: {PROMPT_TOKENS} tokens into an empty cache")

    def forward(name: str) -> torch.Tensor:
        return workload.forward(name, model, workload.new_cache(name, model), prompt)

    logits = {name: forward(name) for name in _NAMES}
    error = workload.check_logits(logits, f"{PROMPT_TOKENS} tokens", torch.float32)
    contenders = [Contender(name, partial(forward, name)) for name in _NAMES]
    return _row(context, f"{PROMPT_TOKENS} tokens, empty cache", contenders, error, None)


def _chunk(context: Context, model: Any, chunk: torch.Tensor) -> Row:
    context.progress(f"prefill: {CHUNK_TOKENS} tokens after {PROMPT_TOKENS}")
    caches = {name: workload.new_cache(name, model) for name in _NAMES}
    workload.fill(list(caches.values()), model, PROMPT_TOKENS)
    error = workload.compare_logits(model, caches, chunk, torch.float32)
    contenders = [workload.forward_contender(name, model, caches[name], chunk) for name in _NAMES]
    history_bytes = caches["paged"].memory_footprint().used_bytes
    return _row(context, f"{CHUNK_TOKENS} tokens after {PROMPT_TOKENS}", contenders, error, history_bytes)


def _row(
    context: Context, case: str, contenders: list[Contender], error: float, history_bytes: int | None
) -> Row:
    timings = context.race(contenders, 20.0, 5, max_rounds=15, steps=1)
    speedup = timings.speedup("paged", "dynamic")
    cells: dict[str, Cell] = {
        "case": case,
        **{f"{name}_ms": 1e3 * timings.median_s(name) for name in _NAMES},
        "over_dynamic": speedup,
        **({} if history_bytes is None else context.cells(timings, "paged", history_bytes)),
        "error": error,
        "rounds": len(timings.seconds["paged"]),
    }
    return Row(cells, required("Dynamic", speedup, MIN_SPEEDUP))
