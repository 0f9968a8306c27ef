"""Facts about model types: their cache layers, in what order they write them, and what they get wrong.

Read from the configs; where a config does not say it, from the tables here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from hf_paged_cache.errors import UnsupportedLayerError


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer of a cache, as the model's config describes it.

    The shapes are hints: they size pools and gather layers of one shape into one pool. What a layer really
    stores is read from the first K and V it gets.
    """

    layer_type: str  # the config's name for the layer's kind, e.g. `full_attention`
    window: int | None = None  # tokens a query sees, itself included (sliding and chunked attention)
    kv_heads: int | None = None  # None if the config does not say
    head_dim: int | None = None  # the same
    is_paged: bool = True  # K and V lie in blocks; otherwise the layer is one of the host's own class


_HYBRID = (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer)
_WINDOWED = (DynamicSlidingWindowLayer, LinearAttentionAndSlidingWindowAttentionLayer)
_PAGED = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer, *_HYBRID)
"""Classes of the host whose K and V lie in blocks here. A class derived from one of them may do anything with
its K and V, so it is none of them."""

_POSITION_FREE = ("bloom", "t5", "mt5", "umt5", "switch_transformers", "longt5")
_OWN_CACHES = {
    "minimax": "it insists on its own MiniMaxCache",
    "openai-gpt": "its forward takes no cache",
    "reformer": "it keeps its own ReformerDynamicCache",
    "rwkv": "it keeps a recurrent `state` and never writes to a cache",
    "xlnet": "it keeps its own `mems`",
    "xlstm": "it keeps its own xLSTMCache",
}

# Kinds of layers that keep nothing: they stand for a place in the model.
EMPTY_LAYER_TYPES = ("dummy", "moe", "mlp")
# Model types whose `attention_mask` leaves out the conditioning in front, which is in the cache.
SHORT_MASKS = ("musicgen_melody", "musicgen_melody_decoder")
_ONE_TOKEN_STATE = (
    "its recurrent state is read only when a single token is fed, so several new ones start from zero"
)
# Model types that go wrong when several new tokens meet a history, whatever the cache, and why.
_CHUNK_FAULTS = {
    "blt": "it makes masks for the new tokens alone",
    "cpmant": "it feeds its own prompt tokens again, and they are in the cache already",
    "falcon_mamba": _ONE_TOKEN_STATE,
    "fsmt": "it lets new tokens attend those that come after them",
    "jamba": _ONE_TOKEN_STATE,
    "mamba": _ONE_TOKEN_STATE,
    "moshi": "its masks are as wide as the history, and its cache layers keep a window of it",
    "prophetnet": "with a cache it computes the positions of single tokens only",
    "recurrent_gemma": "its recurrent state lies in the model, and several new tokens start it from zero",
    "voxtral_realtime": "its audio encoder has a cache of its own, which `generate` does not hand on",
    "xlm": "it makes masks for the new tokens alone",
}


def layer_specs(config: PreTrainedConfig) -> list[tuple[LayerSpec, dict[str, Any]]]:
    """What the config says of each cache layer: its spec, and arguments for the host's own layer class."""
    decoder = config.get_text_config(decoder=True)
    for model_type in (config.model_type, decoder.model_type):
        if reason := _OWN_CACHES.get(model_type):
            raise UnsupportedLayerError(
                f"PagedCache cannot serve models of type {model_type!r}: {reason}. Use the model's default"
            )
    if has_outside_state(config) and getattr(decoder, "layer_types", None) is None:
        raise UnsupportedLayerError(
            f"PagedCache cannot serve models of type {decoder.model_type!r} under transformers "
            f"{transformers.__version__}: its config does not say which layers are recurrent. Upgrade to "
            "5.24, or use the model's default"
        )
    layer_types, kwargs = get_layer_types_and_kwargs(decoder)
    per_layer = kwargs if isinstance(kwargs, list) else [kwargs] * len(layer_types)
    shapes, fixed = _head_shapes(decoder, len(layer_types)), fixed_layers(config)
    # Without an encoder around it, this decoder writes K and V of its cross-attention to the same layers.
    is_mixed = config.model_type == "musicgen_decoder"
    found = []
    for index, (layer_type, layer_kwargs) in enumerate(zip(layer_types, per_layer, strict=True)):
        if layer_type not in DYNAMIC_LAYER_TYPE_MAPPING:
            raise UnsupportedLayerError(
                f"layer {index} of this {decoder.model_type!r} model is of kind {layer_type!r}, which "
                f"PagedCache does not know; it knows {', '.join(sorted(DYNAMIC_LAYER_TYPE_MAPPING))}"
            )
        layer_class = DYNAMIC_LAYER_TYPE_MAPPING[layer_type]
        # Older versions hand one dict to all layers, so only layers that slide may take a window from it.
        window = layer_kwargs.get("sliding_window") if layer_class in _WINDOWED else None
        is_paged = layer_class in _PAGED and index not in fixed and not is_mixed
        found.append((LayerSpec(layer_type, window, *shapes[index], is_paged), dict(layer_kwargs)))
    return found + [found[index] for index in _repeated_layers(decoder)]


