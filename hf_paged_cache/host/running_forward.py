"""Which call of a model is in progress, read from the Python stack.

A cache is handed K and V layer by layer; nobody tells it when a forward begins or ends, whether it failed,
or whether the caller asked for `use_cache=False`. The frames of the host's own functions say it all: a
forward is in progress as long as its frame is on the stack of its thread, and what is put beside the frame's
variables sees whether it returned or was left by an exception (`Ending`). Where there are no such frames (a
loop that calls `cache.update` itself) nothing is known, and the cache goes by the order of the layers.

Of CPython this needs: `sys._getframe` and `sys._current_frames`; names that are added to `frame.f_locals`
stay with the frame; and a frame that returns lets go of its variables before its caller goes on.
`tests/host/test_running_forward.py` pins all three.
"""

from __future__ import annotations

import dis
import gc
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import CodeType, FrameType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache

_GENERATION = "transformers.generation"
_PACKAGE = __name__.partition(".")[0]
_MARK = "__hf_paged_cache__"
_FILLS_IN_DEFAULTS = "merge_with_config_defaults.<locals>.wrapper"
"""The host's wrapper of a forward that writes the config's values beside what the forward was given."""
_TAKES_ANYTHING = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
_UPDATE_IN_GRAPH = "update_in_graph"
"""The method by which a compiled forward reaches a cache."""


class Ending:
    """How a function call ends, which its frame does not outlive to tell."""

    __slots__ = ("_afterwards", "_caller", "_has_returned", "_mark")

    def __init__(self, frame: FrameType, mark: _Mark) -> None:
        self._caller = _position(frame.f_back)
        self._has_returned: bool | None = None
        self._mark = weakref.ref(mark)
        self._afterwards: list[Callable[[], None]] = []

    def see(self, standing: FrameType | None) -> None:
        """Hear that the frame is gone, and who runs at that moment.

        A frame that returns is cleared while its caller still stands at the call. One that an exception has
        left lives on in the traceback, and by the time that goes its caller is elsewhere.
        """
        self._has_returned = _position(standing) == self._caller
        if self._has_returned:
            for do in self._afterwards:
                do()

    def when_returned(self, do: Callable[[], None]) -> None:
        """Have something done when the call returns, before its caller goes on. It must not raise."""
        self._afterwards.append(do)

    def has_returned(self) -> bool | None:
        """Whether the call, which is over, has returned, or an exception left it; None if nobody can say."""
        mark = self._mark()
        if mark is None:
            return self._has_returned
        # Somebody keeps the frame: a traceback, mostly.
        for names in gc.get_referrers(mark):
            for frame in gc.get_referrers(names):
                if isinstance(frame, FrameType) and frame.f_locals.get(_MARK) is mark:
                    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")
        return None

    @classmethod
    def of(cls, frame: FrameType) -> Ending:
        """That of a running frame, always the same one."""
        mark = frame.f_locals.get(_MARK)
        if mark is None:
            # Names that the function does not have stay with its frame, and nobody else sees them.
            mark = frame.f_locals[_MARK] = _Mark(frame)
        ending = mark.ending
        assert isinstance(ending, Ending), "a mark has its ending from the start"
        return ending


class _Mark:
    """Lies beside the variables of a frame, and goes with them."""

    ending: Ending | None = None

    def __init__(self, frame: FrameType) -> None:
        self.ending = Ending(frame, self)

    def __del__(self) -> None:
        if self.ending is not None:
            self.ending.see(sys._getframe(0).f_back)


def _position(frame: FrameType | None) -> tuple[int, int] | None:
    return None if frame is None else (id(frame), frame.f_lasti)


@dataclass(frozen=True, slots=True)
class Place:
    """A frame of some thread; no reference to it, so that nothing is kept alive.

    Attributes:
        thread: Identifier of the thread.
        frame: Identity of the frame, or None: the thread as a whole.
        ending: How it ends. The next call of the same function often gets the same memory, so identity alone
            would not tell them apart.
    """

    thread: int
    frame: int | None
    ending: Ending | None = None

    @property
    def is_here(self) -> bool:
        """Whether it belongs to the thread that asks."""
        return self.thread == threading.get_ident()

    def is_running(self) -> bool:
        """Whether the frame is on the stack of its thread; without a frame, whether the thread lives."""
        # The own stack, without the lock that looking at others takes.
        top = sys._getframe(1) if self.is_here else sys._current_frames().get(self.thread)
        if self.frame is None or top is None:
            return top is not None
        frame: FrameType | None = top
        while frame is not None:
            if id(frame) == self.frame:
                mark = frame.f_locals.get(_MARK)
                return mark is not None and mark.ending is self.ending
            frame = frame.f_back
        return False

    def has_returned(self) -> bool | None:
        """Whether the call, which is over, has returned; None if there is none, or nobody knows."""
        return None if self.ending is None else self.ending.has_returned()

    def when_returned(self, do: Callable[[], None]) -> None:
        """Have something done when the call returns, before its caller goes on; never if it is none."""
        if self.ending is not None:
            self.ending.when_returned(do)


