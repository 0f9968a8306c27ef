"""Peak memory of one long `generate` call, each cache in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from eval.bench.context import Context
from eval.bench.results import Bound, Cell, Column, Result, Row, WrongAnswer, fixed

COLUMNS = (
    Column("case", "case"),
    Column("cache", "cache"),
    Column("peak_mb", "peak MB", fixed(1)),
    Column("rise_mb", "over baseline MB", fixed(1)),
    Column("kv_mb", "K and V MB", fixed(1)),
    Column("over_kv_mb", "rise - K and V MB", fixed(1)),
    Column("pool_bytes", "pool bytes", "{:,}".format),
    Column("formula_bytes", "formula bytes", "{:,}".format),
)


def run(context: Context) -> Result:
    """The `memory` bench."""
    started_s = time.perf_counter()
    total, new_tokens = (2048, 16) if context.quick else (8192, 64)
    rows: list[Row] = []
    method = ""
    for chunk, case in (
        (512, f"to {total} tokens, prompt in chunks of 512"),
        (0, f"to {total} tokens, prompt at once"),
    ):
        measured = {}
        for name in ("dynamic", "paged"):
            context.progress(f"memory: {name}, {case}")
            measured[name] = _in_own_process(name, total - new_tokens, new_tokens, chunk)
        if measured["dynamic"]["tokens"] != measured["paged"]["tokens"]:
            raise WrongAnswer(f"memory, {case}: the paged cache generated other tokens than DynamicCache")
        rows += [_row(case, name, measured) for name in measured]
        method = measured["paged"]["method"]
    return Result(
        "memory",
        "peak of one generate call, SmolLM2-135M float32, batch 1",
        COLUMNS,
        rows,
        (
            f"{method}; baseline: after loading the model and one short generate. MB = 10^6 bytes.",
            "formula: 2 * layers * kv_heads * head_dim * dtype_bytes * blocks * block_size. "
            "Both caches generated the same tokens.",
        ),
        time.perf_counter() - started_s,
    )


def _row(case: str, name: str, measured: dict[str, dict[str, Any]]) -> Row:
    taken = measured[name]
    pool: int | None = taken.get("pool_bytes")
    formula: int | None = taken.get("formula_bytes")
    cells: dict[str, Cell] = {
        "case": case,
        "cache": name,
        "peak_mb": taken["peak_bytes"] / 1e6,
        "rise_mb": taken["rise_bytes"] / 1e6,
        "kv_mb": taken["kv_bytes"] / 1e6,
        "over_kv_mb": (taken["rise_bytes"] - taken["kv_bytes"]) / 1e6,
        "pool_bytes": pool,
        "formula_bytes": formula,
    }
    if name != "paged":
        return Row(cells)
    if pool is None or pool != formula:
        raise WrongAnswer(f"memory, {case}: the pool has {pool} bytes, and the formula gives {formula}")
    return Row(
        cells,
        (
            Bound(
                "peak",
                taken["peak_bytes"] / 1e6,
                measured["dynamic"]["peak_bytes"] / 1e6,
                at_least=False,
                unit=" MB",
            ),
        ),
    )


def _in_own_process(name: str, prompt_tokens: int, new_tokens: int, chunk: int) -> dict[str, Any]:
    arguments = [name, str(prompt_tokens), str(new_tokens), str(chunk)]
    finished = subprocess.run(
        [sys.executable, "-m", "eval.bench.memory_child", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        lines = "\n".join(finished.stderr.splitlines()[-15:])
        raise RuntimeError(
            f"the process measuring the {name} cache ended with {finished.returncode}:\n{lines}"
        )
    measured: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return measured
