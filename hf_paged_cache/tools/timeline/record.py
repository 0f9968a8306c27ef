"""Looks at the cache and at the process after every forward."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from transformers.cache_utils import Cache

from hf_paged_cache.display import plots
from hf_paged_cache.errors import PagedCacheError
from hf_paged_cache.host import compat

from .holdings import holdings_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
"""Names under which versions and models of `transformers` take a cache."""
_STATM = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True)
class Moment:
    """What was seen after a forward.

    Attributes:
        tokens: In each row of the cache. Of a cache that does not count them (recurrent states alone): those
            that were fed to it since the recording began.
        used_bytes: Of K and V in what holds tokens, and of states of layers that keep no K and V.
        allocated_bytes: The same with all that is set aside. On a CPU what was never written is not resident.
        used_blocks: Blocks that hold tokens; None for a cache without blocks.
        process_bytes: On a CPU what the process has resident, where the system tells it as Linux does, else
            None; on a GPU what torch has allocated there.
        elapsed_s: Seconds since the recording began.
    """

    tokens: int
    used_bytes: int
    allocated_bytes: int
    used_blocks: int | None
    process_bytes: int | None
    elapsed_s: float


class MemoryTimeline:
    """Records what a cache and the process hold after every forward of a model.

    ```python
    with MemoryTimeline(model, label="default") as default:
        model.generate(**inputs)
    with MemoryTimeline(model, label="PagedCache") as paged:
        model.generate(**inputs, past_key_values=PagedCache(model))
    paged.plot(default)
    ```

    It hangs a hook on the model inside the block and changes no result. A step that `torch.compile` has
    compiled runs no Python and is not seen. What a process allocates once, at the first forward of all,
    counts as memory of the timeline that sees it.

    Args:
        model: What is called with a cache.
        label: Its name in a picture; the class of the cache by default.

    Attributes:
        start_process_bytes: As `Moment.process_bytes`, before the first forward.

    Raises:
        PagedCacheError: `model` is no module.
    """

    def __init__(self, model: torch.nn.Module, *, label: str | None = None) -> None:
        if not isinstance(model, torch.nn.Module):
            raise PagedCacheError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        self.start_process_bytes: int | None = None
        self._model = model
        self._label = label
        self._names = list(inspect.signature(model.forward).parameters)
        self._rows: list[Moment] = []
        self._fed_tokens = 0
        self._start_s = 0.0
        self._hook: Any = None

    def __enter__(self) -> Self:
        """Begin anew."""
        if self._hook is not None:
            raise PagedCacheError("this timeline is recording already; make another MemoryTimeline(model)")
        self._rows, self._fed_tokens = [], 0
        self.start_process_bytes = _process_bytes(self._device)
        self._start_s = time.perf_counter()
        self._hook = self._model.register_forward_hook(self._look, with_kwargs=True)
        return self

    def __exit__(self, *error: object) -> None:
        """Stop, and leave the model as it was."""
        self._hook.remove()
        self._hook = None

    @property
    def rows(self) -> Sequence[Moment]:
        """What was seen, forward by forward.

        Raises:
            PagedCacheError: There was no forward with a cache.
        """
        if not self._rows:
            raise PagedCacheError(
                f"{self.label}: no forward of this {type(self._model).__name__} with a cache was seen; in "
                "the `with` block call `generate` or `model(..., use_cache=True)` of the model that the "
                "timeline was made for. Compiled steps are not seen"
            )
        return self._rows

    @property
    def label(self) -> str:
        """Its name in a picture."""
        return self._label or "cache"

    @property
    def process_memory_kind(self) -> str:
        """What `process_bytes` counts."""
        return "resident memory" if self._device.type == "cpu" else f"allocated on {self._device}"

    def to_dict(self) -> dict[str, Any]:
        """`label`, `start_process_bytes` and `rows`, one dict a forward, as numbers and strings.

        Raises:
            PagedCacheError: There was no forward with a cache.
        """
        return {
            "label": self.label,
            "start_process_bytes": self.start_process_bytes,
            "rows": [asdict(moment) for moment in self.rows],
        }

    def plot(self, *others: MemoryTimeline, path: str | Path | None = None) -> Figure:
        """Draw this timeline and others; see `plot_together`."""
        return self.plot_together([self, *others], path)

    @staticmethod
    def plot_together(timelines: Sequence[MemoryTimeline], path: str | Path | None = None) -> Figure:
        """Draw bytes of K and V, memory of the process, and blocks, against tokens.

        Args:
            timelines: One line each.
            path: Where to write the picture too; its ending chooses the kind (`.png`, `.svg`, `.pdf`).

        Returns:
            A figure of matplotlib, which a notebook shows.

        Raises:
            PagedCacheError: There is no timeline, one has seen no forward with a cache, or matplotlib is not
                installed.
        """
        if not timelines or not all(isinstance(each, MemoryTimeline) for each in timelines):
            raise PagedCacheError(
                f"timelines must be a non-empty list of MemoryTimeline, got {timelines!r}; e.g. "
                "MemoryTimeline.plot_together([paged, default])"
            )
        return plots.draw_timelines(timelines, path)

    @property
    def _device(self) -> torch.device:
        return compat.expected_device(self._model)

    def _look(self, model: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        told = dict(zip(self._names, args, strict=False)) | kwargs
        cache = next(_caches(told, output), None)
        if cache is None:
            return
        self._label = self._label or type(cache).__name__
        self._fed_tokens += _tokens_of(told)
        held = holdings_of(cache)
        self._rows.append(
            Moment(
                held.tokens or self._fed_tokens,
                held.used_bytes,
                held.allocated_bytes,
                held.used_blocks,
                _process_bytes(self._device),
                time.perf_counter() - self._start_s,
            )
        )


def _caches(told: dict[str, Any], output: Any) -> Iterator[Cache]:
    """The cache that a forward was given, and the one that it returned: without one it makes its own."""
    for name in _CACHE_ARGUMENTS:
        for value in (told.get(name), getattr(output, name, None)):
            if isinstance(value, Cache):
                yield value


def _tokens_of(told: dict[str, Any]) -> int:
    tensors = (told.get(name) for name in ("input_ids", "inputs_embeds"))
    return next((int(x.shape[1]) for x in tensors if isinstance(x, torch.Tensor)), 0)


def _process_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if device.type != "cpu" or not _STATM.exists():
        return None
    return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
