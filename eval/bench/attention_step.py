"""One decode step of one attention layer: writing the new token, and attending all of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from eval.bench import layer_stacks, readers
from eval.bench.context import Context
from eval.bench.layer_stacks import Case, LayerStack, Shape
from eval.bench.readers import Reader, l3_bytes
from eval.bench.timing import Contender, Timings, interleave
from eval.bench.workload import check, dtype_name, rms_ratio
from eval.core.table import Bound, Cell, Column, Result, Row, fixed, scientific

SHAPES = (Shape("SmolLM2-135M", 9, 3, 64), Shape("Llama-3-8B", 32, 8, 128))
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""RMS error ratio against attention computed in float32."""
MIN_SPEEDUP = {torch.float32: 3.5, torch.bfloat16: 3.0}
MIN_BANDWIDTH_SHARE = 0.55
LONG_TOKENS = 8192

COLUMNS = (
    Column("shape", "shape"),
    Column("batch", "batch"),
    Column("dtype", "dtype"),
    Column("tokens", "tokens"),
    Column("dynamic_us", "Dynamic µs", fixed(0)),
    Column("static_us", "Static µs", fixed(0)),
    Column("paged_us", "Paged µs", fixed(0)),
    Column("over_dynamic", "x Dynamic", fixed(2)),
    Column("over_static", "x Static", fixed(2)),
    *readers.COLUMNS,
    Column("error", "error", scientific),
)


@dataclass(frozen=True)
class _Effort:
    budget_s: float
    min_rounds: int


def cases(quick: bool) -> Iterator[Case]:
    """Every case, or the few that say most."""
    for shape in SHAPES:
        for batch in (1,) if quick else (1, 8):
            for dtype in (torch.float32, torch.bfloat16):
                for tokens in (512, LONG_TOKENS) if quick else (512, 2048, LONG_TOKENS):
                    yield Case(shape, batch, dtype, tokens)


def run(context: Context) -> Result:
    """The `attention` bench."""
    reader, _ = context.bandwidth
    started_s = time.perf_counter()
    rows = []
    for case in cases(context.quick):
        context.progress(f"attention: {case}")
        seconds = 4.0 if case.batch == 1 else 2.0
        rows.append(measure(case, reader, _Effort(context.budget_s(seconds), context.rounds(5))))
    return Result(
        "attention",
        "write of a new token and attention, per layer call",
        COLUMNS,
        rows,
        (
            "Dynamic: torch.cat and SDPA; Static: index_copy_, the mask that generate makes, SDPA. "
            f"Calls go round so many layers that their K and V are {4 * l3_bytes() >> 20} MiB or more.",
            "x: median over rounds of the quotient within a round. GB/s: K and V bytes over the whole call; "
            f"{reader.note}",
            "error: RMS ratio of Paged against attention in float32 over the DynamicCache's K and V.",
        ),
        time.perf_counter() - started_s,
    )


def measure(case: Case, reader: Reader, effort: _Effort) -> Row:
    """Fill the caches, check their answers, time them.

    Raises:
        WrongAnswer: a cache's attention is not what it should be.
    """
    with torch.no_grad():
        stacks = layer_stacks.filled(case)
        errors = _check(case, stacks)
        contenders = [Contender(stack.name, stack.step, stack.restore) for stack in stacks]
        contenders.append(reader.contender())
        timings = interleave(contenders, budget_s=effort.budget_s, min_rounds=effort.min_rounds)
    return _row(case, reader, timings, errors)


def _row(case: Case, reader: Reader, timings: Timings, errors: dict[str, float]) -> Row:
    layers = case.layers
    speedup = timings.speedup("paged", "dynamic")
    share = reader.share(timings, "paged", case.kv_bytes * layers)
    cells: dict[str, Cell] = {
        "shape": case.shape.name,
        "batch": case.batch,
        "dtype": dtype_name(case.dtype),
        "tokens": case.tokens,
        "dynamic_us": 1e6 * timings.median_s("dynamic") / layers,
        "static_us": 1e6 * timings.median_s("static") / layers,
        "paged_us": 1e6 * timings.median_s("paged") / layers,
        "over_dynamic": speedup,
        "over_static": timings.speedup("paged", "static"),
        **reader.cells(timings, "paged", case.kv_bytes * layers),
        "error": errors["paged"],
        "layers": layers,
        "rounds": len(timings.seconds["paged"]),
    }
    return Row(cells, tuple(_bounds(case, speedup, share)))


def _bounds(case: Case, speedup: float, share: float) -> Iterator[Bound]:
    if case.tokens != LONG_TOKENS or case.batch != 1:
        return
    yield Bound("Dynamic", speedup, MIN_SPEEDUP[case.dtype])
    if case.dtype == torch.float32:
        yield Bound("bandwidth", 100 * share, 100 * MIN_BANDWIDTH_SHARE, unit=" %")


def _check(case: Case, stacks: list[LayerStack]) -> dict[str, float]:
    """The error of each stack against attention in float32; `WrongAnswer` if one is too large."""
    dynamic = next(stack for stack in stacks if stack.name == "dynamic")
    errors = {stack.name: 0.0 for stack in stacks}
    for layer_idx in sorted({0, case.layers - 1}):
        got = {stack.name: stack.attend(layer_idx) for stack in stacks}
        want = _attention_in_float32(case, dynamic, layer_idx)
        for name, output in got.items():
            error = check(f"{name} cache, {case}", rms_ratio(output, want), TOLERANCE[case.dtype])
            errors[name] = max(errors[name], error)
    for stack in stacks:
        stack.finish_pass(done={0, case.layers - 1})
        stack.restore(1)
    return errors


def _attention_in_float32(case: Case, dynamic: LayerStack, layer_idx: int) -> torch.Tensor:
    layer = dynamic.cache.layers[layer_idx]
    outputs = []
    for row in range(case.batch):  # a row at a time: the float32 copies stay small
        keys, values = layer.keys[row].float(), layer.values[row].float()
        query = dynamic.query[row].float().view(case.shape.kv_heads, -1, case.shape.head_dim)
        weights = (query @ keys.transpose(1, 2) * dynamic.scaling).softmax(dim=-1)
        outputs.append((weights @ values).view(1, case.shape.q_heads, -1))
    return torch.stack(outputs)  # [batch, 1, q_heads, head_dim]
