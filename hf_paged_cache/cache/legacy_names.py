"""Names of earlier caches that code in the wild still reads: they work, and say what to use instead."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from transformers.cache_utils import Cache

from hf_paged_cache.errors import WAYS_TO_CHANGE

from .layer import refused

_refuse = refused(
    "`key_cache` and `value_cache` are read from the blocks of the cache, so nothing can be assigned, added "
    f"or deleted there. {WAYS_TO_CHANGE}"
)


class _ReadOnlyList(tuple[torch.Tensor | None, ...]):
    """K or V of all layers: what changes a list is refused."""

    __setitem__ = __delitem__ = __iadd__ = append = extend = insert = pop = clear = _refuse


def _dense_list(name: str, side: str) -> property:
    """K or V of every layer, as earlier caches had it; now `layers[i].keys` and `layers[i].values`."""

    def read(cache: Any) -> _ReadOnlyList:
        _warn(name, f"layers[i].{side}")
        return _ReadOnlyList(getattr(layer, side) for layer in cache.layers)

    return property(read, _refuse, doc=f"Dense {side} of every layer; now `layers[i].{side}`.")


class DeprecatedReads(Cache):
    """Reads that `transformers` has removed from its caches."""

    layers: list[Any]

    @property
    def seen_tokens(self) -> int:
        """Tokens per row; now `get_seq_length()`."""
        _warn("seen_tokens", "get_seq_length()")
        return int(self.get_seq_length())

    key_cache = _dense_list("key_cache", "keys")
    value_cache = _dense_list("value_cache", "values")

    def __getitem__(self, layer_idx: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """K and V of a layer; now `layers[i].keys`, `layers[i].values`."""
        _warn("cache[i]", "layers[i].keys` and `layers[i].values")
        if not -len(self.layers) <= layer_idx < len(self.layers):
            raise IndexError(f"layer {layer_idx} of a cache with {len(self.layers)} layers")
        return self.layers[layer_idx].keys, self.layers[layer_idx].values

    def get_usable_length(self, new_seq_length: int, layer_idx: int = 0) -> int:
        """Tokens per row that new ones will attend; now `get_seq_length(layer_idx)`."""
        _warn("get_usable_length", "get_seq_length")
        return int(self.get_seq_length(layer_idx))

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """Tokens that a layer can hold, -1 for no bound; now `get_max_length(layer_idx)`."""
        _warn("get_max_cache_shape", "get_max_length")
        return int(self.layers[layer_idx].get_max_length())

    def to_legacy_cache(self) -> tuple[tuple[torch.Tensor | None, torch.Tensor | None], ...]:
        """Dense K and V of every layer, as tuples; now `to_dynamic_cache()`."""
        _warn("to_legacy_cache", "to_dynamic_cache")
        return tuple((layer.keys, layer.values) for layer in self.layers)

    from_legacy_cache: Any = classmethod(  # tuples do not say what model they are of
        refused("from_legacy_cache is gone: `PagedCache.from_cache(a DynamicCache of the tuples, model)`")
    )

    def drop(self, start: int, end: int) -> None:
        """Delete tokens; now `prune(start, end)`."""
        warnings.warn("`drop` is deprecated; use `prune`", DeprecationWarning, stacklevel=2)
        self.prune(start, end)  # type: ignore[attr-defined]  # a cache has it


def _warn(old: str, new: str) -> None:
    warnings.warn(f"`{old}` is deprecated; use `{new}`", FutureWarning, stacklevel=3)
