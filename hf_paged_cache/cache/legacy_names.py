"""Names of earlier caches that code in the wild still reads: they work, and say what to use instead."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NoReturn, overload

import torch

from hf_paged_cache.errors import WAYS_TO_CHANGE, PagedCacheError

_Tensors = Sequence[torch.Tensor | None]


def _dense_list(name: str, side: str) -> property:
    """K or V of every layer, as earlier caches had it; now `layers[i].keys` and `layers[i].values`."""

    def read(cache: Any) -> _Tensors:
        _warn(name, f"layers[i].{side}")
        return _ReadOnlyList(name, [getattr(layer, side) for layer in cache.layers])

    def refuse(cache: Any, value: object) -> NoReturn:
        _refuse_writes(name)

    return property(read, refuse, doc=f"Dense {side} of every layer; now `layers[i].{side}`.")


class DeprecatedReads:
    """Reads that `transformers` has removed from its caches, for a cache with `layers`."""

    layers: list[Any]

    @property
    def seen_tokens(self) -> int:
        """Tokens per row; now `get_seq_length()`."""
        _warn("seen_tokens", "get_seq_length()")
        return self._length(0)

    key_cache = _dense_list("key_cache", "keys")
    value_cache = _dense_list("value_cache", "values")

    def __getitem__(self, layer_idx: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """K and V of a layer; now `layers[i].keys`, `layers[i].values`."""
        _warn("cache[i]", "layers[i].keys` and `layers[i].values")
        if not -len(self.layers) <= layer_idx < len(self.layers):
            raise IndexError(f"layer {layer_idx} of a cache with {len(self.layers)} layers")
        layer = self.layers[layer_idx]
        return layer.keys, layer.values

    def get_usable_length(self, new_seq_length: int, layer_idx: int = 0) -> int:
        """Tokens per row that new ones will attend; now `get_seq_length(layer_idx)`."""
        _warn("get_usable_length", "get_seq_length")
        return self._length(layer_idx)

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """Tokens that a layer can hold, -1 for no bound; now `get_max_length(layer_idx)`."""
        _warn("get_max_cache_shape", "get_max_length")
        return int(self.layers[layer_idx].get_max_length())

    def to_legacy_cache(self) -> tuple[tuple[torch.Tensor | None, torch.Tensor | None], ...]:
        """Dense K and V of every layer, as tuples; now `to_dynamic_cache()`."""
        _warn("to_legacy_cache", "to_dynamic_cache")
        return tuple((layer.keys, layer.values) for layer in self.layers)

    @classmethod
    def from_legacy_cache(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: tuples do not say what model they are of."""
        raise PagedCacheError(
            "from_legacy_cache is gone: make a DynamicCache of the tuples, then "
            "`PagedCache.from_cache(that, model)`"
        )

    def drop(self, start: int, end: int) -> None:
        """Delete tokens; now `prune(start, end)`."""
        warnings.warn("`drop` is deprecated; use `prune`", DeprecationWarning, stacklevel=2)
        self.prune(start, end)  # type: ignore[attr-defined]  # a cache has it

    def _length(self, layer_idx: int) -> int:
        return int(self.get_seq_length(layer_idx))  # type: ignore[attr-defined]  # a cache has it


class _ReadOnlyList(Sequence[torch.Tensor | None]):
    """K or V of all layers, as lists of earlier caches are read."""

    def __init__(self, name: str, tensors: list[torch.Tensor | None]) -> None:
        self._name = name
        self._tensors = tensors

    @overload
    def __getitem__(self, index: int) -> torch.Tensor | None: ...
    @overload
    def __getitem__(self, index: slice) -> _Tensors: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | _Tensors | None:
        return self._tensors[index]

    def __len__(self) -> int:
        return len(self._tensors)

    def _refuse(self, *args: object) -> NoReturn:
        _refuse_writes(self._name)

    __setitem__ = __delitem__ = __iadd__ = _refuse
    append = extend = insert = pop = clear = _refuse


def _refuse_writes(name: str) -> NoReturn:
    raise PagedCacheError(
        f"`{name}` is read from the blocks of the cache, so nothing can be assigned, added or deleted there. "
        f"{WAYS_TO_CHANGE}"
    )


def _warn(old: str, new: str) -> None:
    warnings.warn(f"`{old}` is deprecated; use `{new}`", FutureWarning, stacklevel=3)
