"""Backends by blocks: which one answers a call, and why not a faster one.

Every backend is a module with the functions of `backend.Backend`; `_BACKENDS` lists them, fastest first. The
choice is made once for each kind of blocks, and noted in a layer's blocks when they are first used; then it
costs well under a microsecond a call.

`HF_PAGED_CACHE_BACKEND` forces one by name. It is read where a choice is made, so a change counts for layers
that are bound to their memory after it. Where it names no backend, every function here raises a
PagedCacheError, and where it names one that cannot serve, `BackendUnavailable`.
"""

from __future__ import annotations

import importlib
import logging
import os
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, cast

import torch

from hf_paged_cache.errors import BackendUnavailable, PagedCacheError

from .autocast import without_autocast
from .call import LayerBlocks

if TYPE_CHECKING:
    from hf_paged_cache.formats import RecordFormat

    from . import cpp, reference, triton
    from .backend import Backend, ConvertBlocks, PrefillBackend
    from .call import Attention
    from .torch import torch_kernels

    # The contract is checked where types are.
    _cpp: Backend = cpp
    _triton: Backend = triton
    _torch: Backend = torch_kernels
    _reference: Backend = reference
    _prefill: PrefillBackend = triton

logger = logging.getLogger("hf_paged_cache")

ENVIRONMENT_VARIABLE = "HF_PAGED_CACHE_BACKEND"


@dataclass(frozen=True)
class _Entry:
    """A row of the registry."""

    module: str  # imported when the backend is first considered
    devices: frozenset[str] | None = None  # device types that it serves; None for all
    when_forced: frozenset[str] = frozenset()  # those that it serves too, if it is asked for by name

    def serves(self, device: torch.device, *, is_forced: bool) -> bool:
        """Whether it is made for a device."""
        devices = self.devices
        return devices is None or device.type in (devices | self.when_forced if is_forced else devices)

    def load(self) -> Backend:
        return cast("Backend", importlib.import_module(self.module, __package__))


# A kernel for another device is one more row, above those it is faster than.
_BACKENDS: dict[str, _Entry] = {
    "cpp": _Entry(".cpp", frozenset({"cpu"})),
    "triton": _Entry(".triton", frozenset({"cuda"}), when_forced=frozenset({"cpu"})),
    "torch": _Entry(".torch.torch_kernels"),
    "reference": _Entry(".reference"),
}

_chosen: dict[tuple[object, ...], tuple[str, Backend]] = {}
_warned: set[str] = set()


def write(blocks: LayerBlocks, key_states: torch.Tensor, value_states: torch.Tensor, start: int) -> None:
    """As `Backend.write`."""
    with without_autocast(blocks.keys):
        _choice(blocks)[1].write(blocks, key_states, value_states, start)


