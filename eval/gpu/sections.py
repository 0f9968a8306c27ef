"""The sections by letter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from eval.gpu.items import Item
from eval.gpu.settings import Settings


@dataclass(frozen=True)
class Section:
    """A part of the run.

    Attributes:
        letter: what `--sections` calls it.
        title: a few words.
        phase: sections of one phase run at the same time; nothing is timed in such a phase.
        items: what it consists of; importing it is left to the call.
        workers: processes at one time, at most.
    """

    letter: str
    title: str
    phase: str
    items: Callable[[Settings], list[Item]]
    workers: int = 1


def _kernels(settings: Settings) -> list[Item]:
    from eval.gpu import formats, kernels

    return [*kernels.items(settings), *formats.items(settings)]


def _parity(settings: Settings) -> list[Item]:
    from eval.gpu import parity

    return parity.items(settings)


def _attention(settings: Settings) -> list[Item]:
    from eval.gpu import attention

    return attention.items(settings)


def _end_to_end(settings: Settings) -> list[Item]:
    from eval.gpu import end_to_end

    return end_to_end.items(settings)


SECTIONS = {
    section.letter: section
    for section in (
        Section("a", "kernels against float64", "correctness", _kernels, workers=10),
        Section("b", "generate against DynamicCache", "correctness", _parity, workers=2),
        Section("c", "decode attention, one layer", "attention", _attention),
        Section("d", "generate over a long context", "end to end", _end_to_end),
    )
}
PHASE_WEIGHTS = {"correctness": 0.32, "attention": 0.25, "end to end": 0.43}
"""Share of the time that each phase may take; what it leaves goes to the next."""
DRY_RUN_PHASE_WEIGHTS = {"correctness": 0.55, "attention": 0.15, "end to end": 0.3}
"""Interpreted, correctness takes longest."""


def items_of(letter: str, settings: Settings) -> list[Item]:
    """The items of a section.

    Raises:
        KeyError: no such section.
    """
    items = SECTIONS[letter].items(settings)
    keys = [item.key for item in items]
    assert len(set(keys)) == len(keys), f"two items of section {letter} have one key"
    return items
