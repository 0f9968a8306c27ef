"""One decode step of one attention layer for each way to keep K and V in few bits."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from eval.bench import layer_stacks, readers
from eval.bench.context import Context
from eval.bench.layer_stacks import Case, LayerStack, Shape
from eval.bench.readers import Reader, l3_bytes
from eval.bench.timing import STEPS, Contender, Timings, interleave
from eval.bench.workload import check, rms_ratio
from eval.caches import CacheUnavailable
from eval.caches.stock import quantized_cache
from eval.core.table import Bound, Cell, Column, Result, Row, WrongAnswer, fixed, scientific
from hf_paged_cache.config import LayerDtype

SHAPES = (Shape("SmolLM2-135M", 9, 3, 64), Shape("Llama-3-8B", 32, 8, 128))
TOKENS = (2048, 8192, 32768)
FORMATS: tuple[LayerDtype, ...] = ("auto", "int8", "fp8", "k8v4", "int4")
STOCK = "quanto"
STOCK_LAYERS = 2
"""It computes for so long that nothing is gained by memory that is near."""
LEAST_BITS = 4.5
TOLERANCE = 1e-3
"""RMS error ratio against attention in float32 over the K and V that the cache gives back."""
MIN_SPEEDUP = {
    ("Llama-3-8B", "int8"): 9.0,
    ("Llama-3-8B", "int4"): 10.0,
    ("SmolLM2-135M", "int8"): 6.0,
    ("SmolLM2-135M", "int4"): 6.0,
}
"""Over DynamicCache in float32 at `JUDGED_TOKENS` tokens, on a processor with AVX-512."""
JUDGED_TOKENS = 8192

COLUMNS = (
    Column("shape", "shape"),
    Column("tokens", "tokens"),
    Column("format", "format"),
    Column("us", "µs", fixed(0)),
    Column("dynamic_us", "Dynamic µs", fixed(0)),
    Column("over_dynamic", "x Dynamic", fixed(2)),
    Column("over_stock", "x stock", fixed(1)),
    *readers.COLUMNS,
    Column("error", "error", scientific),
)


def run(context: Context) -> Result:
    """The `formats` bench."""
    started_s = time.perf_counter()
    reader, _ = context.bandwidth
    rows: list[Row] = []
    missing: set[str] = set()
    for shape in SHAPES:
        for tokens in (JUDGED_TOKENS,) if context.quick else TOKENS:
            context.progress(f"formats: {shape.name}, {tokens} tokens")
            rows += measure(context, shape, tokens, reader, missing)
    return Result(
        "formats",
        "write of a new token and attention, per layer call, batch 1, float32 model",
        COLUMNS,
        rows,
        (
            "Dynamic: DynamicCache in float32 (torch.cat and SDPA). Calls go round so many layers that the "
            f"smallest format's K and V are {4 * l3_bytes() >> 20} MiB. The last step of a turn attends so "
            "many tokens.",
            f"stock: QuantizedCache in 4 bits with {STOCK}, {STOCK_LAYERS} layers; it quantizes everything "
            "anew once in 128 tokens, which is not counted.",
            "x: median over rounds of the quotient within a round. GB/s: bytes of records and of blocks in "
            f"the model's dtype over the whole call; {reader.note}",
            "error: RMS ratio against attention in float32 over the K and V that the cache gives back.",
            *(f"x stock is left out: {reason}" for reason in sorted(missing)),
        ),
        time.perf_counter() - started_s,
    )


def measure(context: Context, shape: Shape, tokens: int, reader: Reader, missing: set[str]) -> list[Row]:
    """Fill the caches, check their answers, time them side by side.

    Args:
        context: of the run.
        shape: heads.
        tokens: attended by the last step of a turn, whole blocks, so that no step opens a block.
        reader: reads memory in the same rounds.
        missing: told why the stock cache does not take part.

    Raises:
        WrongAnswer: a cache's attention is not what it should be.
    """
    case = Case(shape, 1, torch.float32, tokens - STEPS + 1, LEAST_BITS)
    with torch.no_grad():
        stacks = [layer_stacks.dynamic(case), *(layer_stacks.paged(case, name) for name in FORMATS)]
        try:
            stacks.append(stock(case))
        except CacheUnavailable as reason:
            missing.add(str(reason))
        layer_stacks.fill(stacks)
        errors = {stack.name: check_answer(stack) for stack in stacks}
        contenders = [Contender(stack.name, stack.step, stack.restore) for stack in stacks]
        contenders.append(reader.contender())
        timings = interleave(contenders, budget_s=context.budget_s(8.0), min_rounds=context.rounds(5))
    ours = [stack for stack in stacks if stack.name in ("paged", *FORMATS)]
    others = {stack.name: stack.layers for stack in stacks if stack not in ours}
    return [_row(case, tokens, stack, timings, reader, errors[stack.name], others) for stack in ours]


def stock(case: Case) -> LayerStack:
    """A `QuantizedCache`, empty, with SDPA and fewer layers.

    Raises:
        CacheUnavailable: its backend is not installed.
    """
    config = layer_stacks.config_of(case, STOCK_LAYERS)
    cache = quantized_cache(config, STOCK)
    return LayerStack("stock", case, cache, ALL_ATTENTION_FUNCTIONS["sdpa"], None)


def check_answer(stack: LayerStack) -> float:
    """The stack's error over the K and V that it gives back itself; it is left as long as it was.

    Raises:
        WrongAnswer: it is too large.
    """
    error = 0.0
    layers = {0, stack.layers - 1}
    for layer_idx in sorted(layers):
        got = stack.attend(layer_idx)
        if stack.name == "stock":  # gives nothing back but to attention itself
            if not got.isfinite().all():
                raise WrongAnswer("the stock cache's attention holds NaN or infinity")
            continue
        want = _attention(stack, layer_idx)
        error = max(error, check(f"{stack.name} cache, {stack.case}", rms_ratio(got, want), TOLERANCE))
    stack.finish_pass(done=layers)
    stack.restore(1)
    return error


def _attention(stack: LayerStack, layer_idx: int) -> torch.Tensor:
    layer, shape = stack.cache.layers[layer_idx], stack.case.shape
    keys, values = (states[0].double() for states in (layer.keys, layer.values))
    query = stack.query[0].double().view(shape.kv_heads, -1, shape.head_dim)
    weights = (query @ keys.transpose(1, 2) * stack.scaling).softmax(dim=-1)
    output: torch.Tensor = (weights @ values).view(1, 1, shape.q_heads, shape.head_dim)
    return output


def _row(
    case: Case,
    tokens: int,
    stack: LayerStack,
    timings: Timings,
    reader: Reader,
    error: float,
    others: dict[str, int],
) -> Row:
    """The numbers of one format; `others`: name -> layers of those it is compared with."""
    kv_bytes = stack.cache.memory_footprint().used_bytes / stack.layers
    step_s = timings.median_s(stack.name) / stack.layers
    speedups = {
        name: timings.speedup(stack.name, name) * stack.layers / layers for name, layers in others.items()
    }
    form = "auto" if stack.name == "paged" else stack.name
    cells: dict[str, Cell] = {
        "shape": case.shape.name,
        "tokens": tokens,
        "format": form,
        "us": 1e6 * step_s,
        "dynamic_us": 1e6 * timings.median_s("dynamic") / others["dynamic"],
        "over_dynamic": speedups["dynamic"],
        "over_stock": speedups.get("stock"),
        **reader.cells(timings, stack.name, kv_bytes * stack.layers),
        "error": error,
        "kv_bytes": kv_bytes,
        "backend": stack.cache.stats().backend,
        "layers": stack.layers,
        "rounds": len(timings.seconds[stack.name]),
    }
    return Row(cells, tuple(_bounds(case.shape.name, form, tokens, speedups["dynamic"])))


def _bounds(shape: str, form: str, tokens: int, speedup: float) -> Iterator[Bound]:
    if tokens == JUDGED_TOKENS and (shape, form) in MIN_SPEEDUP:
        yield Bound("Dynamic", speedup, MIN_SPEEDUP[shape, form])
