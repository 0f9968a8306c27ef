"""One decode step of one attention layer: writing the new token, and attending all of them."""

import contextlib
from collections.abc import Callable
from functools import partial
from itertools import product, starmap
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from eval.bench import readers
from eval.bench.context import Bench, Context
from eval.bench.layers import layer_stacks
from eval.bench.layers.layer_stacks import LLAMA_3_8B, SMOLLM2, BlockStack, Case
from eval.bench.models.workload import dtype_name
from eval.bench.readers import Reader
from eval.core.hardware import CPU, NEEDS_GPU, Skip
from eval.core.table import Cell, Column, Row, fixed, plain, required, scientific
from eval.core.timing import Contender, interleave

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # RMS error ratio against attention in float64
MIN_SPEEDUP = {torch.float32: 3.5, torch.bfloat16: 3.0}
MIN_PERCENT = {torch.float32: 55.0}  # of the machine's bandwidth
LONG_TOKENS = 8192

COLUMNS = (
    *plain("shape", "batch", "dtype", "tokens"),
    Column("dynamic_us", "Dynamic µs", fixed(0)),
    Column("static_us", "Static µs", fixed(0)),
    Column("paged_us", "Paged µs", fixed(0)),
    Column("over_dynamic", "x Dynamic", fixed(2)),
    Column("over_static", "x Static", fixed(2)),
    *readers.COLUMNS,
    Column("error", "error", scientific),
)


def _measure(context: Context) -> tuple[list[Row], tuple[str, ...]]:
    batches, lengths = ((1,), (512, LONG_TOKENS)) if context.quick else ((1, 8), (512, 2048, LONG_TOKENS))
    cases = product((SMOLLM2, LLAMA_3_8B), batches, (torch.float32, torch.bfloat16), lengths)
    return [measure(context, case) for case in starmap(Case, cases)], (
        "Dynamic: torch.cat and SDPA; Static: index_copy_, the mask that generate makes, SDPA. "
        f"Calls go round so many layers that their K and V are {4 * CPU.cache_bytes() >> 20} MiB or more.",
        "x: median over rounds of the quotient within a round. GB/s: K and V bytes over the whole call; "
        f"{context.bandwidth[0].note}",
        "error: RMS ratio of Paged against attention in float64 over the DynamicCache's K and V.",
    )


BENCH = Bench("attention", "write of a new token and attention, per layer call", COLUMNS, _measure)


def measure(context: Context, case: Case) -> Row:
    """Fill the caches, check their answers, time them."""
    context.progress(f"attention: {case}")
    with torch.no_grad():
        stacks = layer_stacks.filled(case)
        errors = layer_stacks.errors_of(stacks, TOLERANCE[case.dtype], expected=stacks[0])
        timings = context.race([stack.contender() for stack in stacks], 4.0 if case.batch == 1 else 2.0, 5)
    cells: dict[str, Cell] = {
        "shape": case.shape.name,
        "batch": case.batch,
        "dtype": dtype_name(case.dtype),
        "tokens": case.tokens,
        **{f"{stack.name}_us": 1e6 * timings.median_s(stack.name) / case.layers for stack in stacks},
        "over_dynamic": timings.speedup("paged", "dynamic"),
        "over_static": timings.speedup("paged", "static"),
        **context.cells(timings, "paged", case.kv_bytes * case.layers),
        "error": errors["paged"],
        "layers": case.layers,
    }
    if case.tokens != LONG_TOKENS or case.batch != 1:
        return Row(cells)
    speed = required("Dynamic", cells["over_dynamic"], MIN_SPEEDUP[case.dtype])
    limit = MIN_PERCENT.get(case.dtype)
    return Row(cells, speed + required("bandwidth", cells["bandwidth_percent"], limit, unit=" %"))


# --- the kernels alone, as a GPU runs them ------------------------------------------------------------------

KERNEL_TOLERANCE = 5e-3
MIN_PERCENT_OF_COPY = 85.0
REQUIRED_BATCHES = (8, 32)
COPY_BYTES = 2 << 30

