"""Everything that depends on the version of `transformers`, or on names it does not promise to keep."""

from __future__ import annotations

import inspect
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from types import FrameType
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedConfig
from transformers import masking_utils as _masking
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from . import calls
from .errors import CacheMismatchError, PagedCacheError, UnsupportedLayerError
from .spec import LayerSpec

_HYBRID = (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer)
_WINDOWED = (DynamicSlidingWindowLayer, LinearAttentionAndSlidingWindowAttentionLayer)
_PAGED = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer, *_HYBRID)
"""Classes of the host whose K and V lie in blocks here. A class derived from one of them may do anything with
its K and V, so it is none of them."""

_OWN_CACHES = {
    "minimax": "it insists on its own MiniMaxCache",
    "openai-gpt": "its forward takes no cache",
    "reformer": "it keeps its own ReformerDynamicCache",
    "rwkv": "it keeps a recurrent `state` and never writes to a cache",
    "xlnet": "it keeps its own `mems`",
    "xlstm": "it keeps its own xLSTMCache",
}

EMPTY_LAYER_TYPES = ("dummy", "moe", "mlp")
"""Kinds of layers that keep nothing: they stand for a place in the model."""

_ONE_TOKEN_STATE = (
    "its recurrent state is read only when a single token is fed, so several new ones start from zero"
)
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
"""Model types that go wrong when several new tokens meet a history, whatever the cache, and why."""

_OUTSIDE_STATES = ("recurrent_gemma",)
"""Model types that keep a recurrent state in the model, out of a cache's reach."""

_SHORT_MASKS = ("musicgen_melody", "musicgen_melody_decoder")
"""Model types whose `attention_mask` leaves out the conditioning in front, which is in the cache."""

_CROP_KEEPS_WHEN_POSITIVE = Version(transformers.__version__) < Version("5.18")


# --- configs ------------------------------------------------------------------------------------------------


def resolve_config(config_or_model: object) -> tuple[PreTrainedConfig, torch.nn.Module | None]:
    """The config meant by a config or a model, and the model if that was given.

    Raises:
        PagedCacheError: It is neither.
    """
    if isinstance(config_or_model, PreTrainedConfig):
        return config_or_model, None
    config = getattr(config_or_model, "config", None)
    if isinstance(config_or_model, torch.nn.Module) and isinstance(config, PreTrainedConfig):
        return config, config_or_model
    raise PagedCacheError(
        "config_or_model must be a transformers config or a model that has one, got "
        f"{type(config_or_model).__name__}; pass `model` or `model.config`"
    )


def layer_specs(config: PreTrainedConfig) -> list[tuple[LayerSpec, dict[str, Any]]]:
    """What the config says of each cache layer: its spec, and arguments for the host's own layer class.

    Raises:
        UnsupportedLayerError: The model keeps a cache of its own, or has a layer kind that nobody here can
            store.
    """
    decoder = config.get_text_config(decoder=True)
    for model_type in (config.model_type, decoder.model_type):
        if model_type in _OWN_CACHES:
            raise UnsupportedLayerError(
                f"PagedCache cannot serve models of type {model_type!r}: {_OWN_CACHES[model_type]}. Use the "
                "model's default"
            )
    layer_types, kwargs = get_layer_types_and_kwargs(decoder)
    per_layer = kwargs if isinstance(kwargs, list) else [kwargs] * len(layer_types)
    shapes = _head_shapes(decoder, len(layer_types))
    dense = _dense_layers(config, decoder, len(layer_types))
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
        is_paged = layer_class in _PAGED and index not in dense
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
    decoder = config.get_text_config(decoder=True)
    for model_type in (config.model_type, decoder.model_type):
        if model_type in _CHUNK_FAULTS:
            fault = _CHUNK_FAULTS[model_type]
            return f"models of type {model_type!r} go wrong with it, whatever the cache: {fault}"
    return None


def has_outside_state(config: PreTrainedConfig) -> bool:
    """Whether a model keeps a recurrent state in itself, and none in the cache."""
    return config.model_type in _OUTSIDE_STATES


def write_order(config: PreTrainedConfig, count: int) -> list[int]:
    """The cache layers of a model in the order in which a forward writes them."""
    decoder = config.get_text_config(decoder=True)
    repeated = len(_repeated_layers(decoder))
    if not repeated:
        return list(range(count))
    # Further rounds write to the last cache layers, and the model's own last layers come after them.
    last = decoder.n_input_layers + decoder.n_recurrent_layers
    return [*range(last), *range(count - repeated, count), *range(last, count - repeated)]


def has_short_masks(config: object) -> bool:
    """Whether a model's `attention_mask` leaves out a part of the history on purpose."""
    return getattr(config, "model_type", None) in _SHORT_MASKS