def fixed_layers(config: PreTrainedConfig) -> set[int]:
    """Layers that keep K and V of an image or a recording, once and for all, and none of the tokens."""
    decoder = config.get_text_config(decoder=True)
    return set(decoder.cross_attention_layers) if decoder.model_type == "mllama_text_model" else set()


def layers_without_indexer(config: PreTrainedConfig) -> set[int]:
    """Layers of sparse attention that go by what the indexer of an earlier layer has chosen."""
    types = getattr(config.get_text_config(decoder=True), "indexer_types", None) or ()
    return {index for index, indexer_type in enumerate(types) if indexer_type == "shared"}


def chunk_fault(config: PreTrainedConfig) -> str | None:
    """Why the model cannot take several new tokens at once after a history; None if it can."""
    for model_type in (config.model_type, config.get_text_config(decoder=True).model_type):
        if fault := _CHUNK_FAULTS.get(model_type):
            return f"models of type {model_type!r} go wrong with it, whatever the cache: {fault}"
    return None


def has_outside_state(config: PreTrainedConfig) -> bool:
    """Whether a model keeps a recurrent state in itself, out of a cache's reach."""
    return bool(config.model_type == "recurrent_gemma")


def write_order(config: PreTrainedConfig, count: int) -> list[int]:
    """The cache layers of a model in the order in which a forward writes them."""
    decoder = config.get_text_config(decoder=True)
    repeated = len(_repeated_layers(decoder))
    if not repeated:
        return list(range(count))
    # Further rounds write to the last cache layers, and the model's own last layers come after them.
    last = decoder.n_input_layers + decoder.n_recurrent_layers
    return [*range(last), *range(count - repeated, count), *range(last, count - repeated)]


def max_positions(config: PreTrainedConfig) -> int | None:
    """Longest sequence the model was made for, if its config says."""
    decoder = config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "n_positions", "max_target_positions")
    return next((value for value in _ints_of(decoder, *names) if value > 0), None)


def host_layer(layer_type: str, kwargs: dict[str, Any]) -> Any:
    """A layer of the host's own class, for layers that are not paged."""
    return DYNAMIC_LAYER_TYPE_MAPPING[layer_type](**kwargs)


def layer_beside(layer_type: str, kwargs: dict[str, Any]) -> Any:
    """An object of the host's own class for what a paged layer keeps beside K and V; None if nothing."""
    layer_class = DYNAMIC_LAYER_TYPE_MAPPING[layer_type]
    if layer_class in _HYBRID:
        return LinearAttentionLayer(number_of_states=kwargs.get("number_of_states", 1))
    return layer_class() if issubclass(layer_class, DynamicIndexedLayer) else None


def is_linear(layer: object) -> bool:
    """Whether an object of the host keeps states that are written into, not K and V per token."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def can_crop(layer: object) -> bool:
    """Whether a host layer of attention can forget its last tokens.

    A class derived from those of the host keeps more than they do, so it needs a `crop` of its own.
    """
    own = next((cls for cls in type(layer).__mro__ if cls in _PAGED or "crop" in vars(cls)), None)
    return own is type(layer) or own not in (None, *_PAGED)


def _repeated_layers(decoder: PreTrainedConfig) -> list[int]:
    """Layers that run several times in one forward, once for each further cache layer they write to."""
    if decoder.model_type != "dory" or decoder.recurrent_kv_cache_mode != "per_loop":
        return []
    first = decoder.n_input_layers
    return [*range(first, first + decoder.n_recurrent_layers)] * (decoder.n_recurrent_loops - 1)


def _head_shapes(decoder: PreTrainedConfig, count: int) -> list[tuple[int | None, int | None]]:
    # Read as a whole, a heterogeneous config raises for what differs between its layers.
    is_mixed = getattr(decoder, "is_heterogeneous", False)
    configs = [decoder.per_layer_config[index] if is_mixed else decoder for index in range(count)]
    names = ("num_key_value_heads", "num_attention_heads")
    return [(next(_ints_of(c, *names), None), next(_ints_of(c, "head_dim"), None)) for c in configs]


def _ints_of(config: PreTrainedConfig, *names: str) -> Iterator[int]:
    values = (getattr(config, name, None) for name in names)
    return (value for value in values if isinstance(value, int))


def why_keys_have_positions(config: PreTrainedConfig) -> str | None:
    """None if the cached K of a model do not depend on their positions, otherwise a sentence."""
    decoder = config.get_text_config(decoder=True)
    settings = decoder.attn_config if decoder.model_type == "mpt" else decoder
    if decoder.model_type in _POSITION_FREE or getattr(settings, "alibi", False):
        return None
    return (
        f"keys of a {decoder.model_type!r} model carry their positions, and those behind the gap would keep "
        "theirs while new tokens are counted without it"
    )
