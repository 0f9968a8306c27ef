"""Sections c and d: benches of `eval.bench` on this device."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from eval.bench.layers import attention_step
from eval.bench.layers.layer_stacks import LLAMA_3_8B, BlockStack, Case, Shape
from eval.bench.models import generate_steps
from eval.bench.models.generate_steps import COMPILED, EAGER
from eval.core.hardware import Device
from eval.core.table import Row
from eval.gpu.plan import Item, Record, Settings

SIZES = (
    (8, 8192), (8, 32768), (32, 8192), (32, 32768), (1, 2048), (1, 8192), (1, 32768), (8, 131072),
    (32, 131072), (1, 131072), (8, 2048), (32, 2048),
)  # fmt: skip
"""Batch and tokens; what matters most comes first, in case the time runs out."""
GENERATED = (
    generate_steps.Case(1, 512, rounds=4),  # small steps are noisy and cheap, so they get more turns
    generate_steps.Case(8, 32768),
    generate_steps.Case(8, 8192),
)


def attention(settings: Settings) -> list[Item]:
    """The sizes, then what is launched for a layer, then torch's flex attention."""
    shape = Shape("toy", 4, 2, 16) if settings.dry_run else LLAMA_3_8B
    sizes = ((1, 70), (2, 130)) if settings.dry_run else SIZES
    cases = {f"{rows}x{tokens}": Case(shape, rows, torch.bfloat16, tokens) for rows, tokens in sizes}
    kernels: Callable[..., list[Row]] = attention_step.measure_kernels
    flex: Callable[..., list[Row]] = attention_step.measure_flex
    if settings.dry_run:
        kernels, flex = partial(kernels, copy_bytes=1 << 20, budget_s=0.1), partial(flex, copy_bytes=1 << 20)
    first, *others = cases
    return [
        Item(f"launches/{first}", partial(_launches, cases[first])),
        *(Item(f"decode/{key}", partial(_rows, kernels, case), 5.0, 60.0) for key, case in cases.items()),
        *(
            Item(f"flex/{key}", partial(_rows, flex, cases[key]), 10.0, 60.0, optional=True)
            for key in (first, *([] if settings.dry_run else others[:1]))
        ),
    ]


def _launches(case: Case, record: Record, device: Device) -> None:
    """How many kernels one layer's step takes, and which."""
    stack = BlockStack(replace(case, device=device))
    stack.step()
    names = device.launches_of(lambda: stack.attend(0))
    record.values |= {"launches": len(names), "kernels": names}


def _rows(measure: Callable[..., list[Row]], case: Case, record: Record, device: Device) -> None:
    record.rows += measure(replace(case, device=device))


def end_to_end(settings: Settings) -> list[Item]:
    """All sizes without compiling, then the compiled ones, which take long to begin."""
    cases = [replace(case, seed=settings.seed) for case in GENERATED]
    if settings.dry_run:
        toy = {"steps": 3, "rounds": 1, "warm_up": 2, "seed": settings.seed}
        cases = [generate_steps.Case(*size, **toy) for size in ((1, 16), (2, 70))]
    return [
        *(Item(f"eager/{case}", partial(_generate, EAGER, case), 15.0, 90.0) for case in cases),
        *(
            Item(f"{name}/{case}", partial(_generate, (name,), case), 20.0, 120.0, name != "paged_compiled")
            for case in cases
            for name in COMPILED
        ),
    ]


def _generate(names: tuple[str, ...], case: generate_steps.Case, record: Record, device: Device) -> None:
    record.rows += generate_steps.measure(names, _model(device), case, device)


@cache
def _model(device: Device) -> Any:
    """One model for all items of a process."""
    return generate_steps.random_llama("llama-3-8b" if device.is_gpu else "toy", device)
