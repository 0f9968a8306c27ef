"""What one run does, and how its time is shared out; the same for the supervisor and its workers."""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass

from eval.gpu.items import Item

DEFAULT_BUDGET_S = 480.0
DRY_RUN_BUDGET_S = 180.0
RESERVE_S = 8.0
"""Kept back for stopping workers and for the report."""


@dataclass(frozen=True)
class Settings:
    """One run."""

    dry_run: bool = False  # toy sizes on the CPU
    backend: str = "triton"  # value of `HF_PAGED_CACHE_BACKEND` in every worker
    seed: int = 0  # where all random inputs come from
    budget_s: float = DEFAULT_BUDGET_S  # seconds for everything
    sections: tuple[str, ...] = ("a", "b", "c", "d")  # letters of the sections to run
    jobs: int = 1  # workers at one time, where nothing is timed


@dataclass(frozen=True)
class Section:
    """A part of the run."""

    title: str  # a few words
    phase: str  # sections of one phase run at the same time; only in `CORRECTNESS` several processes do
    modules: tuple[str, ...]  # whose `items` it consists of, as `module` or `module:function`


CORRECTNESS = "correctness"
SECTIONS = {
    "a": Section("kernels against float64", CORRECTNESS, ("kernels", "formats")),
    "b": Section("generate against DynamicCache", CORRECTNESS, ("parity",)),
    "c": Section("decode attention, one layer", "attention", ("benches:attention",)),
    "d": Section("generate over a long context", "end to end", ("benches:end_to_end",)),
}
PHASE_WEIGHTS = {CORRECTNESS: 0.32, "attention": 0.25, "end to end": 0.43}
"""Share of the time that each phase may take; what it leaves goes to the next."""
DRY_RUN_PHASE_WEIGHTS = {CORRECTNESS: 0.55, "attention": 0.15, "end to end": 0.3}
"""Interpreted, correctness takes longest."""


def phases_of(settings: Settings) -> dict[str, list[str]]:
    """The phases of a run in their order, and the letters of their sections."""
    phases: dict[str, list[str]] = {}
    for letter in settings.sections:
        phases.setdefault(SECTIONS[letter].phase, []).append(letter)
    return phases


def deadline(settings: Settings, phase: str, ends: float, now: float | None = None) -> float:
    """When a phase that begins now has to end. It and the phases after it share what is left until `ends`."""
    now = time.time() if now is None else now
    weights = DRY_RUN_PHASE_WEIGHTS if settings.dry_run else PHASE_WEIGHTS
    names = list(phases_of(settings))
    share = weights[phase] / sum(weights[name] for name in names[names.index(phase) :])
    return now + share * max(0.0, ends - now)


def items_of(letter: str, settings: Settings) -> list[Item]:
    """The items of a section; what they need is imported now.

    Raises:
        KeyError: no such section.
    """
    items: list[Item] = []
    for name in SECTIONS[letter].modules:
        module, _, function = name.partition(":")
        items += getattr(importlib.import_module(f"eval.gpu.{module}"), function or "items")(settings)
    keys = [item.key for item in items]
    assert len(set(keys)) == len(keys), f"two items of section {letter} have one key"
    return items
