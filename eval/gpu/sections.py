"""The sections by letter."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from eval.gpu.items import Item
from eval.gpu.settings import Settings


@dataclass(frozen=True)
class Section:
    """A part of the run.

    Attributes:
        title: a few words.
        phase: sections of one phase run at the same time; only in the first one several processes do.
        modules: whose `items` it consists of, as `module` or `module:function`.
    """

    title: str
    phase: str
    modules: tuple[str, ...]


SECTIONS = {
    "a": Section("kernels against float64", "correctness", ("kernels", "formats")),
    "b": Section("generate against DynamicCache", "correctness", ("parity",)),
    "c": Section("decode attention, one layer", "attention", ("benches:attention",)),
    "d": Section("generate over a long context", "end to end", ("benches:end_to_end",)),
}
PHASE_WEIGHTS = {"correctness": 0.32, "attention": 0.25, "end to end": 0.43}
"""Share of the time that each phase may take; what it leaves goes to the next."""
DRY_RUN_PHASE_WEIGHTS = {"correctness": 0.55, "attention": 0.15, "end to end": 0.3}
"""Interpreted, correctness takes longest."""


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
