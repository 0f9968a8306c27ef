"""The layers of a cache, made from what the config of a model says of them.

Some keep K and V in blocks, and something else beside them in an object of the host's own class: what a model
reads and calls on such a layer for that something is passed on to the object, the `host_part`.
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


def _passed_on(name: str) -> property:
    """An attribute of the host part that others read and write on the layer."""

    def read(layer: Any) -> Any:
        return getattr(layer.host_part, name)

    def write(layer: Any, value: Any) -> None:
        setattr(layer.host_part, name, value)

    return property(read, write, doc=f"`{name}` of the host part.")


class _Compound:
    """What all of these layers have: the object beside the blocks."""

    host_part: Any

    def of_fork(self, state: CacheState, memo: dict[int, Any]) -> PagedLayer:
        """The same layer of a cache that was forked from this one; `memo` is that of a deep copy."""
        twin: Any = super().of_fork(state, memo)  # type: ignore[misc]  # of the layer that this is mixed into
        twin.host_part = copy.deepcopy(self.host_part, memo)
        return twin  # type: ignore[no-any-return]


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

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Take in the inputs of a convolution `[batch, channels, tokens]`; return those that it needs."""
        states: torch.Tensor = self.host_part.update_conv_state(conv_states, state_idx, **kwargs)
        return states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Replace a recurrent state `[batch, ...]`; return it."""
        states: torch.Tensor = self.host_part.update_recurrent_state(recurrent_states, state_idx, **kwargs)
        return states

    @property
    def is_croppable(self) -> bool:
        """Whether the states beside K and V can be cut back."""
        return bool(self.host_part.is_croppable)

    @property
    def record_past(self) -> bool:
        """Whether what a crop would need is kept until then."""
        return bool(self.host_part.record_past)

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self.host_part.record_past = value
        self._state.rows.record_past = value

    def activate_past_recording(self) -> None:
        """Keep what a crop would need."""
        self.record_past = True


class PagedHybridLayer(_Linear, PagedLayer):  # type: ignore[override,no-untyped-call]
    """Full attention in blocks, with states of linear attention or convolutions."""

    def __init__(self, state: CacheState, layer_idx: int, host_part: Any) -> None:
        super().__init__(state, layer_idx)
        self.host_part = host_part


class PagedHybridWindowLayer(_Linear, PagedWindowLayer):  # type: ignore[override,no-untyped-call]
    """Windowed attention in blocks, with states of linear attention or convolutions."""

    def __init__(self, state: CacheState, layer_idx: int, sliding_window: int, host_part: Any) -> None:
        self.host_part = host_part
        super().__init__(state, layer_idx, sliding_window)


class PagedIndexedLayer(_Compound, PagedLayer):  # type: ignore[no-untyped-call]
    """Sparse attention: K and V in blocks, with the keys and positions that choose what a query attends."""

    indexer_keys = _passed_on("indexer_keys")
    is_indexer_initialized = _passed_on("is_indexer_initialized")

    def __init__(self, state: CacheState, layer_idx: int, host_part: Any) -> None:
        super().__init__(state, layer_idx)
        self.host_part = host_part
        self._announce: Callable[[], None] | None = None

    def announce_reads_to(self, announce: Callable[[], None]) -> None:
        """Call a function before the positions are read, which models do before anything else."""
        self._announce = announce

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        """Positions `[dims, batch, tokens]` of all tokens, where a model keeps them."""
        if self._announce is not None:
            self._announce()
        positions: torch.Tensor | None = self.host_part.indexer_position_ids
        return positions

    @indexer_position_ids.setter
    def indexer_position_ids(self, value: torch.Tensor | None) -> None:
        self.host_part.indexer_position_ids = value

    def lazy_initialization_indexer(self, indexer_key_states: torch.Tensor) -> None:
        """Prepare for indexer keys like these."""
        self.host_part.lazy_initialization_indexer(indexer_key_states)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append indexer keys `[batch, tokens, index_head_dim]`; return all of them."""
        keys: torch.Tensor = self.host_part.update_indexer(indexer_key_states)
        return keys


# The host asks `isinstance` before it reads the states of a layer.
LinearAttentionCacheLayerMixin.register(PagedHybridLayer)
LinearAttentionCacheLayerMixin.register(PagedHybridWindowLayer)


def make_layer(state: CacheState, index: int, spec: LayerSpec, kwargs: dict[str, Any]) -> Any:
    """A layer over blocks, or one of the host's own class where K and V are not paged.

    Args:
        state: What the paged layers of the cache share.
        index: Of the layer.
        spec: What the config says of it.
        kwargs: Arguments for the host's own class.
    """
    if not spec.is_paged:
        return architectures.host_layer(spec.layer_type, kwargs)
    part = architectures.host_part(spec.layer_type, kwargs)
    if part is not None and not architectures.is_linear(part):
        return PagedIndexedLayer(state, index, part)
    if spec.window is not None:
        return (
            PagedWindowLayer(state, index, spec.window)
            if part is None
            else PagedHybridWindowLayer(state, index, spec.window, part)
        )
    return PagedLayer(state, index) if part is None else PagedHybridLayer(state, index, part)


def can_be_static(config: PreTrainedConfig, specs: Sequence[tuple[LayerSpec, dict[str, Any]]]) -> bool:
    """Whether a model has nothing but layers over blocks, which steps that are compiled need."""
    return (
        all(
            spec.is_paged and architectures.host_part(spec.layer_type, kwargs) is None
            for spec, kwargs in specs
        )
        and not architectures.has_outside_state(config)
        and not config.is_encoder_decoder
    )


def check_layers(
    settings: PagedCacheConfig, specs: Sequence[tuple[LayerSpec, object]], paged: dict[int, LayerSpec]
) -> None:
    """Raise if settings name layers that are not paged, or heads do not fit a format.

    Args:
        settings: Of the cache.
        specs: Of all layers.
        paged: Layer index -> spec, of those that are paged.

    Raises:
        PagedCacheError: There is no such layer, or a format cannot store heads of that size.
        UnsupportedLayerError: The layer keeps no K and V per token.
    """
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
    for index, form in Precision.of(settings, paged, 0).formats.items():
        head_dim = paged[index].head_dim
        if form is not None and head_dim is not None:
            form.bind(settings.block_size, head_dim, head_dim)
