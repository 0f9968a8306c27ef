"""The layers of a cache, made from what the config of a model says of them.

Some keep K and V in blocks, and something else beside them in an object of the host's own class: what a model
reads and calls on such a layer for that something is passed on to the object, the `host_layer`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from hf_paged_cache.errors import PagedCacheError, UnsupportedLayerError
from hf_paged_cache.host import architectures
from hf_paged_cache.store.precision import Precision

from .layer import PagedLayer, PagedWindowLayer

if TYPE_CHECKING:
    from hf_paged_cache.config import PagedCacheConfig
    from hf_paged_cache.forward.state import CacheState
    from hf_paged_cache.host.architectures import LayerSpec


def _passed_on(name: str) -> Any:
    """An attribute or method of the host layer that others look for on the layer."""
    return property(
        lambda layer: getattr(layer.host_layer, name),
        lambda layer, value: setattr(layer.host_layer, name, value),
    )


class _Compound:
    """What all of these layers have: the object beside the blocks."""

    def __init__(self, state: CacheState, layer_idx: int, *window: int, host_layer: Any) -> None:
        self.host_layer = host_layer
        super().__init__(state, layer_idx, *window)  # type: ignore[call-arg]  # of the layer that this is mixed into

    def of_fork(self, state: CacheState, memo: dict[int, Any]) -> PagedLayer:
        """With a copy of the object."""
        copied: Any = super().of_fork(state, memo)  # type: ignore[misc]  # of the layer that this is mixed into
        copied.host_layer = copy.deepcopy(self.host_layer, memo)
        return copied  # type: ignore[no-any-return]


@LinearAttentionCacheLayerMixin.register  # the host asks `isinstance` before it reads the states of a layer
class _Linear(_Compound):
    """What a layer of linear attention or convolutions has beside K and V."""

    _state: CacheState
    # States are made by the model's first forward; there is nothing to prepare them from.
    supports_early_init = False
    conv_states = _passed_on("conv_states")
    recurrent_states = _passed_on("recurrent_states")
    is_conv_states_initialized = _passed_on("is_conv_states_initialized")
    is_recurrent_states_initialized = _passed_on("is_recurrent_states_initialized")
    has_previous_state = _passed_on("has_previous_state")
    conv_kernel_size = _passed_on("conv_kernel_size")
    number_of_states = _passed_on("number_of_states")
    is_croppable = _passed_on("is_croppable")
    update_conv_state = _passed_on("update_conv_state")
    update_recurrent_state = _passed_on("update_recurrent_state")

    @property
    def record_past(self) -> bool:
        """Whether what a crop would need is kept until then."""
        return bool(self.host_layer.record_past)

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self.host_layer.record_past = value
        self._state.rows.record_past = value

    def activate_past_recording(self) -> None:
        """Keep what a crop would need."""
        self.record_past = True


class PagedHybridLayer(_Linear, PagedLayer):  # type: ignore[no-untyped-call]
    """Full attention in blocks, with states of linear attention or convolutions."""


class PagedHybridWindowLayer(_Linear, PagedWindowLayer):  # type: ignore[no-untyped-call]
    """Windowed attention in blocks, with states of linear attention or convolutions."""


class PagedIndexedLayer(_Compound, PagedLayer):  # type: ignore[no-untyped-call]
    """Sparse attention: K and V in blocks, with the keys and positions that choose what a query attends."""

    indexer_keys = _passed_on("indexer_keys")
    is_indexer_initialized = _passed_on("is_indexer_initialized")
    lazy_initialization_indexer = _passed_on("lazy_initialization_indexer")
    update_indexer = _passed_on("update_indexer")

    cache: Callable[[], Any] | None = None  # a weak reference

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        """Positions `[dims, batch, tokens]` of all tokens, where a model keeps them."""
        # Models read them before anything else.
        if self.cache is not None and (cache := self.cache()) is not None:
            cache._enter_read()
        positions: torch.Tensor | None = self.host_layer.indexer_position_ids
        return positions

    @indexer_position_ids.setter
    def indexer_position_ids(self, value: torch.Tensor | None) -> None:
        self.host_layer.indexer_position_ids = value


def make_layer(state: CacheState, index: int, spec: LayerSpec, kwargs: dict[str, Any]) -> Any:
    """A layer over blocks, or one of the host's own class, made with `kwargs`, where nothing is paged."""
    if not spec.is_paged:
        return architectures.host_layer(spec.layer_type, kwargs)
    part = architectures.layer_beside(spec.layer_type, kwargs)
    where = (state, index) if spec.window is None else (state, index, spec.window)
    if part is None:
        return (PagedLayer if spec.window is None else PagedWindowLayer)(*where)
    if not architectures.is_linear(part):
        return PagedIndexedLayer(state, index, host_layer=part)
    return (PagedHybridLayer if spec.window is None else PagedHybridWindowLayer)(*where, host_layer=part)


def can_be_static(config: PreTrainedConfig, specs: Sequence[tuple[LayerSpec, dict[str, Any]]]) -> bool:
    """Whether a model has nothing but layers over blocks, which steps that are compiled need."""
    if config.is_encoder_decoder or architectures.has_outside_state(config):
        return False
    return all(
        spec.is_paged and architectures.layer_beside(spec.layer_type, kwargs) is None
        for spec, kwargs in specs
    )


def check_layers(
    settings: PagedCacheConfig, specs: Sequence[tuple[LayerSpec, object]], paged: dict[int, LayerSpec]
) -> None:
    """Raise PagedCacheError if settings name layers that are not there or not paged, or heads do not fit."""
    sizes = settings.group_size if isinstance(settings.group_size, Mapping) else {}
    for argument, named in (("layer_dtypes", settings.layer_dtypes), ("group_size", sizes)):
        for index in named:
            if index >= len(specs):
                raise PagedCacheError(
                    f"{argument} names layer {index}, but the model has layers 0…{len(specs) - 1}"
                )
            if index not in paged:
                raise UnsupportedLayerError(
                    f"{argument} names layer {index}, which is of kind {specs[index][0].layer_type!r} and "
                    f"keeps no K and V per token; the layers that do are {sorted(paged)}"
                )
    for index, layer_format in Precision.of(settings, paged, 0).formats.items():
        head_dim = paged[index].head_dim
        if layer_format is not None and head_dim is not None:
            layer_format.bind(settings.block_size, head_dim, head_dim)
