"""A drop-in paged KV cache for Hugging Face transformers.

```python
from hf_paged_cache import PagedCache

cache = PagedCache(model)
model.generate(**inputs, cache=cache)  # before transformers 5.24: past_key_values=cache
```
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import _moved

if TYPE_CHECKING:
    from .attention.paged_attention import activate as enable
    from .attention.paged_attention import deactivate as disable
    from .attention.paged_attention import paged_attention
    from .cache.paged_cache import PagedCache
    from .config import PagedCacheConfig
    from .display.stats import CacheStats, MemoryFootprint
    from .errors import (
        BackendUnavailable,
        CacheMismatchError,
        PagedCacheError,
        PoolExhausted,
        StaleViewError,
        UnsupportedLayerError,
    )
    from .tools.planner import plan_memory
    from .tools.profiler import profile_cache
    from .tools.timeline import MemoryTimeline

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

_moved.find_modules()

# Loaded on first use: `hf_paged_cache.blocks` must import without torch.
_HOME = {
    "PagedCache": ("cache.paged_cache", "PagedCache"),
    "PagedCacheConfig": ("config", "PagedCacheConfig"),
    "CacheStats": ("display.stats", "CacheStats"),
    "MemoryFootprint": ("display.stats", "MemoryFootprint"),
    "enable": ("attention.paged_attention", "activate"),
    "disable": ("attention.paged_attention", "deactivate"),
    "paged_attention": ("attention.paged_attention", "paged_attention"),
    "plan_memory": ("tools.planner", "plan_memory"),
    "profile_cache": ("tools.profiler", "profile_cache"),
    "MemoryTimeline": ("tools.timeline", "MemoryTimeline"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hf_paged_cache' has no attribute {name!r}")
    if name in _HOME:
        import_module(".host", __name__)  # an older host lacks names that are imported next
    module, attribute = _HOME.get(name, ("errors", name))
    return getattr(import_module(f".{module}", __name__), attribute)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
