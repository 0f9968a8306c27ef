"""Section d: tokens per second and memory of `generate` over a long context, cache by cache.

The caches are filled with random K and V, so no prompt has to be computed. `generate` then continues: it
compiles the decode step where the cache allows it, as it does for any user. Every step's token is forced, so
that all caches see the same text and their logits can be compared.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import cache as cached
from functools import partial
from typing import Any

import torch

from eval.gpu import llama
from eval.gpu.device import Device
from eval.gpu.items import Item, Record
from eval.gpu.settings import Settings
from eval.gpu.shared_cases import models

SIZES = ((1, 512), (8, 32768), (8, 8192))
"""Batch and tokens of context."""
DRY_RUN_SIZES = ((1, 16), (2, 70))
WARM_UP_STEPS = 6
"""Compiling, and what CUDA graphs want run before they record."""
DRY_RUN_WARM_UP_STEPS = 2
MAX_LOGITS_ERROR = 0.1
"""RMS ratio of bfloat16 logits between two caches."""
EAGER = ("dynamic", "paged")
COMPILED = ("paged_compiled", "static")


@dataclass(frozen=True)
class Effort:
    """Steps that are timed, and how often the contenders of an item take turns."""

    steps: int
    rounds: int


@dataclass(frozen=True)
class Run:
    """One `generate` of one cache."""

    step_s: list[float]
    first_logits: torch.Tensor
    last_logits: torch.Tensor
    peak_bytes: int | None
    is_compiled: bool
    backend: str | None


def items(settings: Settings) -> list[Item]:
    """All sizes without compiling, then the compiled ones, which take long to begin."""
    sizes = DRY_RUN_SIZES if settings.dry_run else SIZES
    return [
        *(
            Item(f"eager/{_name(size)}", partial(_eager, size, settings), needs_s=15.0, limit_s=90.0)
            for size in sizes
        ),
        *(
            Item(
                f"{name}/{_name(size)}",
                partial(_single, name, size, settings),
                needs_s=20.0,
                limit_s=120.0,
                optional=name != "paged_compiled",
            )
            for names in (COMPILED, ("quantized",))
            for size in sizes
            for name in names
        ),
    ]


def _name(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def effort_of(size: tuple[int, int], settings: Settings) -> Effort:
    """Small steps are noisy and cheap, so they get more turns."""
    if settings.dry_run:
        return Effort(3, 1)
    return Effort(32, 4) if size[0] * size[1] < 4096 else Effort(32, 2)


def _eager(size: tuple[int, int], settings: Settings, record: Record, device: Device) -> None:
    """`DynamicCache` and `PagedCache` in turns."""
    effort = effort_of(size, settings)
    model = _model(settings.dry_run, device)
    runs: dict[str, list[Run]] = {name: [] for name in EAGER}
    for _ in range(effort.rounds):
        for name in EAGER:
            runs[name].append(_generate(name, model, size, effort, settings, device))
    for name, of_cache in runs.items():
        _note(record, name, size, of_cache)
    record.values["backend"] = runs["paged"][0].backend
    pairs = zip(runs["dynamic"], runs["paged"], strict=True)
    record.values["paged_over_dynamic"] = statistics.median(
        statistics.median(a.step_s) / statistics.median(b.step_s) for a, b in pairs
    )
    _compare(record, "paged", runs["paged"][0], runs["dynamic"][0])


def _single(name: str, size: tuple[int, int], settings: Settings, record: Record, device: Device) -> None:
    """A cache whose first steps are slow."""
    model = _model(settings.dry_run, device)
    effort = effort_of(size, settings)
    options = device.compile_options() if name in COMPILED else {}
    _forget_compiled(model)
    try:
        with device.compiles():
            run = _generate(name, model, size, effort, settings, device, **options)
    finally:
        _forget_compiled(model)
    _note(record, name, size, [run])
    if name == "paged_compiled":
        record.values["backend"] = run.backend
        record.check("generate compiled the decode step", run.is_compiled)
        reference = _generate("dynamic", model, size, effort, settings, device)
        _compare(record, name, run, reference)


def _forget_compiled(model: Any) -> None:
    """What was compiled for one cache is checked, and found not to fit, at every step of the next."""
    torch._dynamo.reset()
    vars(model).pop("_compiled_call", None)


@cached
def _model(dry_run: bool, device: Device) -> Any:
    """One model for all items of a process."""
    return llama.random_llama(llama.TOY if dry_run else llama.LLAMA_3_8B, device)


def _generate(
    name: str,
    model: Any,
    size: tuple[int, int],
    effort: Effort,
    settings: Settings,
    device: Device,
    **options: Any,
) -> Run:
    batch, tokens = size
    warm_up = DRY_RUN_WARM_UP_STEPS if settings.dry_run else WARM_UP_STEPS
    new_tokens = warm_up + effort.steps + 1
    cache = llama.new_cache(name, model, batch, tokens + new_tokens)
    with torch.no_grad():
        llama.fill(cache, model, batch, tokens - 1, device, settings.seed)
    device.release()
    device.reset_peak()
    probe = Probe(device, model.config.vocab_size, new_tokens, settings.seed)
    text = torch.full((batch, tokens), 5, device=device.torch_device)
    model.generate(
        text,
        attention_mask=torch.ones_like(text),
        max_new_tokens=new_tokens,
        do_sample=False,
        logits_processor=[probe],
        **{models().cache_kwarg(): cache},
        **options,
    )
    seconds = device.seconds_between(probe.marks)
    stats = cache.stats() if hasattr(cache, "stats") else None
    return Run(
        step_s=seconds[warm_up:],
        first_logits=probe.kept[0],
        last_logits=probe.kept[-1],
        peak_bytes=device.peak_bytes(),
        is_compiled="_compiled_call" in vars(model),
        backend=None if stats is None else stats.backend,
    )


class Probe:
    """Stands among the logits processors of `generate`: takes the time, keeps logits, decides the tokens."""

    supports_continuous_batching = False

    def __init__(self, device: Device, vocabulary: int, steps: int, seed: int) -> None:
        self._device = device
        self._steps = steps
        generator = torch.Generator().manual_seed(seed)
        self._tokens = torch.randint(3, vocabulary, (steps,), generator=generator).tolist()
        self._chosen: torch.Tensor | None = None
        self.marks: list[Any] = []
        self.kept: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores that let only the forced token of this step be chosen."""
        step = len(self.marks)
        self.marks.append(self._device.mark())
        if step in (0, self._steps - 1):
            self.kept.append(scores.float().clone())
        if self._chosen is None:
            self._chosen = torch.zeros_like(scores)
        self._chosen.zero_()
        self._chosen[:, self._tokens[step]] = 1.0
        return self._chosen


def _note(record: Record, name: str, size: tuple[int, int], runs: list[Run]) -> None:
    step_s = statistics.median(statistics.median(run.step_s) for run in runs)
    peak_bytes = runs[0].peak_bytes
    record.values[name] = {
        "step_ms": 1e3 * step_s,
        "tokens_per_s": size[0] / step_s,
        "steps": sum(len(run.step_s) for run in runs),
        "peak_gib": None if peak_bytes is None else peak_bytes / 2**30,
        "is_compiled": runs[0].is_compiled,
    }


def _compare(record: Record, name: str, run: Run, reference: Run) -> None:
    """Logits of the first step, which is never compiled, and of the last."""
    for step in ("first", "last"):
        error = _error(getattr(run, f"{step}_logits"), getattr(reference, f"{step}_logits"))
        record.values[f"{step}_logits_error"] = error
        record.bound(f"logits of {name}, {step} step", error, MAX_LOGITS_ERROR)


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    if not got.isfinite().all():
        return float("inf")
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt())
