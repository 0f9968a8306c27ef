"""One decode step of one attention layer for each way to keep K and V in few bits."""

from itertools import product

import torch

from eval.bench import readers
from eval.bench.context import Bench, Context
from eval.bench.layers import layer_stacks
from eval.bench.layers.layer_stacks import LLAMA_3_8B, SMOLLM2, Case, LayerStack, Shape
from eval.caches import CacheUnavailable
from eval.caches.stock import quantized_cache
from eval.core.hardware import CPU
from eval.core.table import Cell, Column, Row, fixed, plain, required, scientific
from eval.core.timing import STEPS
from hf_paged_cache.config import LayerDtype

FORMATS: tuple[LayerDtype, ...] = ("auto", "int8", "fp8", "k8v4", "int4")
STOCK = "quanto"
STOCK_LAYERS = 2  # it computes for so long that nothing is gained by memory that is near
LEAST_BITS = 4.5
TOLERANCE = 1e-3  # RMS error ratio against attention in float64 over the K and V that the cache gives back
# Over DynamicCache in float32, on a processor with AVX-512.
MIN_SPEEDUP = {
    ("Llama-3-8B", "int8", 8192): 9.0,
    ("Llama-3-8B", "int4", 8192): 10.0,
    ("SmolLM2-135M", "int8", 8192): 6.0,
    ("SmolLM2-135M", "int4", 8192): 6.0,
}

COLUMNS = (
    *plain("shape", "tokens", "format"),
    Column("us", "µs", fixed(0)),
    Column("dynamic_us", "Dynamic µs", fixed(0)),
    Column("over_dynamic", "x Dynamic", fixed(2)),
    Column("over_stock", "x stock", fixed(1)),
    *readers.COLUMNS,
    Column("error", "error", scientific),
)


def _measure(context: Context) -> tuple[list[Row], tuple[str, ...]]:
    rows: list[Row] = []
    missing: set[str] = set()
    for shape, tokens in product((SMOLLM2, LLAMA_3_8B), (8192,) if context.quick else (2048, 8192, 32768)):
        context.progress(f"formats: {shape.name}, {tokens} tokens")
        rows += measure(context, shape, tokens, missing)
    return rows, (
        "Dynamic: DynamicCache in float32 (torch.cat and SDPA). Calls go round so many layers that the "
        f"smallest format's K and V are {4 * CPU.cache_bytes() >> 20} MiB. The last step of a turn attends "
        "so many tokens.",
        f"stock: QuantizedCache in 4 bits with {STOCK}, {STOCK_LAYERS} layers; it quantizes everything "
        "anew once in 128 tokens, which is not counted.",
        "x: median over rounds of the quotient within a round. GB/s: bytes of records and of blocks in "
        f"the model's dtype over the whole call; {context.bandwidth[0].note}",
        "error: RMS ratio against attention in float64 over the K and V that the cache gives back.",
        *(f"x stock is left out: {reason}" for reason in sorted(missing)),
    )


BENCH = Bench(
    "formats", "write of a new token and attention, per layer call, batch 1, float32 model", COLUMNS, _measure
)


def measure(context: Context, shape: Shape, tokens: int, missing: set[str]) -> list[Row]:
    """Fill the caches, check their answers, time them; `missing` is told why the stock cache is not there."""
    # The last step of a turn attends `tokens` tokens, whole blocks, so that no step opens a block.
    case = Case(shape, 1, torch.float32, tokens - STEPS + 1, LEAST_BITS)
    with torch.no_grad():
        ours = [layer_stacks.paged(case, name) for name in FORMATS]
        others = [layer_stacks.dynamic(case)]
        try:
            config = layer_stacks.config_of(case, STOCK_LAYERS)
            others.append(LayerStack("stock", case, quantized_cache(config, STOCK)))
        except CacheUnavailable as reason:
            missing.add(str(reason))
        stacks = layer_stacks.fill([others[0], *ours, *others[1:]])
        errors = {stack.name: layer_stacks.errors_of([stack], TOLERANCE)[stack.name] for stack in stacks}
        timings = context.race([stack.contender() for stack in stacks], 8.0, 5)
    step_s = {stack.name: timings.median_s(stack.name) / stack.layers for stack in stacks}
    rows = []
    for stack in ours:
        kv_bytes = stack.cache.memory_footprint().used_bytes
        speedups = {x.name: timings.speedup(stack.name, x.name) * stack.layers / x.layers for x in others}
        kv_format = "auto" if stack.name == "paged" else stack.name
        cells: dict[str, Cell] = {
            "shape": shape.name,
            "tokens": tokens,
            "format": kv_format,
            "us": 1e6 * step_s[stack.name],
            "dynamic_us": 1e6 * step_s["dynamic"],
            "over_dynamic": speedups["dynamic"],
            "over_stock": speedups.get("stock"),
            **context.cells(timings, stack.name, kv_bytes),
            "error": errors[stack.name],
            "kv_bytes": kv_bytes / stack.layers,
            "backend": stack.cache.stats().backend,
            "layers": stack.layers,
        }
        limit = MIN_SPEEDUP.get((shape.name, kv_format, tokens))
        rows.append(Row(cells, required("Dynamic", speedups["dynamic"], limit)))
    return rows
