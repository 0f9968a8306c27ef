"""Memory over the course of a generation, for any cache of `transformers`."""

from __future__ import annotations

import contextlib
import inspect
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from transformers.cache_utils import Cache, EncoderDecoderCache

from hf_paged_cache.cache.paged_cache import PagedCache
from hf_paged_cache.display.figures import byte_unit, new_figure
from hf_paged_cache.errors import PagedCacheError
from hf_paged_cache.host import compat
from hf_paged_cache.host.lazy_tensor import plain_tensors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")  # by version and model of `transformers`
_STATM = Path("/proc/self/statm")

# (line, marker, colour): told apart by shape too, so that grey will do.
_STYLES = (("-", "o", "#00798c"), ("--", "s", "#d1495b"), (":", "^", "#6a4c93"), ("-.", "D", "#3a3a3a"))
_MOST_MARKERS = 8
_LEGEND_LINE = 0.07  # height, of that of the axes
_LEGEND_EDGES = 0.05


@dataclass(frozen=True, slots=True)
class Moment:
    """What was seen after a forward.

    A cache of recurrent states alone does not count tokens: `tokens` are those that were fed to it since the
    recording began. On a GPU `process_bytes` is what torch has allocated there.
    """

    tokens: int  # in each row of the cache
    used_bytes: int  # of K and V in what holds tokens, and of states of layers that keep no K and V
    allocated_bytes: int  # the same with all that is set aside, which on a CPU is resident once it is written
    used_blocks: int | None  # that hold tokens; None for a cache without blocks
    process_bytes: int | None = None  # resident, where the system tells it as Linux does, else None
    elapsed_s: float = 0.0  # since the recording began


