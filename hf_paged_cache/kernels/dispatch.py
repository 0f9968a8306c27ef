"""Which backend answers a call, and why not a faster one.

Every backend is a module with the functions of `Backend`; `_BACKENDS` lists them, fastest first. The choice
is made once for each kind of blocks and then costs under a microsecond a call. `HF_PAGED_CACHE_BACKEND`
forces one by name.
"""

from __future__ import annotations

import importlib
import logging
import os
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Protocol, cast, overload

import torch

from hf_paged_cache.errors import BackendUnavailable, PagedCacheError
from hf_paged_cache.formats import RecordFormat

from .autocast import without_autocast
from .call import Attention, LayerBlocks
from .torch.partial_softmax import Part

logger = logging.getLogger("hf_paged_cache")

ENVIRONMENT_VARIABLE = "HF_PAGED_CACHE_BACKEND"


class Backend(Protocol):
    """What a backend's module provides; `reference` says what each function means."""

    def unavailable_reason(self) -> str | None:
        """None if it runs on this machine, otherwise a sentence. May compile."""

    def unsupported_reason(self, blocks: LayerBlocks) -> str | None:
        """None if it can serve these blocks, otherwise a sentence. Compiles nothing."""

    def write(
        self, blocks: LayerBlocks, key_states: torch.Tensor, value_states: torch.Tensor, start: int
    ) -> None:
        """Store new tokens."""

    def decode(
        self, blocks: LayerBlocks, a: Attention, *, return_lse: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend stored tokens."""

    def copy_blocks(self, pool: torch.Tensor, src: list[int], dst: list[int]) -> None:
        """Copy whole blocks inside a pool."""

    def encode_blocks(
        self,
        form: RecordFormat,
        records: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: list[int],
        ids: list[int],
    ) -> None:
        """Seal blocks."""

    def decode_blocks(
        self,
        form: RecordFormat,
        records: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: list[int],
        ids: list[int],
    ) -> None:
        """Make blocks writable again."""


class PrefillBackend(Backend, Protocol):
    """A backend with kernels for many queries too, beside torch's own."""

    def attend_history(
        self, blocks: LayerBlocks, a: Attention, visible: torch.Tensor | None, bias: torch.Tensor | None
    ) -> Part:
        """Attend stored tokens, without sinks."""

    def attend_fresh(
        self,
        a: Attention,
        keys: torch.Tensor,
        values: torch.Tensor,
        visible: torch.Tensor | None,
        bias: torch.Tensor | None,
        is_causal: bool,
    ) -> Part:
        """Attend new tokens among themselves, without sinks."""


class DeviceBackend(Backend, Protocol):
    """A backend that may run on some devices of a machine and not on others."""

    def unusable_reason(self, device: torch.device) -> str | None:
        """None if it runs on a device, otherwise a sentence. May compile."""


@dataclass(frozen=True)
class _Entry:
    """A row of the registry.

    Attributes:
        module: Imported when the backend is first considered.
        devices: Device types that it serves; None for all.
        when_forced: Device types that it serves too, if it is asked for by name.
    """

    module: str
    devices: frozenset[str] | None = None
    when_forced: frozenset[str] = frozenset()

    def serves(self, device: torch.device, *, is_forced: bool) -> bool:
        """Whether it is made for a device."""
        if self.devices is None:
            return True
        return device.type in self.devices or (is_forced and device.type in self.when_forced)

    def load(self) -> Backend:
        return cast(Backend, importlib.import_module(self.module, __package__))


# A kernel for another device is one more row, above those it is faster than.
_BACKENDS: dict[str, _Entry] = {
    "cpp": _Entry(".cpp", frozenset({"cpu"})),
    "triton": _Entry(".triton", frozenset({"cuda"}), when_forced=frozenset({"cpu"})),
    "torch": _Entry(".torch.torch_kernels"),
    "reference": _Entry(".reference"),
}

# `os.environ.get` raises and catches a KeyError when the name is not set: 0.7 µs, more than all the rest of a
# dispatch.
_environment: dict[Any, Any] = getattr(os.environ, "_data", cast("dict[Any, Any]", os.environ))
_environment_key: Any = (
    ENVIRONMENT_VARIABLE if _environment is os.environ else os.environ.encodekey(ENVIRONMENT_VARIABLE)
)

_chosen: dict[tuple[object, ...], tuple[str, Backend]] = {}
_said: set[str] = set()


def write(blocks: LayerBlocks, key_states: torch.Tensor, value_states: torch.Tensor, start: int) -> None:
    """Store new tokens, those of columns `start, start + 1, ...` of every row.

    Tokens that fall into a null block, or stand before a row begins, are dropped.

    Args:
        blocks: Changed in place.
        key_states: `[batch, kv_heads, tokens, head_dim]`, dtype and device of the blocks.
        value_states: `[batch, kv_heads, tokens, v_head_dim]`.
        start: Column of the first new token.

    Raises:
        UnstorableValueError: A quantized layer got NaN, infinity, or a magnitude above
            `formats.LARGEST_VALUE`. Nothing was written.
        BackendUnavailable: The backend forced by `HF_PAGED_CACHE_BACKEND` cannot serve these blocks.
        PagedCacheError: `HF_PAGED_CACHE_BACKEND` names no backend.
    """
    with without_autocast(key_states):
        _backend(blocks).write(blocks, key_states, value_states, start)


@overload
def decode(blocks: LayerBlocks, a: Attention, *, return_lse: Literal[False] = False) -> torch.Tensor: ...
@overload
def decode(
    blocks: LayerBlocks, a: Attention, *, return_lse: Literal[True]
) -> tuple[torch.Tensor, torch.Tensor]: ...


def decode(
    blocks: LayerBlocks, a: Attention, *, return_lse: bool = False
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend the stored tokens `[a.start, a.end)`.

    Args:
        blocks: Keys and values. Not changed.
        a: The question; every field is honoured.
        return_lse: Also return the log-sum-exp that merges this answer with another part's.

    Returns:
        `[batch, q_tokens, q_heads, v_head_dim]`, contiguous, in the query's dtype; zeros where a query sees
        nothing. With `return_lse` also float32 `[batch, q_heads, q_tokens]`: natural log of the softmax's
        denominator, the sink included; -inf where there is neither a visible token nor a sink.

    Raises:
        BackendUnavailable: The backend forced by `HF_PAGED_CACHE_BACKEND` cannot serve these blocks.
        PagedCacheError: `HF_PAGED_CACHE_BACKEND` names no backend.
    """
    with without_autocast(a.query):
        return _backend(blocks).decode(blocks, a, return_lse=return_lse)


def gather(blocks: LayerBlocks, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns `[start, end)` as dense tensors; null blocks, and columns before a row begins, read as zeros.

    Returns:
        Keys `[batch, kv_heads, end - start, head_dim]` and values `[..., v_head_dim]`, contiguous copies.
    """
    from . import reference
    from .torch import torch_kernels

    # Copying is all that it is, so one version in torch serves every backend but the reference.
    with without_autocast(blocks.keys):
        if _forced() == "reference":
            return reference.gather(blocks, start, end)
        if blocks.records is not None:
            backend: Any = _backend(blocks)
            if hasattr(backend, "gather"):
                keys, values = backend.gather(blocks, start, end)
                return keys, values
        return torch_kernels.gather(blocks, start, end)


def encode_blocks(
    form: RecordFormat,
    records: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: list[int],
    ids: list[int],
) -> None:
    """Seal full blocks, all layers of a pool at once: `records[ids[i]]` becomes what `keys[slots[i]]` holds.

    Args:
        form: What the bytes of the records mean.
        records: uint8 `[num_blocks, layers, kv_heads, nbytes]`, changed in place.
        keys: `[num_slots, layers, kv_heads, block_size, head_dim]`.
        values: `[num_slots, layers, kv_heads, block_size, v_head_dim]`.
        slots: Slots to read.
        ids: As many distinct records to overwrite.
    """
    with without_autocast(keys):
        _pool_backend(keys, form).encode_blocks(form, records, keys, values, slots, ids)


def decode_blocks(
    form: RecordFormat,
    records: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: list[int],
    ids: list[int],
) -> None:
    """The way back, for blocks that are written to again: `keys[slots[i]]` becomes what `records[ids[i]]` is.

    Arguments are as in `encode_blocks`; here `keys` and `values` are changed.
    """
    with without_autocast(keys):
        _pool_backend(keys, form).decode_blocks(form, records, keys, values, slots, ids)


def _pool_backend(keys: torch.Tensor, form: RecordFormat) -> Backend:
    """The backend that serves the layers of a quantized pool."""
    table = torch.empty(1, 1, dtype=torch.int32, device=keys.device)
    kv_heads = keys.shape[2]
    records = torch.empty(1, kv_heads, form.nbytes, dtype=torch.uint8, device=keys.device)
    empty = LayerBlocks(
        keys.new_empty(0, *keys.shape[2:]),
        keys.new_empty(0, *keys.shape[2:4], form.v_head_dim),
        table,
        None,
        records,
        form,
    )
    return _backend(empty)


def prefill_backend(blocks: LayerBlocks) -> PrefillBackend | None:
    """The backend that serves these blocks, if it has kernels of its own for many queries."""
    backend = _backend(blocks)
    return cast(PrefillBackend, backend) if hasattr(backend, "attend_history") else None


def copy_blocks(pool: torch.Tensor, src: list[int], dst: list[int]) -> None:
    """Copy whole blocks inside one pool tensor: `pool[dst[i]] = pool[src[i]]`, all sources read first.

    Args:
        pool: `[num_blocks, ...]`, contiguous, changed in place.
        src: Block ids to read.
        dst: As many distinct block ids to overwrite.

    Raises:
        BackendUnavailable: The backend forced by `HF_PAGED_CACHE_BACKEND` cannot run on this device.
        PagedCacheError: `HF_PAGED_CACHE_BACKEND` names no backend.
    """
    key = (_environment.get(_environment_key), pool.device)
    chosen = _chosen.get(key) or _choose(key, pool.device, None)
    chosen[1].copy_blocks(pool, src, dst)


def backend_name(blocks: LayerBlocks) -> str:
    """The name of the backend that serves these blocks.

    Raises:
        BackendUnavailable: The backend forced by `HF_PAGED_CACHE_BACKEND` cannot serve them.
        PagedCacheError: `HF_PAGED_CACHE_BACKEND` names no backend.
    """
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
    """What is to be said of a backend.

    Attributes:
        name: Which.
        standing: For programs.
        reason: For people.
    """

    name: str
    standing: Standing
    reason: str


def explain(blocks: LayerBlocks) -> list[Explanation]:
    """Each backend, fastest first, with whether it runs for these blocks or why it does not. May compile.

    Raises:
        PagedCacheError: `HF_PAGED_CACHE_BACKEND` names no backend.
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
            standing, reason, taken = Standing.RUNS, _will_run(entry), True
        found.append(Explanation(name, standing, reason))
    return found


def _backend(blocks: LayerBlocks) -> Backend:
    return _choice(blocks)[1]


def _choice(blocks: LayerBlocks) -> tuple[str, Backend]:
    asked = _environment.get(_environment_key)
    noted = blocks.choice
    if noted is not None and noted[0] == asked:
        known: tuple[str, Backend] = noted[1]
        return known
    keys = blocks.keys
    # Strides tell block size, head dims and contiguity, which with dtype and device is all that backends
    # differ in.
    key = (asked, keys.dtype, keys.device, keys.stride(), blocks.values.stride(), blocks.form)
    chosen = _chosen.get(key) or _choose(key, keys.device, blocks)
    blocks.choice = asked, chosen
    return chosen


def _choose(key: tuple[object, ...], device: torch.device, blocks: LayerBlocks | None) -> tuple[str, Backend]:
    forced = _forced()
    refusals: list[str] = []
    for name, entry in _BACKENDS.items():
        if forced not in (None, name):
            continue
        reason = _refusal(entry, forced == name, device, blocks)
        if reason is None:
            for refusal in refusals:
                _say_once(f"{refusal} Using the slower backend {name!r}.")
            _chosen[key] = name, entry.load()
            return _chosen[key]
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
    backend = entry.load()
    reason = (
        backend.unsupported_reason(blocks) if blocks is not None else None
    ) or backend.unavailable_reason()
    if reason is None and hasattr(backend, "unusable_reason"):
        reason = cast(DeviceBackend, backend).unusable_reason(device)
    return reason


def _will_run(entry: _Entry) -> str:
    isa = getattr(entry.load(), "isa", None)
    return "will run" if isa is None else f"will run ({isa()})"


def _forced() -> str | None:
    """The backend that the environment asks for."""
    name = os.environ.get(ENVIRONMENT_VARIABLE, "").strip().lower()
    if name and name not in _BACKENDS:
        raise PagedCacheError(
            f"{ENVIRONMENT_VARIABLE} must be one of {', '.join(_BACKENDS)}, or unset for the fastest "
            f"that can run; got {name!r}"
        )
    return name or None


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        logger.warning(message)
