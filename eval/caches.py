"""The caches that can be compared, one registry entry each. A cache serves one batch and is then dropped."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from eval.settings import Settings

BASELINE = "dynamic"
"""The cache whose tokens the others are compared with."""


class CacheUnavailable(Exception):
    """A cache that cannot run here; the message says why and becomes its row in the table."""


@dataclass(frozen=True)
class KvBytes:
    """What a cache holds after a batch, in bytes.

    Attributes:
        used_bytes: keys and values kept, as they are kept, with padding and part-filled blocks.
        allocated_bytes: what was set aside for them; memory no one has touched costs nothing on a CPU.
        details: what the cache itself reports.
    """

    used_bytes: int
    allocated_bytes: int
    details: dict[str, Any]


@dataclass(frozen=True)
class CacheEntry:
    """One contender.

    Attributes:
        name: what `--caches` and the table call it.
        title: one line for the report.
        create: makes a fresh cache for the next `generate` of a model; leaves the model's attention as this
            cache wants it, whatever the contender before it left behind. Raises `CacheUnavailable`.
        kv_bytes: reads a cache that has just been used.
    """

    name: str
    title: str
    create: Callable[[Any, Settings], Any]
    kv_bytes: Callable[[Any], KvBytes]


def restore_attention(model: Any) -> None:
    """Undo what a paged cache did to the model's attention; no effect on a model never patched."""
    try:
        from hf_paged_cache import disable
    except ImportError:
        return  # what cannot be imported has patched nothing
    disable(model)


def tensor_bytes(cache: Any) -> KvBytes:
    """Return the bytes of all tensors that the layers of a stock cache hold, each storage counted once."""
    seen: dict[int, int] = {}
    for layer in cache.layers:
        for tensor in _tensors(vars(layer).values()):
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    total = sum(seen.values())
    return KvBytes(total, total, {"tensor_bytes": total})


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def _create_dynamic(model: Any, settings: Settings) -> Any:
    from transformers import DynamicCache

    restore_attention(model)
    return DynamicCache(config=model.config)


def _create_paged(model: Any, settings: Settings, *, kv_cache_dtype: str = "auto") -> Any:
    try:
        from hf_paged_cache import PagedCache
    except ImportError as error:
        raise CacheUnavailable(f"hf_paged_cache.PagedCache cannot be imported: {error}") from error
    try:
        return PagedCache(model, kv_cache_dtype=kv_cache_dtype)
    except ValueError as error:
        raise CacheUnavailable(f"PagedCache refuses this model: {error}") from error


def _paged_bytes(cache: Any) -> KvBytes:
    footprint = cache.memory_footprint()
    unpaged = footprint.host_bytes  # states of layers that keep no keys and values
    details = {**dataclasses.asdict(footprint), "backend": cache.stats().backend}
    return KvBytes(footprint.used_bytes + unpaged, footprint.pool_bytes + unpaged, details)


_ENTRIES = (
    CacheEntry("dynamic", "transformers' default cache (DynamicCache)", _create_dynamic, tensor_bytes),
    CacheEntry("paged", "PagedCache in the model's dtype", _create_paged, _paged_bytes),
    *(
        CacheEntry(
            f"paged-{name}",
            f"PagedCache in {name}",
            functools.partial(_create_paged, kv_cache_dtype=name),
            _paged_bytes,
        )
        for name in ("int8", "fp8", "k8v4", "int4")
    ),
)

CACHES: dict[str, CacheEntry] = {entry.name: entry for entry in _ENTRIES}
"""Name -> contender."""
