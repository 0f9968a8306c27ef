"""Names of `transformers` that it does not promise to keep, and what depends on its version."""

from __future__ import annotations

import copyreg
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache, wraps
from importlib import import_module
from typing import Any

import torch
from packaging.version import Version
from transformers import PreTrainedConfig
from transformers import masking_utils as _masking
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.utils import output_capturing as _capturing

from hf_paged_cache.errors import CacheMismatchError, PagedCacheError

from . import VERSION
from .frames import module_of

_CROP_KEEPS_WHEN_POSITIVE = Version("5.18") > VERSION
_IMPLEMENTATION = "_attn_implementation_internal"
_eager_functions: dict[type, Callable[..., Any]] = {}  # of modules


def resolve_config(config_or_model: object) -> tuple[PreTrainedConfig, torch.nn.Module | None]:
    """The config meant by a config or a model, and the model if that was given; else PagedCacheError."""
    if isinstance(config_or_model, PreTrainedConfig):
        return config_or_model, None
    config = getattr(config_or_model, "config", None)
    if isinstance(config_or_model, torch.nn.Module) and isinstance(config, PreTrainedConfig):
        return config, config_or_model
    raise PagedCacheError(
        "config_or_model must be a transformers config or a model that has one, got "
        f"{type(config_or_model).__name__}; pass `model` or `model.config`"
    )


def expected_device(model: torch.nn.Module | None) -> torch.device:
    """The device that a model computes on; without a model, the fastest there is."""
    parameter = None if model is None else next(model.parameters(), None)
    if parameter is not None:
        return parameter.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def cache_argument(model: torch.nn.Module) -> str:
    """What a model's forward and `generate` call a cache: transformers renamed both together."""
    accepted = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in accepted else "past_key_values"


def tokens_to_remove(argument: int, length: int) -> int:
    """How many of `length` tokens `crop(argument)` removes in the installed version, or PagedCacheError."""
    argument = int(argument)  # 5.17 passes a tensor
    if argument <= 0:
        return -argument
    if _CROP_KEEPS_WHEN_POSITIVE:
        return max(0, length - argument)
    raise PagedCacheError(
        f"crop takes minus the number of tokens to remove, got {argument}; "
        f"to keep {argument} of {length} tokens: `cache.crop({min(0, argument - length)})`"
    )


def register_attention(name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Make a pair of attention and mask functions known under one name. Registering again changes nothing."""
    AttentionInterface.register(name, attention)
    _masking.AttentionMaskInterface.register(name, mask)


@cache
def call_before_continuous_batching(prepare: Callable[[torch.nn.Module], None]) -> None:
    """Show a function a model before continuous batching takes it, which knows implementations by name."""
    manager: Any = ContinuousBatchingManager
    switch = manager.switch_to_cb_friendly_attn

    @wraps(switch)
    def prepared(self: Any, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        prepare(model)
        return switch(self, model, *args, **kwargs)

    manager.switch_to_cb_friendly_attn = prepared


def set_implementation(config: PreTrainedConfig, implementation: str | None) -> None:
    """Change the attention implementation of one config, and of none inside it."""
    setattr(config, _IMPLEMENTATION, implementation)


def pickle_with(config_class: type, plain_name: Callable[[str], str]) -> None:
    """Pickle configs of a class under a plain name: another process may not know ours. Copies keep it."""

    def reduce(config: Any) -> Any:
        make, arguments, state, *rest = config.__reduce_ex__(2)
        name = state.get(_IMPLEMENTATION)
        if name is not None and module_of(sys._getframe(1)) != "copy":
            state = state | {_IMPLEMENTATION: plain_name(name)}
        return make, arguments, state, *rest

    copyreg.pickle(config_class, reduce)


def attention_function(implementation: str, module: torch.nn.Module) -> Callable[..., Any]:
    """The attention function that a module would use; CacheMismatchError if its own cannot be found."""
    if implementation != "eager":
        function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[implementation]
        return function
    owner = type(module)
    if owner in _eager_functions:  # no functools.cache: compiled steps come by here
        return _eager_functions[owner]
    # Eager attention is no registered name: every modeling file has its own.
    for file in (owner.forward.__module__, *(base.__module__ for base in owner.__mro__)):
        found = getattr(sys.modules.get(file), "eager_attention_forward", None)
        if found is not None:
            return _eager_functions.setdefault(owner, found)
    raise CacheMismatchError(
        f"{owner.__name__} has no `eager_attention_forward` beside it, so its eager attention cannot "
        "be called; load the model with attn_implementation='sdpa'"
    )


def wants_weights(module: torch.nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """Whether somebody will read the weights that a module's attention function, given `kwargs`, returns.

    The host records them with hooks on its modules, most of which are not told so. Other hooks see them too.
    """
    if kwargs.get("output_attentions"):
        return True
    collector: Any = _capturing._active_collector
    if torch.compiler.is_compiling():
        recorded = collector.global_var
    else:
        recorded = collector.get()
        hooks = module._forward_hooks.values()
        if any(getattr(hook, "__module__", "") != _capturing.__name__ for hook in hooks):
            return True
    return any("attention" in name for name in recorded or ())


def mask_function(implementation: str) -> Callable[..., Any]:
    """The function that makes attention masks under `implementation`."""
    function: Callable[..., Any] = _masking.ALL_MASK_ATTENTION_FUNCTIONS[implementation]
    return function


def is_plain_causal(mask_function: object) -> bool:
    """Whether a mask pattern is causality and nothing else."""
    return mask_function is _masking.causal_mask_function


def attention_configs(config_or_model: object) -> Iterator[tuple[PreTrainedConfig, str]]:
    """The configs that attention layers read their implementation from, each with its modeling file.

    These are what attention modules of a model hold (the decoder of an encoder-decoder has a copy, to which
    the model's own config does not lead); of a config alone it is the text part.
    """
    config, model = resolve_config(config_or_model)
    if model is None:
        decoder = config.get_text_config(decoder=True)
        target = decoder if any(value is decoder for value in vars(config).values()) else config
        yield target, type(target).__module__.replace("configuration_", "modeling_")
        return
    found: dict[int, tuple[PreTrainedConfig, str]] = {}
    for module in model.modules():
        held = getattr(module, "config", None)
        if isinstance(held, PreTrainedConfig) and getattr(module, "layer_idx", None) is not None:
            found.setdefault(id(held), (held, type(module).__module__))
    yield from found.values()


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
    return not any(re.search(f"[\"']{implementation}[\"']", literal) for literal in compared)