@dataclass(frozen=True, slots=True)
class ModelCall:
    """What the stack says of the call that brings K and V.

    Attributes:
        forward: The forward of the innermost model of the host, or what was compiled with that forward in it;
            a place without a frame if there is none.
        root: The outermost call of the host around it: `generate`, or the forward itself.
        model: Whose forward it is, if that shows and it still lives.
        whole: The outermost model that this forward is part of; where it is none of the host, the outermost
            module.
        use_cache: What that forward was told, but for a False that nobody said; None if it does not say.
        position_ids: `[batch or 1, tokens]`, as that forward has them after defaults are filled in; None if
            it has none that its answer depends on.
        attention_mask: What that forward has under this name, if it is a tensor.
        is_without_mask: Whether that forward has the name, and nothing under it.
        input_ids: `[batch, tokens]` as that forward has them; None if it was given embeddings.
        is_generating: Whether `generate` is behind it.
    """

    forward: Place
    root: Place
    model: weakref.ref[PreTrainedModel] | None
    whole: weakref.ref[torch.nn.Module] | None
    use_cache: bool | None
    position_ids: torch.Tensor | None
    attention_mask: torch.Tensor | None
    is_without_mask: bool
    input_ids: torch.Tensor | None
    is_generating: bool


_self_kinds: dict[CodeType, type[torch.nn.Module] | None] = {}


def current() -> ModelCall:
    """The call in progress in this thread."""
    thread = threading.get_ident()
    inner: FrameType | None = None
    root: FrameType | None = None
    outer: FrameType | None = None
    module: FrameType | None = None
    graph: FrameType | None = None
    is_generating = is_in_graph = False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        if name == "forward" and (kind := _self_kind(frame)) is not None:
            if kind is PreTrainedModel:
                inner, outer, root = inner or frame, frame, frame
            elif not is_in_graph:  # where modules are the compiler's
                module = frame
        elif _is_generate(frame):
            root, is_generating = frame, True
        elif name == _UPDATE_IN_GRAPH and _module_of(frame).startswith(_PACKAGE):
            is_in_graph = True
        elif is_in_graph and graph is None and _is_written_by_people(frame):
            graph = frame
        frame = frame.f_back
    model, told = (None, {}) if inner is None else (inner.f_locals.get("self"), inner.f_locals)
    given = None
    if inner is None and graph is not None:
        inner, root = graph, root or graph
        model, told = _given_to(graph)
        given = told.get("use_cache")
    whole = model if outer is None or outer is inner else outer.f_locals.get("self")
    if whole is None and module is not None:
        whole = module.f_locals.get("self")
    # Falcon takes positions, and with ALiBi has no use for them.
    has_positions = told.get("alibi") is None
    return ModelCall(
        _place(thread, inner),
        _place(thread, root),
        weakref.ref(model) if isinstance(model, PreTrainedModel) else None,
        weakref.ref(whole) if isinstance(whole, torch.nn.Module) else None,
        None if inner is None else _use_cache(inner, model, told, given),
        _tensor_in(told, "position_ids") if has_positions else None,
        _tensor_in(told, "attention_mask"),
        "attention_mask" in told and told["attention_mask"] is None,
        _tensor_in(told, "input_ids"),
        is_generating,
    )


def here() -> Place:
    """The function that asks."""
    return _place(threading.get_ident(), sys._getframe(1))


def is_generation(depth: int = 1) -> bool:
    """Whether the function that is `depth` frames up from the caller belongs to the host's generation."""
    return _module_of(sys._getframe(depth + 1)).startswith(_GENERATION)


