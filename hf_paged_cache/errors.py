"""Every error that this package raises on purpose.

```
Exception
├── ValueError
│   └── PagedCacheError            a caller's mistake; names what was expected, what came, the way out
│       ├── CacheMismatchError     K/V, batch, dtype, device or model do not fit what the cache holds
│       ├── StaleViewError         a view of K/V was read after the cache had moved on
│       ├── UnstorableValueError   K or V has NaN, infinity or a magnitude that no scale can hold
│       ├── QuantizationError      K of a layer loses more in its format than the guard allows
│       └── UnsupportedLayerError  a layer kind that cannot be stored
└── RuntimeError
    ├── PoolExhausted              no block is left; nothing was written
    └── BackendUnavailable         a backend was asked for by name and cannot run here
```

Our own bugs are `AssertionError`s with a sentence. Scarcity inside the bookkeeping is a value (`None`), not
an error.
"""

from __future__ import annotations

import copyreg
import warnings
from typing import TYPE_CHECKING, Any

WAYS_TO_CHANGE = (
    "What a PagedCache holds is changed by `cache.update(...)` and `cache.crop(...)`; to put in other K and "
    "V, edit those of `cache.to_dynamic_cache()` and make `PagedCache.from_cache(that, model)`"
)
"""What messages say of ways to change stored K and V."""


class PagedCacheError(ValueError):
    """A caller's mistake. The cache is as it was before the call."""


class CacheMismatchError(PagedCacheError):
    """The tensors given do not fit what the cache already holds."""


class StaleViewError(PagedCacheError):
    """A view of a layer's K or V was read after the blocks behind it had changed."""


class UnstorableValueError(PagedCacheError):
    """K or V of a quantized layer has NaN, infinity, or a magnitude that no scale can hold."""


class QuantizationError(PagedCacheError):
    """K of a layer loses more in its format than `key_error_guard="error"` allows."""


class UnsupportedLayerError(PagedCacheError):
    """The model has a layer kind that `PagedCache` cannot store."""


class PoolExhausted(RuntimeError):
    """The pool has too few free blocks. Raised before any row of any layer is written.

    Its message begins as those of torch do when a device has no memory left, so that those who retry with a
    smaller batch then (`find_executable_batch_size` of accelerate) do it here too.

    Attributes:
        needed_blocks: Blocks that the call would have taken.
        free_blocks: Blocks that were free.
        block_size: Tokens per block.
    """

    def __init__(self, message: str, *, needed_blocks: int, free_blocks: int, block_size: int) -> None:
        super().__init__(f"The KV cache is out of memory. {message}")
        self.needed_blocks = needed_blocks
        self.free_blocks = free_blocks
        self.block_size = block_size

    def __reduce__(self) -> tuple[Any, ...]:
        """As it is, without `__init__`, so that another process can hand it on."""
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class BackendUnavailable(RuntimeError):
    """The backend forced by `HF_PAGED_CACHE_BACKEND` cannot run this call."""


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name != "QuantisationError":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        message = "QuantisationError is QuantizationError now; the old name goes with the next version"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return QuantizationError
