"""The layers of a cache, made from what the config of a model says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig

from hf_paged_cache.errors import PagedCacheError, UnsupportedLayerError
from hf_paged_cache.host import architectures
from hf_paged_cache.store.precision import Precision

from .hybrid_layer import PagedHybridLayer, PagedHybridWindowLayer, PagedIndexedLayer
from .layer import PagedLayer, PagedWindowLayer

if TYPE_CHECKING:
    from hf_paged_cache.config import LayerSpec, PagedCacheConfig
    from hf_paged_cache.forward.state import CacheState


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