def expected_device(model: torch.nn.Module | None) -> torch.device:
    """The device that a model computes on; without a model, the fastest there is."""
    parameter = None if model is None else next(model.parameters(), None)
    if parameter is not None:
        return parameter.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def max_positions(config: PreTrainedConfig) -> int | None:
    """Longest sequence the model was made for, if its config says."""
    decoder = config.get_text_config(decoder=True)
    for name in ("max_position_embeddings", "n_positions", "max_target_positions"):
        value = getattr(decoder, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def host_layer(layer_type: str, kwargs: dict[str, Any]) -> Any:
    """A layer of the host's own class, for layers that are not paged."""
    return DYNAMIC_LAYER_TYPE_MAPPING[layer_type](**kwargs)


def host_part(layer_type: str, kwargs: dict[str, Any]) -> Any:
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
    for cls in type(layer).__mro__:
        if cls in _PAGED:
            return cls is type(layer)
        if "crop" in vars(cls):
            return True
    return False


def _dense_layers(config: PreTrainedConfig, decoder: PreTrainedConfig, count: int) -> set[int]:
    """Layers of attention that do not get K and V of the same new tokens as all the others."""
    # Without an encoder around it, this decoder writes K and V of its cross-attention to the same layers.
    is_mixed = config.model_type == "musicgen_decoder"
    return set(range(count)) if is_mixed else fixed_layers(config)


def _repeated_layers(decoder: PreTrainedConfig) -> list[int]:
    """Layers that run several times in one forward, once for each further cache layer they write to."""
    if decoder.model_type != "dory" or decoder.recurrent_kv_cache_mode != "per_loop":
        return []
    first = decoder.n_input_layers
    return [*range(first, first + decoder.n_recurrent_layers)] * (decoder.n_recurrent_loops - 1)


def _head_shapes(decoder: PreTrainedConfig, count: int) -> list[tuple[int | None, int | None]]:
    configs = [decoder] * count
    if getattr(decoder, "is_heterogeneous", False):
        # Read as a whole, such a config raises for what differs between its layers.
        configs = [decoder.per_layer_config[index] for index in range(count)]
    return [
        (_int_of(c, "num_key_value_heads", "num_attention_heads"), _int_of(c, "head_dim")) for c in configs
    ]


def _int_of(config: PreTrainedConfig, *names: str) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return None


# --- the cache's contract -----------------------------------------------------------------------------------


class CachedLength(int):
    """A cache's length, which looks at what `generate` is about to slice from a prompt.

    `generate` feeds the last `prompt length - cached length` tokens of a prompt. When the cache holds as many
    tokens as the prompt has, or more, that number is not positive, and as a Python slice it silently picks
    wrong tokens; and nothing says that the prompt begins with what is cached.

    Attributes:
        meet: Given the tokens of a prompt and its ids, if there are any: how many to feed.
    """

    meet: weakref.WeakMethod[Callable[[int, torch.Tensor | None], int]]

    def __new__(
        cls, tokens: int, meet: weakref.WeakMethod[Callable[[int, torch.Tensor | None], int]]
    ) -> CachedLength:
        """A length of so many tokens."""
        length = super().__new__(cls, tokens)
        length.meet = meet
        return length

    def __rsub__(self, other: int) -> int:
        meet = self.meet()
        if meet is None or not calls.is_generation(depth=1):
            return int(other) - int(self)
        return meet(int(other), calls.prompt_of(depth=1))

    def __hash__(self) -> int:
        return int.__hash__(self)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def drafts_feed_all_of(depth: int = 1) -> int | None:
    """Tokens of the whole prompt, if the function `depth` frames up is the host's assisted decoding.

    Its first forward feeds all ids that it was given, whatever the cache holds. That is right for new ids
    alone, which come with a longer mask; then, and for any other function, the answer is None.
    """
    frame: FrameType | None = sys._getframe(depth + 1)
    if frame is not None and frame.f_code is EncoderDecoderCache.activate_past_recording.__code__:
        frame = frame.f_back
    if (
        frame is None
        or frame.f_code.co_name != "_assisted_decoding"
        or not frame.f_globals.get("__name__", "").startswith("transformers.generation")
    ):
        return None
    ids, given = frame.f_locals.get("input_ids"), frame.f_locals.get("model_kwargs", {})
    name = "attention_mask" if given.get("encoder_outputs") is None else "decoder_attention_mask"
    mask = given.get(name)
    if not isinstance(ids, torch.Tensor):
        return None
    tokens = int(ids.shape[1])
    masked = (
        mask.shape[1]
        if isinstance(mask, torch.Tensor)
        else getattr(frame.f_locals.get("generation_config"), "_mask_length", tokens)
    )
    return tokens if masked == tokens else None


def tokens_to_remove(argument: int, length: int) -> int:
    """What `crop(argument)` means in the installed version: tokens to take from a cache of `length` tokens.

    Raises:
        PagedCacheError: A positive number where the installed version has none.
    """
    argument = int(argument)  # 5.17 passes a tensor
    if argument <= 0:
        return -argument
    if _CROP_KEEPS_WHEN_POSITIVE:
        return max(0, length - argument)
    raise PagedCacheError(
        f"crop takes minus the number of tokens to remove, got {argument}; "
        f"to keep {argument} of {length} tokens: `cache.crop({min(0, argument - length)})`"
    )


_POSITION_FREE = ("bloom", "mpt", "t5", "mt5", "umt5", "switch_transformers", "longt5")


def why_keys_have_positions(config: PreTrainedConfig) -> str | None:
    """None if the cached K of a model do not depend on their positions, otherwise a sentence."""
    decoder = config.get_text_config(decoder=True)
    has_alibi = getattr(decoder, "alibi", False)
    attention = getattr(decoder, "attn_config", None)
    if decoder.model_type == "mpt" and not getattr(attention, "alibi", True):
        has_alibi, is_free = False, False
    else:
        is_free = decoder.model_type in _POSITION_FREE
    if has_alibi or is_free:
        return None
    return (
        f"keys of a {decoder.model_type!r} model carry their positions, and those behind the gap would keep "
        "theirs while new tokens are counted without it"
    )


# --- attention ----------------------------------------------------------------------------------------------


def register_attention(name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Make a pair of attention and mask functions known under one name. Registering again changes nothing."""
    AttentionInterface.register(name, attention)
    _masking.AttentionMaskInterface.register(name, mask)


def attention_function(implementation: str, module: torch.nn.Module) -> Callable[..., Any]:
    """The attention function that `module` would use under `implementation`.

    Raises:
        CacheMismatchError: The module's own eager function cannot be found.
    """
    if implementation != "eager":
        function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[implementation]
        return function
    module_class: Any = type(module)
    found: Callable[..., Any] = _eager_function(module_class)
    return found


def mask_function(implementation: str) -> Callable[..., Any]:
    """The function that makes attention masks under `implementation`."""
    function: Callable[..., Any] = _masking.ALL_MASK_ATTENTION_FUNCTIONS[implementation]
    return function


def is_plain_causal(mask_function: object) -> bool:
    """Whether a mask pattern is causality and nothing else."""
    return mask_function is _masking.causal_mask_function


_eager_functions: dict[type, Callable[..., Any]] = {}


def _eager_function(module_class: type) -> Callable[..., Any]:
    """Eager attention is no registered name: every modeling file has its own."""
    if module_class in _eager_functions:  # no functools.cache: compiled steps come by here
        return _eager_functions[module_class]
    forward: Any = module_class.forward  # type: ignore[attr-defined]  # every torch module has one
    files = [forward.__module__, *(base.__module__ for base in module_class.__mro__)]
    for file in files:
        function = getattr(sys.modules.get(file), "eager_attention_forward", None)
        if function is not None:
            _eager_functions[module_class] = function
            return function  # type: ignore[no-any-return]  # the host is untyped
    raise CacheMismatchError(
        f"{module_class.__name__} has no `eager_attention_forward` beside it, so its eager attention cannot "
        "be called; load the model with attn_implementation='sdpa'"
    )


def attention_configs(
    config: PreTrainedConfig, model: torch.nn.Module | None
) -> Iterator[tuple[PreTrainedConfig, str]]:
    """The configs that attention layers read their implementation from, each with its modeling file.

    With a model these are the configs its attention modules hold (an encoder-decoder gives its decoder a copy
    that the model's own config does not lead to); with a config alone, that config's text part.
    """
    if model is None:
        decoder = config.get_text_config(decoder=True)
        target = decoder if any(value is decoder for value in vars(config).values()) else config
        yield target, type(target).__module__.replace("configuration_", "modeling_")
        return
    seen: set[int] = set()
    for module in model.modules():
        held = getattr(module, "config", None)
        if (
            isinstance(held, PreTrainedConfig)
            and getattr(module, "layer_idx", None) is not None
            and id(held) not in seen
        ):
            seen.add(id(held))
            yield held, type(module).__module__


@cache
def dispatches_attention(modeling_module: str, implementation: str) -> bool:
    """Whether a modeling file uses the `AttentionInterface` and would not miss `implementation`.

    Some files have attention code of their own, or branches for one implementation's name; under another name
    those would compute something else. Read from the source, as `transformers` itself does.
    """
    try:
        source = inspect.getsource(import_module(modeling_module))
    except (ImportError, OSError, TypeError):
        return False
    if "ALL_ATTENTION_FUNCTIONS" not in source:
        return False
    compared = re.findall(
        r"_attn_implementation\s*(?:==|!=|in|not in)\s*(\([^)]*\)|\[[^\]]*\]|[\"'][^\"']*[\"'])", source
    )
    return not any(
        f'"{implementation}"' in literal or f"'{implementation}'" in literal for literal in compared
    )