def generated_length() -> int | None:
    """Tokens of a row at which the innermost `generate` of the host on this thread's stack stops.

    None where there is none. Rows may hold more: a prompt given as embeddings, or what a cache held before.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "generate" and _module_of(frame).startswith(_GENERATION):
            length = getattr(frame.f_locals.get("generation_config"), "max_length", None)
            return length if isinstance(length, int) else None
        frame = frame.f_back
    return None


def is_copying(depth: int = 1) -> bool:
    """Whether the function that is `depth` frames up from the caller belongs to the module `copy`."""
    return _module_of(sys._getframe(depth + 1)) == "copy"


def prompt_of(depth: int = 1) -> tuple[torch.Tensor | None, torch.nn.Module | None]:
    """`input_ids` `[batch, tokens]` of the function `depth` frames up, and its model; None if it has none."""
    told = sys._getframe(depth + 1).f_locals
    model = told.get("self")
    return _tensor_in(told, "input_ids"), model if isinstance(model, torch.nn.Module) else None


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
        or not _module_of(frame).startswith(_GENERATION)
    ):
        return None
    ids, given = _tensor_in(frame.f_locals, "input_ids"), frame.f_locals.get("model_kwargs", {})
    name = "attention_mask" if given.get("encoder_outputs") is None else "decoder_attention_mask"
    mask = _tensor_in(given, name)
    if ids is None:
        return None
    tokens = int(ids.shape[1])
    settings = frame.f_locals.get("generation_config")
    masked = getattr(settings, "_mask_length", tokens) if mask is None else mask.shape[1]
    return tokens if masked == tokens else None


def _tensor_in(names: Mapping[str, Any], name: str) -> torch.Tensor | None:
    value = names.get(name)
    return value if isinstance(value, torch.Tensor) else None


def _self_kind(frame: FrameType) -> type[torch.nn.Module] | None:
    """Whether a function is a method of a model of the host, of another module, or of none."""
    code = frame.f_code
    if code not in _self_kinds:
        owner: Any = frame.f_locals.get("self")
        kinds = (kind for kind in (PreTrainedModel, torch.nn.Module) if isinstance(owner, kind))
        _self_kinds[code] = next(kinds, None)
    return _self_kinds[code]


def _is_generate(frame: FrameType) -> bool:
    return frame.f_code.co_name == "generate" and _module_of(frame).startswith(_GENERATION)


def _is_written_by_people(frame: FrameType) -> bool:
    """Whether it is no function of ours, of torch, or made by a compiler."""
    name = _module_of(frame)
    return bool(name) and name.partition(".")[0] not in ("torch", _PACKAGE)


def _given_to(frame: FrameType) -> tuple[Any, dict[str, Any]]:
    """The model and the named arguments that a function around its forward was called with.

    A forward of the host has several such functions around it; compiled, only the outermost is seen to run.
    """
    names = frame.f_locals
    args, told = names.get("args", ()), dict(names.get("kwargs", ()))
    if "self" in names:
        args = (names["self"], *args)
    if not (args and isinstance(args[0], PreTrainedModel)):
        return None, {}
    model, *rest = args
    arguments = _arguments_of(type(model).forward)
    told = dict.fromkeys(arguments) | dict(zip(arguments, rest, strict=False)) | told
    if model.config.is_encoder_decoder:
        for name in ("input_ids", "attention_mask", "position_ids"):
            told[name] = told.get(f"decoder_{name}")
    return model, told


def _use_cache(frame: FrameType, model: Any, names: Mapping[str, Any], given: object) -> bool | None:
    """What a forward was told of the use of its cache; a False counts only if somebody said it.

    A model without a word takes the one of its config, which fine-tuning leaves at False; under gradient
    checkpointing, or with labels, it takes False; and so it tells the models inside. What a forward was given
    itself stands in the functions around it, of torch and of the host. Where there are none
    (`model.forward(...)` of some models) nobody can tell, and the cache is used, as the default one would be.

    Args:
        frame: Of the forward.
        model: Whose it is.
        names: What that forward has.
        given: What it was given, where that shows already.
    """
    value = _named_use_cache(names)
    if value is not False:
        return value if isinstance(value, bool) else None
    above = frame.f_back
    while above is not None and not _is_generate(above):
        code = above.f_code
        if code.co_name == "forward" and _self_kind(above) is PreTrainedModel:
            if given is not False or _named_use_cache(above.f_locals) is not False:
                break  # a default of the inner model; or what the outer one wants of it
            model, given = above.f_locals.get("self"), None
        elif (
            code.co_flags & _TAKES_ANYTHING == _TAKES_ANYTHING
            and code.co_qualname != _FILLS_IN_DEFAULTS
            and _module_of(above).partition(".")[0] in ("torch", "transformers")
        ):
            whose, told = _given_to(above)
            given = told.get("use_cache") if whose is model else given
        above = above.f_back
    return False if given is False else None


def _named_use_cache(names: Mapping[str, Any]) -> object:
    return names["use_cache"] if "use_cache" in names else names.get("kwargs", {}).get("use_cache")


@cache
def _arguments_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Names of what a forward takes, in order."""
    return tuple(inspect.signature(forward).parameters)[1:]


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _place(thread: int, frame: FrameType | None) -> Place:
    if frame is None:
        return Place(thread, None)
    return Place(thread, id(frame), Ending.of(frame))
