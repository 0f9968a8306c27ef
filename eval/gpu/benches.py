"""Sections c and d: benches of `eval.bench` on this device."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from eval.bench.layers import attention_step
from eval.bench.layers.layer_stacks import LLAMA_3_8B, BlockStack, Case, Shape
from eval.bench.models import generate_steps
from eval.bench.models.generate_steps import COMPILED, EAGER
from eval.core.hardware import Device
from eval.gpu.items import Item, Record
from eval.gpu.plan import Settings

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
    cases = [Case(LLAMA_3_8B, batch, torch.bfloat16, tokens) for batch, tokens in SIZES]
    options: dict[str, Any] = {}
    if settings.dry_run:
        toy = Shape("toy", 4, 2, 16)
        cases = [Case(toy, batch, torch.bfloat16, tokens) for batch, tokens in ((1, 70), (2, 130))]
        options = {"copy_bytes": 1 << 20}
    brief = {**options, "budget_s": 0.1} if settings.dry_run else options
    return [
        Item(_key("launches", cases[0]), partial(_launches, cases[0])),
        *(Item(_key("decode", case), partial(_kernels, case, brief), 5.0, 60.0) for case in cases),
        *(
            Item(_key("flex", case), partial(_flex, case, options), 10.0, 60.0, optional=True)
            for case in cases[: 1 if settings.dry_run else 2]
        ),
    ]


def _key(what: str, case: Case) -> str:
    return f"{what}/{case.batch}x{case.tokens}"


def _launches(case: Case, record: Record, device: Device) -> None:
    """How many kernels one layer's step takes, and which."""
    stack = BlockStack(replace(case, device=device))
    stack.step()
    names = device.launches_of(lambda: stack.attend(0))
    record.values |= {"launches": len(names), "kernels": names}


def _kernels(case: Case, options: dict[str, Any], record: Record, device: Device) -> None:
    record.rows += attention_step.measure_kernels(replace(case, device=device), **options)


def _flex(case: Case, options: dict[str, Any], record: Record, device: Device) -> None:
    record.rows += attention_step.measure_flex(replace(case, device=device), **options)


def end_to_end(settings: Settings) -> list[Item]:
    """All sizes without compiling, then the compiled ones, which take long to begin."""
    cases = [replace(case, seed=settings.seed) for case in GENERATED]
    if settings.dry_run:
        cases = [
            generate_steps.Case(*size, steps=3, rounds=1, warm_up=2, seed=settings.seed)
            for size in ((1, 16), (2, 70))
        ]
    return [
        *(Item(f"eager/{case}", partial(_generate, EAGER, case), 15.0, 90.0) for case in cases),
        *(
            Item(
                f"{name}/{case}",
                partial(_generate, (name,), case),
                needs_s=20.0,
                limit_s=120.0,
                optional=name != "paged_compiled",
            )
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
