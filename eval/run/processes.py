"""The processes that share the samples of a run: one, or as many as `accelerate launch` started."""

import contextlib
import datetime
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from eval.core.errors import UsageError

# A timed task runs in one process for as long as it takes; the others wait at its end.
_PATIENCE = datetime.timedelta(days=30)


@dataclass(frozen=True)
class Processes:
    """Who this process is among them."""

    index: int = 0  # 0 is the one that reports
    count: int = 1  # how many there are
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

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Raise the `UsageError` that one of them raises in all, so that nobody waits for one that left."""
        problems: list[str | None] = [None]
        try:
            yield
        except UsageError as error:
            problems = [str(error)]
        if self._state is not None:
            from accelerate.utils import gather_object

            problems = gather_object(problems)
        if problem := next(filter(None, problems), None):
            raise UsageError(problem)

    def share(self, unit_index: int) -> bool:
        """Whether a unit is this process's to run."""
        return unit_index % self.count == self.index

    def close(self) -> None:
        """Part from the others."""
        if self._state is not None:
            self._state.destroy_process_group()


def join(device: str) -> Processes:
    """The processes of this run; waits for the others where there are any."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return Processes()
    import torch
    from accelerate import PartialState

    state = PartialState(cpu=device == "cpu" or not torch.cuda.is_available(), timeout=_PATIENCE)
    return Processes(state.process_index, state.num_processes, state)


def device_of(device: str) -> str:
    """The device of this process: among several, `auto` gives each a GPU of its own."""
    import torch

    rank = os.environ.get("LOCAL_RANK")
    return f"cuda:{rank}" if device == "auto" and rank and torch.cuda.is_available() else device
