"""`PagedCache` in every format."""

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


def _entry(kv_cache_dtype: KVCacheDtype) -> CacheEntry:
    create = functools.partial(_create, kv_cache_dtype)
    name, title = f"paged-{kv_cache_dtype}", f"PagedCache in {kv_cache_dtype}"
    if kv_cache_dtype == "auto":
        name, title = "paged", "PagedCache in the model's dtype"
    return CacheEntry(name, title, create, _bytes, lambda cache: cache.fork())


ENTRIES = tuple(map(_entry, LAYER_DTYPES))  # `auto` is the first
ALIASES = {f"paged-{alias}": f"paged-{name}" for alias, name in DTYPE_ALIASES.items()}
