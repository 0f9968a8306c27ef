"""The processes that share the samples of a run: one, or as many as `accelerate launch` started."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Processes:
    """Who this process is among them.

    Attributes:
        index: 0 is the one that reports.
        count: how many there are.
    """

    index: int = 0
    count: int = 1
    _state: Any = None

    @property
    def is_main(self) -> bool:
        """Whether this one reports."""
        return self.index == 0

    def wait(self) -> None:
        """Return when all have come here."""
        if self._state is not None:
            self._state.wait_for_everyone()

    def agree(self, value: str) -> str:
        """What the one that reports has chosen."""
        if self._state is None:
            return value
        from accelerate.utils import broadcast_object_list

        return str(broadcast_object_list([value])[0])

    def share(self, unit_index: int) -> bool:
        """Whether a unit is this process's to run."""
        return unit_index % self.count == self.index

    def close(self) -> None:
        """Part from the others."""
        if self._state is not None:
            self._state.destroy_process_group()


def join(device: str) -> Processes:
    """The processes of this run; waits for the others where there are any.

    Args:
        device: what the settings ask for.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return Processes()
    import torch
    from accelerate import PartialState

    state = PartialState(cpu=device == "cpu" or not torch.cuda.is_available())
    return Processes(state.process_index, state.num_processes, state)


def device_of(device: str) -> str:
    """The device of this process: among several, `auto` gives each a GPU of its own."""
    import torch

    rank = os.environ.get("LOCAL_RANK")
    return f"cuda:{rank}" if device == "auto" and rank and torch.cuda.is_available() else device