class MemoryTimeline:
    """Records what a cache and the process hold after every forward of a model.

    ```python
    with MemoryTimeline(model, label="default") as default:
        model.generate(**inputs)
    with MemoryTimeline(model, label="PagedCache") as paged:
        model.generate(**inputs, cache=PagedCache(model))
    paged.plot(default)
    ```

    It hangs a hook on the model inside the block and changes no result. A step that `torch.compile` has
    compiled runs no Python and is not seen. What a process allocates once, at the first forward of all,
    counts as memory of the timeline that sees it; `start_process_bytes` is from before the first forward.

    Args:
        model: What is called with a cache; PagedCacheError if it is no module.
        label: Its name in a picture; the class of the cache by default.
    """

    def __init__(self, model: torch.nn.Module, *, label: str | None = None) -> None:
        if not isinstance(model, torch.nn.Module):
            raise PagedCacheError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        self.start_process_bytes: int | None = None
        self._model = model
        self._label = label
        self._names = list(inspect.signature(model.forward).parameters)
        self._moments: list[Moment] = []
        self._hook: Any = None

    def __enter__(self) -> Self:
        if self._hook is not None:
            raise PagedCacheError("this timeline is recording already; make another MemoryTimeline(model)")
        self._moments, self._fed_tokens = [], 0
        self.start_process_bytes = _process_bytes(self._device)
        self._start_s = time.perf_counter()
        self._hook = self._model.register_forward_hook(self._look, with_kwargs=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()
        self._hook = None

    @property
    def rows(self) -> Sequence[Moment]:
        """What was seen, forward by forward; PagedCacheError if there was none with a cache."""
        if not self._moments:
            raise PagedCacheError(
                f"{self.label}: no forward of this {type(self._model).__name__} with a cache was seen; in "
                "the `with` block call `generate` or `model(..., use_cache=True)` of the model that the "
                "timeline was made for. Compiled steps are not seen"
            )
        return self._moments

    @property
    def label(self) -> str:
        """Its name in a picture."""
        return self._label or "cache"

    @property
    def process_memory_kind(self) -> str:
        """What `process_bytes` counts."""
        return "resident memory" if self._device.type == "cpu" else f"allocated on {self._device}"

    def to_dict(self) -> dict[str, Any]:
        """`label`, `start_process_bytes` and `rows`, one dict a forward; raises as `rows` does."""
        rows = [asdict(moment) for moment in self.rows]
        return {"label": self.label, "start_process_bytes": self.start_process_bytes, "rows": rows}

    def plot(self, *others: MemoryTimeline, path: str | Path | None = None) -> Figure:
        """Draw this timeline and others; see `plot_together`."""
        return self.plot_together([self, *others], path)

    @staticmethod
    def plot_together(timelines: Sequence[MemoryTimeline], path: str | Path | None = None) -> Figure:
        """Draw bytes of K and V, memory of the process, and blocks, against tokens; a line for each timeline.

        A notebook shows the figure. It is written to `path` too, whose ending (`.png`, …) chooses the kind.

        Raises:
            PagedCacheError: There is no timeline, one saw no forward with a cache, or there is no matplotlib.
        """
        if not timelines or not all(isinstance(each, MemoryTimeline) for each in timelines):
            raise PagedCacheError(
                f"timelines must be a non-empty list of MemoryTimeline, got {timelines!r}; e.g. "
                "MemoryTimeline.plot_together([paged, default])"
            )
        figure = _drawn(timelines)
        if path is not None:
            figure.savefig(path)
        return figure

    @property
    def _device(self) -> torch.device:
        return compat.expected_device(self._model)

    def _look(self, model: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        arguments = dict(zip(self._names, args, strict=False)) | kwargs
        named = [(arguments.get(name), getattr(output, name, None)) for name in _CACHE_ARGUMENTS]
        # Without one a forward makes its own, and returns it.
        cache = next((each for pair in named for each in pair if isinstance(each, Cache)), None)
        if cache is None:
            return
        self._label = self._label or type(cache).__name__
        fed = (arguments.get(name) for name in ("input_ids", "inputs_embeds"))
        self._fed_tokens += next((int(x.shape[1]) for x in fed if isinstance(x, torch.Tensor)), 0)
        held, elapsed_s = holdings_of(cache), time.perf_counter() - self._start_s
        tokens, process_bytes = held.tokens or self._fed_tokens, _process_bytes(self._device)
        self._moments.append(replace(held, tokens=tokens, process_bytes=process_bytes, elapsed_s=elapsed_s))


def _process_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if device.type != "cpu" or not _STATM.exists():
        return None
    return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def holdings_of(cache: Cache) -> Moment:
    """What a cache holds; of a pair for an encoder-decoder both, with the tokens of the decoder.

    It is only looked at: nothing is settled, and no device is waited for on purpose.
    """
    if isinstance(cache, EncoderDecoderCache):
        decoder, cross = map(holdings_of, (cache.self_attention_cache, cache.cross_attention_cache))
        blocks = [part.used_blocks for part in (decoder, cross) if part.used_blocks is not None]
        used_bytes = decoder.used_bytes + cross.used_bytes
        allocated_bytes = decoder.allocated_bytes + cross.allocated_bytes
        return Moment(decoder.tokens, used_bytes, allocated_bytes, sum(blocks) if blocks else None)
    if not isinstance(cache, PagedCache):
        return _holdings_of_stock(cache)
    groups, outside = cache._state.groups, cache._hosts.nbytes
    return Moment(
        cache._num_tokens,
        sum(group.bytes_by_format().total() for group in groups) + outside,
        sum(group.pool_bytes for group in groups) + outside,
        sum(group.manager.pool.num_referenced for group in groups),
    )


def _holdings_of_stock(cache: Cache) -> Moment:
    """Of a cache of the host, whose tensors may have room for more tokens than they hold."""
    tokens = used = 0
    storages: dict[tuple[torch.device, int], int] = {}
    # A cache of recurrent states alone does not count tokens.
    with contextlib.suppress(ValueError):
        tokens = int(cache.get_seq_length())
    layer: Any
    for layer in cache.layers:
        filled = int(layer.get_seq_length()) if hasattr(layer, "get_seq_length") else 0
        for name, value in vars(layer).items():
            for tensor in plain_tensors(value):
                storage = tensor.untyped_storage()
                storages[tensor.device, storage.data_ptr()] = storage.nbytes()
                length = tensor.shape[-2] if name in ("keys", "values") and tensor.dim() > 2 else 0
                used += tensor.nbytes * min(filled, length) // length if length else tensor.nbytes
    return Moment(tokens, used, sum(storages.values()), None)


def _drawn(timelines: Sequence[MemoryTimeline]) -> Figure:
    moments = [moment for timeline in timelines for moment in timeline.rows]
    unit, size = byte_unit(max(moment.used_bytes for moment in moments))
    panels: list[tuple[str, str, Callable[[MemoryTimeline, Moment], float | None]]] = [
        ("K and V in the cache", f"in use ({unit})", lambda _, moment: moment.used_bytes / size)
    ]
    if any(moment.process_bytes is not None for moment in moments):
        panels.append((timelines[0].process_memory_kind, "more than at the start (MiB)", _grown_mib))
    if any(moment.used_blocks is not None for moment in moments):
        panels.append(("blocks", "blocks in use", lambda _, moment: moment.used_blocks))
    figure = new_figure(4.0 * len(panels), 3.4, instead="`timeline.to_dict()`")
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, quantity, value_of) in zip(all_axes, panels, strict=True):
        axes.set(xlabel="tokens in each row of the cache", ylabel=quantity, title=title)
        for timeline, style in zip(timelines, cycle(_STYLES), strict=False):
            label = timeline.label
            if axes is all_axes[0]:
                room, largest = byte_unit(timeline.rows[-1].allocated_bytes)
                label += f"\n({timeline.rows[-1].allocated_bytes / largest:,.1f} {room} set aside)"
            values = [(moment.tokens, value_of(timeline, moment)) for moment in timeline.rows]
            points: list[Any] = [point for point in values if point[1] is not None]
            if points:
                line, marker, colour = style
                every = max(1, len(points) // _MOST_MARKERS)
                look = {"color": colour, "marker": marker, "markersize": 5, "markevery": every}
                axes.plot(*zip(*points, strict=True), line, **look, label=label)
        _finish(axes)
        axes.yaxis.get_major_locator().set_params(integer=title == "blocks")
    return figure


def _grown_mib(timeline: MemoryTimeline, moment: Moment) -> float | None:
    if moment.process_bytes is None:
        return None
    return (moment.process_bytes - (timeline.start_process_bytes or 0)) / 2**20


def _finish(axes: Any) -> None:
    """A legend, and room for it above the lines."""
    legend = axes.legend(fontsize="small", loc="upper left", frameon=False)
    lines = sum(1 + text.get_text().count("\n") for text in legend.get_texts())
    room = 1 / (1 - min(0.7, _LEGEND_EDGES + _LEGEND_LINE * lines))
    bottom, top = axes.get_ylim()
    bottom = min(0, bottom)  # a process may hold less than at the start
    axes.set_ylim(bottom=bottom, top=bottom + room * (top - bottom))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