def decode(
    blocks: LayerBlocks, a: Attention, *, return_lse: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `Backend.decode`."""
    with without_autocast(a.query):
        return _choice(blocks)[1].decode(blocks, a, return_lse=return_lse)


def gather(blocks: LayerBlocks, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns `[start, end)` as dense tensors; null blocks, and columns before a row begins, read as zeros.

    Keys `[batch, kv_heads, end - start, head_dim]` and values `[..., v_head_dim]`, contiguous copies.
    """
    from .torch import torch_kernels

    name, backend = _choice(blocks)
    # Copying is all that it is, so one version in torch serves every backend but the reference.
    has_own = hasattr(backend, "gather") and (blocks.records is not None or name == "reference")
    with without_autocast(blocks.keys):
        keys, values = cast(Any, backend if has_own else torch_kernels).gather(blocks, start, end)
        return keys, values


def _conversion(name: str) -> ConvertBlocks:
    """The conversion of that name, by the backend that serves the layers of a quantized pool."""

    def convert(layout: RecordFormat, records: torch.Tensor, keys: torch.Tensor, *others: Any) -> None:
        layer = LayerBlocks(
            keys.new_empty(0, *keys.shape[2:]),
            keys.new_empty(0, *keys.shape[2:4], layout.v_head_dim),
            torch.empty(1, 1, dtype=torch.int32, device=keys.device),
            records=torch.empty(1, keys.shape[2], layout.nbytes, dtype=torch.uint8, device=keys.device),
            layout=layout,
        )
        with without_autocast(keys):
            getattr(_choice(layer)[1], name)(layout, records, keys, *others)

    return cast("ConvertBlocks", convert)


encode_blocks, decode_blocks = _conversion("encode_blocks"), _conversion("decode_blocks")


def prefill_backend(blocks: LayerBlocks) -> PrefillBackend | None:
    """The backend that serves these blocks, if it has kernels of its own for many queries."""
    backend = _choice(blocks)[1]
    return cast("PrefillBackend", backend) if hasattr(backend, "attend_history") else None


def copy_blocks(pool: torch.Tensor, src: list[int], dst: list[int]) -> None:
    """As `Backend.copy_blocks`."""
    _choose(pool.device, None)[1].copy_blocks(pool, src, dst)


def backend_name(blocks: LayerBlocks) -> str:
    """The name of the backend that serves these blocks."""
    return _choice(blocks)[0]


def scratch_bytes() -> int:
    """Bytes of working memory that backends in use keep between calls, for all caches of the process."""
    in_use = dict(_chosen.values())
    return sum(backend.scratch_bytes() for backend in in_use.values() if hasattr(backend, "scratch_bytes"))


class Standing(Enum):
    """Where a backend stands for some blocks."""

    RUNS = "runs"
    SLOWER = "a faster one runs"
    NOT_ASKED = "another one is asked for by name"
    OTHER_DEVICE = "made for another device"
    REFUSED = "does not run here"


@dataclass(frozen=True)
class Explanation:
    """A backend by name, and where it stands: `standing` for programs, `reason` for people."""

    name: str
    standing: Standing
    reason: str


def explain(blocks: LayerBlocks) -> list[Explanation]:
    """Each backend, fastest first, with whether it runs for these blocks or why it does not. May compile.

    This is as the environment has it now; a layer that is bound already keeps its backend.
    """
    forced, taken, device = _forced(), False, blocks.keys.device
    found: list[Explanation] = []
    for name, entry in _BACKENDS.items():
        reason = _refusal(entry, forced == name, device, blocks)
        if reason is not None:
            is_here = entry.serves(device, is_forced=forced == name)
            standing = Standing.REFUSED if is_here else Standing.OTHER_DEVICE
        elif forced not in (None, name):
            standing, reason = Standing.NOT_ASKED, f"not asked for: {ENVIRONMENT_VARIABLE}={forced}"
        elif taken:
            standing, reason = Standing.SLOWER, Standing.SLOWER.value
        else:
            isa = getattr(entry.load(), "isa", None)
            reason = "will run" if isa is None else f"will run ({isa()})"
            standing, taken = Standing.RUNS, True
        found.append(Explanation(name, standing, reason))
    return found


def _choice(blocks: LayerBlocks) -> tuple[str, Backend]:
    """The backend of a layer, by name: chosen at its first call, and kept in its blocks."""
    if blocks.choice is None:
        blocks.choice = _choose(blocks.keys.device, blocks)
    chosen: tuple[str, Backend] = blocks.choice
    return chosen


def _choose(device: torch.device, blocks: LayerBlocks | None) -> tuple[str, Backend]:
    """The fastest backend for these blocks, or where there are none, for pools on this device."""
    forced = _forced()
    key: tuple[object, ...] = (forced, device)
    if blocks is not None:
        # Strides tell block size, head dims and contiguity, which with dtype and device is all that backends
        # differ in.
        key = (*key, blocks.keys.dtype, blocks.keys.stride(), blocks.values.stride(), blocks.layout)
    if key not in _chosen:
        _chosen[key] = _first_that_runs(forced, device, blocks)
    return _chosen[key]


def _first_that_runs(
    forced: str | None, device: torch.device, blocks: LayerBlocks | None
) -> tuple[str, Backend]:
    refusals: list[str] = []
    for name, entry in _BACKENDS.items():
        if forced not in (None, name):
            continue
        reason = _refusal(entry, forced == name, device, blocks)
        if reason is None:
            for refusal in refusals:
                _warn_once(f"{refusal} Using the slower backend {name!r}.")
            return name, entry.load()
        if forced == name or entry.serves(device, is_forced=False):
            refusals.append(f"Backend {name!r} does not run: {reason}")
    if forced is None:
        raise AssertionError("the torch backend serves everything, so one is always found")
    raise BackendUnavailable(
        f"{ENVIRONMENT_VARIABLE}={forced}, but {refusals[0]} "
        "Unset the variable to let the fastest backend that can run take over."
    )


def _refusal(entry: _Entry, is_forced: bool, device: torch.device, blocks: LayerBlocks | None) -> str | None:
    """Why a backend does not serve these blocks, or where there are none, pools on this device."""
    if not entry.serves(device, is_forced=is_forced):
        return f"It runs on {', '.join(sorted(entry.devices or ()))}; the blocks are on {device}."
    backend: Any = entry.load()
    reason: str | None = None if blocks is None else backend.unsupported_reason(blocks)
    reason = reason or backend.unavailable_reason()
    if reason is None and hasattr(backend, "unusable_reason"):
        reason = backend.unusable_reason(device)
    return reason


def _forced() -> str | None:
    """The backend that the environment asks for."""
    name = os.environ.get(ENVIRONMENT_VARIABLE, "").strip().lower()
    if name and name not in _BACKENDS:
        raise PagedCacheError(
            f"{ENVIRONMENT_VARIABLE} must be one of {', '.join(_BACKENDS)}, or unset for the fastest "
            f"that can run; got {name!r}"
        )
    return name or None


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)
