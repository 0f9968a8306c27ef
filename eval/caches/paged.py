"""`PagedCache` in every format."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from eval.core.measure import KvBytes
from hf_paged_cache import PagedCache, disable
from hf_paged_cache.config import DTYPE_ALIASES, LAYER_DTYPES, KVCacheDtype

from .base import CacheEntry, CacheUnavailable, Demand


def _create(kv_cache_dtype: KVCacheDtype, model: Any, demand: Demand) -> Any:
    disable(model)
    try:
        return PagedCache(model, kv_cache_dtype=kv_cache_dtype, max_tokens=demand.rows * demand.tokens)
    except ValueError as error:
        raise CacheUnavailable(f"PagedCache refuses this model: {error}") from error


def _bytes(cache: Any) -> KvBytes:
    footprint, stats = cache.memory_footprint(), cache.stats()
    unpaged = footprint.host_bytes  # states of layers that keep no keys and values
    details = {
        **dataclasses.asdict(footprint),
        "backend": stats.backend,
        "layer_dtypes": {str(index): name for index, name in stats.layer_dtypes.items()},
    }
    return KvBytes(footprint.used_bytes + unpaged, footprint.pool_bytes + unpaged, details)


def _entry(name: str, title: str, kv_cache_dtype: KVCacheDtype) -> CacheEntry:
    return CacheEntry(
        name, title, functools.partial(_create, kv_cache_dtype), _bytes, lambda cache: cache.fork()
    )


ENTRIES = (
    _entry("paged", "PagedCache in the model's dtype", "auto"),
    *(_entry(f"paged-{name}", f"PagedCache in {name}", name) for name in LAYER_DTYPES if name != "auto"),
)

ALIASES = {f"paged-{alias}": f"paged-{name}" for alias, name in DTYPE_ALIASES.items()}
