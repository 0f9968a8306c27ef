"""From the caches of `transformers` to blocks, and back."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, EncoderDecoderCache

from hf_paged_cache.errors import PagedCacheError
from hf_paged_cache.forward.left_padding import NO_PADDING

from .layer import PagedLayer, PagedWindowLayer

_IN_BLOCKS = ("keys", "values", "is_initialized")  # attributes of a host layer that blocks stand for


def copy_into(paged: Any, other: Cache) -> None:
    """Store in an empty `PagedCache` what another cache holds.

    PagedCacheError if that has other layers, K and V that are not dense, or dropped tokens that are needed.
    """
    if isinstance(other, EncoderDecoderCache) or not isinstance(other, Cache):
        raise PagedCacheError(
            f"cannot convert a {type(other).__name__}: pass a Cache; for an EncoderDecoderCache, its "
            "`self_attention_cache` and `cross_attention_cache`, each for itself"
        )
    there, here, hosts = len(other.layers), len(paged.layers), paged._hosts.all
    kept = any(isinstance(layer, PagedLayer) or layer in hosts for layer in paged.layers[there:])
    # A DynamicCache without a config has the layers that were written, so none while it is empty.
    if there > here or (there and kept):
        raise PagedCacheError(
            f"the other cache has {there} layers, and the model {here}: it belongs to another model"
        )
    pairs: list[tuple[Any, Any]] = [*zip(paged.layers, other.layers, strict=False)]
    found = [_states(index, mine, layer) for index, (mine, layer) in enumerate(pairs)]
    lengths = {
        index: 0 if states is None else states[0].shape[2]
        for index, ((mine, _), states) in enumerate(zip(pairs, found, strict=True))
        if isinstance(mine, PagedLayer)
    }
    length, last = max(lengths.values(), default=0), next(reversed(lengths), None)
    if last is not None and lengths[last] != length:
        raise PagedCacheError(
            f"layer {last} of the other cache holds {lengths[last]} tokens per row, and others hold "
            f"{length}: the forward that filled it did not reach that layer"
        )
    state, source = paged._state, getattr(other, "_state", None)  # of another paged cache
    padding = NO_PADDING if source is None else source.rows.padding
    if padding.unstored:
        state.note_mask(0, length, padding.mask(length))
    sides = [side for states in found if states is not None for side in states]
    wants_gradients = torch.is_grad_enabled() and any(side.requires_grad for side in sides)
    with torch.no_grad():
        for index, states in enumerate(found):
            if states is not None:
                paged.update(*(side.detach() for side in states), index)
        for index, (mine, layer) in enumerate(pairs):
            if found[index] is not None and isinstance(mine, PagedWindowLayer):
                manager = state.layer_groups.of(index).manager
                manager.first_held = max(manager.first_held, mine.get_seq_length() - layer.keys.shape[2])
    if wants_gradients:
        state.rows.gradients_from = 0
    if source is not None:
        state.rows.padding = padding
        state.rows.ids = source.rows.ids.copy()
        state.rows.owner = source.rows.owner
    for mine, layer in pairs:
        if not isinstance(mine, PagedLayer):
            _copy_attributes(mine, layer, mine)
        elif (part := getattr(mine, "host_layer", None)) is not None:
            _copy_attributes(part, getattr(layer, "host_layer", layer), part, _IN_BLOCKS)


def to_dynamic(paged: Any, config: PreTrainedConfig) -> DynamicCache:
    """A `DynamicCache` for the same model with the same contents, in dense tensors of its own."""
    dynamic = DynamicCache(config=config)
    for index, mine in enumerate(paged.layers):
        layer: Any = dynamic.layers[index]
        if not isinstance(mine, PagedLayer):
            dynamic.layers[index] = copy.deepcopy(mine)
            continue
        keys, values = mine.keys, mine.values
        if keys is not None and values is not None and keys.shape[2]:
            layer.update(keys.clone(), values.clone())
            if isinstance(mine, PagedWindowLayer):
                layer.cumulative_length = mine.get_seq_length()
        if hasattr(mine, "host_layer"):
            _copy_attributes(mine.host_layer, mine.host_layer, layer, _IN_BLOCKS)
    return dynamic


def _copy_attributes(names_of: Any, source: Any, target: Any, but: tuple[str, ...] = ()) -> None:
    """Copy the attributes that one object has, but for some, from another to a third."""
    for name in list(vars(names_of)):
        if name not in but and hasattr(source, name):
            setattr(target, name, copy.deepcopy(getattr(source, name)))


def _states(index: int, mine: Any, layer: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """K and V of one layer, as long as its rows; zeros stand for what a window has dropped."""
    if not isinstance(mine, PagedLayer):
        if type(layer) is not type(mine):
            raise PagedCacheError(
                f"layer {index} is a {type(layer).__name__} there and a {type(mine).__name__} here: the "
                "other cache belongs to another model"
            )
        return None
    if not isinstance(layer, CacheLayerMixin):
        raise PagedCacheError(f"layer {index} is a {type(layer).__name__} there, which holds no K and V")
    if hasattr(layer, "_dequantize"):
        raise PagedCacheError(
            f"layer {index} is a {type(layer).__name__}, whose K and V are quantized in another way; feed "
            "the tokens to the model instead"
        )
    length = int(layer.get_seq_length())
    if not length or layer.keys is None or layer.values is None:
        return None
    keys, values = layer.keys, layer.values
    held = min(length, keys.shape[2])
    if not getattr(layer, "is_sliding", False):
        keys, values = keys[:, :, :length], values[:, :, :length]
    elif type(layer).__name__.startswith("Static"):
        raise PagedCacheError(f"layer {index} is a {type(layer).__name__}; convert a DynamicCache instead")
    elif held < min(length, mine.sliding_window - 1 if isinstance(mine, PagedWindowLayer) else length):
        raise PagedCacheError(
            f"layer {index} holds the last {held} of {length} tokens there, and more are needed here"
        )
    return _padded(keys, length), _padded(values, length)


def _padded(states: torch.Tensor, length: int) -> torch.Tensor:
    missing = length - states.shape[2]
    dense = states + 0 if type(states) is not torch.Tensor else states
    return torch.nn.functional.pad(dense, (0, 0, missing, 0)) if missing > 0 else dense
