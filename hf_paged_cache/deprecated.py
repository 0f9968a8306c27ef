"""Names of earlier caches that code in the wild still reads: they work, and say what to use instead."""

from __future__ import annotations

import warnings
from typing import Any, NoReturn

import torch

from .errors import PagedCacheError


class DeprecatedReads:
    """Reads that `transformers` has removed from its caches, for a cache with `layers`."""

    layers: list[Any]

    @property
    def seen_tokens(self) -> int:
        """Tokens per row; now `get_seq_length()`."""
        _warn("seen_tokens", "get_seq_length()")
        return self._length(0)

    @property
    def key_cache(self) -> list[torch.Tensor | None]:
        """Dense K of every layer; now `layers[i].keys`."""
        _warn("key_cache", "layers[i].keys")
        return [layer.keys for layer in self.layers]

    @property
    def value_cache(self) -> list[torch.Tensor | None]:
        """Dense V of every layer; now `layers[i].values`."""
        _warn("value_cache", "layers[i].values")
        return [layer.values for layer in self.layers]

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

    def _length(self, layer_idx: int) -> int:
        return int(self.get_seq_length(layer_idx))  # type: ignore[attr-defined]  # a cache has it


def _warn(old: str, new: str) -> None:
    warnings.warn(f"`{old}` is deprecated; use `{new}`", FutureWarning, stacklevel=3)
