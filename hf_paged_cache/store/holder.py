"""What a store asks of those who hold blocks of it, and what they remember before a change of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from hf_paged_cache.blocks import BlockManager

    from .pool_tensors import LayerPool

Restore = Callable[[], None]
"""Puts something back as it was. Can be called again if it did not come to its end."""


class Saved(NamedTuple):
    """What something outside a store was, before a change of both."""

    restore: Restore  # puts integers and references back
    follow: Restore  # brings what is made of them up to date (device tables, pointers), when counts are right


class RunningStep(Protocol):
    """A forward that writes where layers were bound when it began."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended; False if nobody knows."""


@dataclass(eq=False)
class Holder:
    """A layer group of one cache, as the window store knows it whose blocks it holds."""

    manager: BlockManager  # which blocks, in which rows
    pools: list[LayerPool]  # the tensors that they are read from
    step: RunningStep | None = None  # what is writing to them; None between steps

    @property
    def is_writing(self) -> bool:
        """Whether tensors have to stay where they are.

        A forward that has ended writes no more, also if nobody has looked at it since: an exception may have
        left it for good.
        """
        return self.step is not None and not self.step.is_over
