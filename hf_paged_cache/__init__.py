"""A drop-in paged KV cache for Hugging Face transformers.

```python
from hf_paged_cache import PagedCache

cache = PagedCache(model)
model.generate(**inputs, past_key_values=cache)
```
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import activate as enable
    from .attention import deactivate as disable
    from .attention import paged_attention
    from .cache import PagedCache
    from .config import PagedCacheConfig
    from .errors import (
        BackendUnavailable,
        CacheMismatchError,
        PagedCacheError,
        PoolExhausted,
        StaleViewError,
        UnsupportedLayerError,
    )
    from .planner import plan_memory
    from .profiler import profile_cache
    from .stats import CacheStats, MemoryFootprint
    from .timeline import MemoryTimeline

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailable",
    "CacheMismatchError",
    "CacheStats",
    "MemoryFootprint",
    "MemoryTimeline",
    "PagedCache",
    "PagedCacheConfig",
    "PagedCacheError",
    "PoolExhausted",
    "StaleViewError",
    "UnsupportedLayerError",
    "disable",
    "enable",
    "paged_attention",
    "plan_memory",
    "profile_cache",
]

# Loaded on first use: `hf_paged_cache.blocks` must import without torch.
_HOME = {
    "PagedCache": ("cache", "PagedCache"),
    "PagedCacheConfig": ("config", "PagedCacheConfig"),
    "CacheStats": ("stats", "CacheStats"),
    "MemoryFootprint": ("stats", "MemoryFootprint"),
    "enable": ("attention", "activate"),
    "disable": ("attention", "deactivate"),
    "paged_attention": ("attention", "paged_attention"),
    "plan_memory": ("planner", "plan_memory"),
    "profile_cache": ("profiler", "profile_cache"),
    "MemoryTimeline": ("timeline", "MemoryTimeline"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hf_paged_cache' has no attribute {name!r}")
    if name in _HOME:
        import_module(".host_version", __name__)  # an older host lacks names that are imported next
    module, attribute = _HOME.get(name, ("errors", name))
    return getattr(import_module(f".{module}", __name__), attribute)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
