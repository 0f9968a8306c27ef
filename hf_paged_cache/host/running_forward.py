"""The call of a model that is in progress (`current`), read from the Python stack.

A cache is handed K and V layer by layer; nobody tells it when a forward begins or ends, whether it failed,
or whether the caller asked for `use_cache=False`. The frames of the host's own functions say it all: a
forward is in progress as long as its frame is on the stack of its thread, and `frames.Frame` sees whether it
returned or was left by an exception. Where there are no such frames (a loop that calls `cache.update` itself)
nothing is known, and the cache goes by the order of the layers. Hooks of torch would say it only of models
that a cache was given, not of `model.forward(...)`, and nothing of `generate`; and they are seen by whoever
compiles, copies or records a model.

Of CPython this needs what `frames` lists, and two flags of a code object (`inspect.CO_VARARGS`,
`CO_VARKEYWORDS`). Of the host, pinned by `tests/host/test_running_forward.py` where nothing else is named:

- methods `forward` of a `PreTrainedModel` that call themselves `self`, and what is given to them
  `input_ids`, `attention_mask`, `position_ids`, `use_cache` (alone or in `kwargs`), `alibi`;
- `decoder_input_ids`, `decoder_attention_mask` and `decoder_position_ids` in an encoder-decoder;
- `generate`, a function of a module under `transformers.generation`;
- functions of torch and the host around a forward, which take `self`, `*args` and `**kwargs`, and among them
  `merge_with_config_defaults.<locals>.wrapper`, which writes values of the config beside what was given
  (`tests/forward/test_step.py`).
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import CodeType, FrameType
from typing import Any

import torch
from transformers import PreTrainedModel

from .frames import Frame, module_of, stack
from .generation import is_generation, tensor_in

_PACKAGE = __name__.partition(".")[0]
_FILLS_IN_DEFAULTS = "merge_with_config_defaults.<locals>.wrapper"
_TAKES_ANYTHING = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
_self_kinds: dict[CodeType, type[torch.nn.Module] | None] = {}
_UPDATE_IN_GRAPH = "update_in_graph"  # the method by which a compiled forward reaches a cache


@dataclass(frozen=True, slots=True)
class ModelCall:
    """What the stack says of the call that brings K and V."""

    # Of the innermost model of the host, or what was compiled with that forward in it; else not known.
    forward: Frame
    root: Frame  # the outermost call of the host around it: `generate`, or the forward itself
    model: weakref.ref[PreTrainedModel] | None  # whose forward it is, if that shows
    whole: weakref.ref[torch.nn.Module] | None  # the outermost model, or else module, around it
    use_cache: bool | None  # as given, but for a False that no caller gave; None if it does not show
    position_ids: torch.Tensor | None  # `[batch or 1, tokens]`; None if the answer does not depend on any
    attention_mask: torch.Tensor | None  # what the forward has under this name, if it is a tensor
    is_without_mask: bool  # the forward has the name, and nothing under it
    input_ids: torch.Tensor | None  # `[batch, tokens]`; None if it was given embeddings
    is_generating: bool  # `generate` is behind it


def current() -> ModelCall:
    """The call in progress in this thread."""
    inner = outer = root = module = graph = None
    is_generating = is_in_graph = False
    for frame in stack(sys._getframe(1)):
        name = frame.f_code.co_name
        if name == "forward" and (kind := _self_kind(frame)) is not None:
            if kind is PreTrainedModel:
                inner, outer, root = inner or frame, frame, frame
            elif not is_in_graph:  # where modules are the compiler's
                module = frame
        elif is_generation(frame):
            root, is_generating = frame, True
        elif name == _UPDATE_IN_GRAPH and _library_of(frame) == _PACKAGE:
            is_in_graph = True
        elif is_in_graph and graph is None and _library_of(frame) not in ("", "torch", _PACKAGE):
            graph = frame  # a function that a person has written
    names: Mapping[str, Any] = {} if inner is None else inner.f_locals
    model, given = names.get("self"), None
    if inner is None and graph is not None:
        inner, root = graph, root or graph
        model, names = _given_to(graph)
        given = names.get("use_cache")
    whole = model if outer is None or outer is inner else outer.f_locals.get("self")
    if whole is None and module is not None:
        whole = module.f_locals.get("self")
    return ModelCall(
        Frame.of(inner),
        Frame.of(root),
        weakref.ref(model) if isinstance(model, PreTrainedModel) else None,
        weakref.ref(whole) if isinstance(whole, torch.nn.Module) else None,
        None if inner is None else _use_cache(inner, model, names, given),
        # Falcon takes positions, and with ALiBi has no use for them.
        tensor_in(names, "position_ids") if names.get("alibi") is None else None,
        tensor_in(names, "attention_mask"),
        "attention_mask" in names and names["attention_mask"] is None,
        tensor_in(names, "input_ids"),
        is_generating,
    )


def _self_kind(frame: FrameType) -> type[torch.nn.Module] | None:
    """Whether a function is a method of a model of the host, of another module, or of none."""
    code = frame.f_code
    if code not in _self_kinds:
        owner: Any = frame.f_locals.get("self")
        kinds = (kind for kind in (PreTrainedModel, torch.nn.Module) if isinstance(owner, kind))
        _self_kinds[code] = next(kinds, None)
    return _self_kinds[code]


def _library_of(frame: FrameType) -> str:
    """Name of the library that a function belongs to; none if a compiler has made it."""
    return module_of(frame).partition(".")[0]


def _given_to(frame: FrameType) -> tuple[Any, dict[str, Any]]:
    """The model and named arguments given to a function around its forward (compiled, there is only one)."""
    names = frame.f_locals
    args, named = names.get("args", ()), dict(names.get("kwargs", ()))
    if "self" in names:
        args = (names["self"], *args)
    if not (args and isinstance(args[0], PreTrainedModel)):
        return None, {}
    model, *rest = args
    arguments = _arguments_of(type(model).forward)
    given = dict.fromkeys(arguments) | dict(zip(arguments, rest, strict=False)) | named
    if model.config.is_encoder_decoder:
        for name in ("input_ids", "attention_mask", "position_ids"):
            given[name] = given.get(f"decoder_{name}")
    return model, given


def _use_cache(frame: FrameType, model: Any, names: Mapping[str, Any], given: object) -> bool | None:
    """What the forward of a model was given as `use_cache`; a False counts only if a caller gave it.

    A model that is given none takes the one of its config, which fine-tuning leaves at False; under gradient
    checkpointing, or with labels, it takes False; and so it hands on to the models inside. What a forward was
    given itself stands in the functions around it, of torch and of the host. Where there are none
    (`model.forward(...)` of some models) it cannot be known, and the cache is used, as the default one would
    be. `names` are the forward's variables, `given` what it was given where that shows already.
    """
    value = _named_use_cache(names)
    if value is not False:
        return value if isinstance(value, bool) else None
    for above in stack(frame.f_back):
        if is_generation(above):
            break
        code = above.f_code
        if code.co_name == "forward" and _self_kind(above) is PreTrainedModel:
            if given is not False or _named_use_cache(above.f_locals) is not False:
                break  # a default of the inner model; or what the outer one wants of it
            model, given = above.f_locals.get("self"), None
        elif (
            code.co_flags & _TAKES_ANYTHING == _TAKES_ANYTHING
            and code.co_qualname != _FILLS_IN_DEFAULTS
            and _library_of(above) in ("torch", "transformers")
        ):
            whose, arguments = _given_to(above)
            given = arguments.get("use_cache") if whose is model else given
    return False if given is False else None


def _named_use_cache(names: Mapping[str, Any]) -> object:
    return names["use_cache"] if "use_cache" in names else names.get("kwargs", {}).get("use_cache")


@cache
def _arguments_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Names of what a forward takes, in order."""
    return tuple(inspect.signature(forward).parameters)[1:]
