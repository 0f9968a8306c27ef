"""Peak memory of one long `generate` call, each cache in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from eval.bench.context import Context
from eval.core.table import Bound, Cell, Column, Result, Row, WrongAnswer, fixed

COLUMNS = (
    Column("case", "case"),
    Column("cache", "cache"),
    Column("peak_mb", "peak MB", fixed(1)),
    Column("rise_mb", "over baseline MB", fixed(1)),
    Column("rise_ratio", "x Dynamic", fixed(2)),
    Column("kv_mb", "K and V MB", fixed(1)),
    Column("over_kv_mb", "rise - K and V MB", fixed(1)),
    Column("pool_bytes", "pool bytes", "{:,}".format),
    Column("formula_bytes", "formula bytes", "{:,}".format),
)


@dataclass(frozen=True)
class _Case:
    """One call, `chunk` tokens of the prompt at a time (0: all at once).

    `required`: caches that must stay below DynamicCache.
    """

    total_tokens: int
    new_tokens: int
    chunk: int
    required: tuple[str, ...]

    def __str__(self) -> str:
        prompt = f"in chunks of {self.chunk}" if self.chunk else "at once"
        return f"{self.total_tokens} tokens, prompt {prompt}"


FORMATS = ("int8", "int4")
CACHES = ("dynamic", "paged", *FORMATS)
_CASES = (
    _Case(8192, 64, 512, required=("paged", *FORMATS)),
    _Case(4097, 1, 0, required=FORMATS),
    _Case(2048, 16, 0, required=()),
)
_QUICK_CASES = (_Case(2048, 16, 512, required=("paged", *FORMATS)),)


def run(context: Context) -> Result:
    """The `memory` bench."""
    started_s = time.perf_counter()
    rows: list[Row] = []
    method = ""
    for case in _QUICK_CASES if context.quick else _CASES:
        measured = {}
        for name in CACHES:
            context.progress(f"memory: {name}, {case}")
            measured[name] = _in_own_process(name, case)
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
            f"{method}; baseline: after loading the model and one short generate; x: rise over that of "
            "DynamicCache. MB = 10^6 bytes.",
            "K and V: in the model's dtype; of a format as it holds them. formula: 2 * layers * kv_heads * "
            "head_dim * dtype_bytes * blocks * block_size, of a pool in the model's dtype, whose tokens are "
            "those of DynamicCache.",
            "A prompt at once peaks in its own activations, which no cache changes: there they differ "
            "by how well the C library re-uses freed memory: tens of MB, this way or that, from run to run.",
        ),
        time.perf_counter() - started_s,
    )


def _row(case: _Case, name: str, measured: dict[str, dict[str, Any]]) -> Row:
    taken = measured[name]
    pool: int | None = taken.get("pool_bytes")
    formula: int | None = taken.get("formula_bytes")
    cells: dict[str, Cell] = {
        "case": str(case),
        "cache": name,
        "peak_mb": taken["peak_bytes"] / 1e6,
        "rise_mb": taken["rise_bytes"] / 1e6,
        "rise_ratio": _ratio(taken["rise_bytes"], measured["dynamic"]["rise_bytes"]),
        "kv_mb": taken["kv_bytes"] / 1e6,
        "over_kv_mb": (taken["rise_bytes"] - taken["kv_bytes"]) / 1e6,
        "pool_bytes": pool,
        "formula_bytes": formula,
    }
    if name == "paged" and (pool is None or pool != formula):
        raise WrongAnswer(f"memory, {case}: the pool has {pool} bytes, and the formula gives {formula}")
    if name not in case.required:
        return Row(cells)
    peak_mb, dynamic_mb = (measured[cache]["peak_bytes"] / 1e6 for cache in (name, "dynamic"))
    return Row(cells, (Bound("peak", peak_mb, dynamic_mb, at_least=False, unit=" MB"),))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _in_own_process(name: str, case: _Case) -> dict[str, Any]:
    numbers = (case.total_tokens - case.new_tokens, case.new_tokens, case.chunk)
    finished = subprocess.run(
        [sys.executable, "-m", "eval.bench.memory_child", name, *(str(number) for number in numbers)],
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