KERNEL_COLUMNS = (
    Column("case", "batch x tokens"),
    Column("kernel", "kernel"),
    Column("us", "µs", fixed(1)),
    *readers.COLUMNS,
    Column("error", "error", scientific),
)
KERNEL_NOTES = (
    "blocks: write and attention as Python calls them; masked: with a mask that hides nothing; graph: a CUDA "
    "graph of the same launches, which leaves the time of the kernels alone. sdpa, flex: attention alone, "
    "over dense K and V. machine: a copy within the device's memory in the same rounds.",
)


def measure_kernels(case: Case, copy_bytes: int = COPY_BYTES, budget_s: float = 1.5) -> list[Row]:
    """Check and time write and attention over blocks, beside SDPA and a copy; `Skip` without the memory."""
    copy, blocks = _copy_and_blocks(case, copy_bytes)
    # It hides nothing: a host passes it that has been given one.
    mask = torch.ones(case.batch, 1, 1, case.tokens, dtype=torch.bool, device=case.device.torch_device)
    contenders = [Contender("blocks", blocks.step), Contender("masked", partial(blocks.step, mask))]
    errors = {each.name: blocks.error(each.step, KERNEL_TOLERANCE) for each in contenders}
    with contextlib.suppress(RuntimeError):  # no kernel of torch's takes this case
        contenders.append(_dense("sdpa", blocks, scaled_dot_product_attention))
    rows = _kernel_rows(case, copy, contenders, budget_s, errors)
    # Only now: a step that may not be captured can leave the process without a device.
    with contextlib.suppress(Skip):
        graph = case.device.graph_of(blocks.step)
        errors["graph"] = blocks.error(graph, KERNEL_TOLERANCE)
        rows += _kernel_rows(case, copy, [Contender("graph", graph)], budget_s, errors)
    return rows


def measure_flex(case: Case, copy_bytes: int = COPY_BYTES) -> list[Row]:
    """Time torch's flex attention, compiled, beside a copy; `Skip` where it cannot run."""
    if not case.device.is_gpu:
        raise Skip(NEEDS_GPU)
    from torch.nn.attention.flex_attention import flex_attention

    copy, blocks = _copy_and_blocks(case, copy_bytes)
    contender = _dense("flex", blocks, torch.compile(flex_attention, dynamic=False))
    return _kernel_rows(case, copy, [contender], 1.0, {})


def _copy_and_blocks(case: Case, copy_bytes: int) -> tuple[Reader, BlockStack]:
    case.device.check_room(2 * case.kv_bytes * case.layers + 2 * copy_bytes + (4 << 30))
    return readers.copy(case.device, copy_bytes), BlockStack(case)


def _dense(name: str, stack: BlockStack, attend: Callable[..., object]) -> Contender:
    """Attention alone over dense K and V of the same shape; it has run once."""
    case = stack.case
    size = (case.batch, case.shape.kv_heads, case.tokens, case.shape.head_dim)
    layers = [
        [torch.empty(size, dtype=case.dtype, device=case.device.torch_device).normal_() for _ in range(2)]
        for _ in range(stack.layers)
    ]

    def step() -> None:
        for keys, values in layers:
            attend(stack.query, keys, values, enable_gqa=True)

    step()
    return Contender(name, step)


def _kernel_rows(
    case: Case, copy: Reader, contenders: list[Contender], budget_s: float, errors: dict[str, float]
) -> list[Row]:
    options: dict[str, Any] = {"min_rounds": 3, "max_rounds": 15, "steps": None, "device": case.device}
    timings = interleave([copy.contender(), *contenders], budget_s=budget_s, **options)
    # What a graph leaves out is the time between launches; a stand-in for a GPU has no graph.
    is_required = case.batch in REQUIRED_BATCHES and case.tokens >= LONG_TOKENS
    rows = []
    for name in (contender.name for contender in contenders):
        cells: dict[str, Cell] = {
            "case": f"{case.batch}x{case.tokens}",
            "kernel": name,
            "us": 1e6 * timings.median_s(name) / case.layers,
            **copy.cells(timings, name, case.kv_bytes * case.layers),
            "error": errors.get(name),
            "layers": case.layers,
            "rounds": len(timings.seconds[name]),
        }
        limit = MIN_PERCENT_OF_COPY if is_required and name == "graph" else None
        rows.append(Row(cells, required("copy bandwidth", cells["bandwidth_percent"], limit, unit=" %")))
    return rows
