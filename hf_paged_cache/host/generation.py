"""The host's `generate` on the Python stack: what it is about to feed, and how long its rows get.

Of the host this needs functions `generate` and `_assisted_decoding` of modules under
`transformers.generation`, whose variables are `self`, `input_ids`, `model_kwargs` (`attention_mask`,
`decoder_attention_mask`, `encoder_outputs`) and `generation_config` (`max_length`, `_mask_length`), and that
prompts are sliced by what is left of their length without the cache's. `tests/host/test_running_forward.py`,
`tests/cases/test_history.py` and `tests/cases/test_assisted.py` pin them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from transformers.cache_utils import EncoderDecoderCache

from .frames import module_of, stack

_MODULES = "transformers.generation"

# Given the tokens of a prompt, its ids and the model, if they are known: how many to feed.
MeetPrompt = Callable[[int, torch.Tensor | None, torch.nn.Module | None], int]


class CachedLength(int):
    """A cache's length, which looks at what `generate` is about to slice from a prompt.

    It feeds the last `prompt length - cached length` tokens. Where that is not positive, as a Python slice it
    silently picks wrong tokens; and nothing says that the prompt begins with what is cached.
    """

    _meet: weakref.WeakMethod[MeetPrompt]

    def __new__(cls, tokens: int, meet: weakref.WeakMethod[MeetPrompt]) -> CachedLength:
        """A length of so many tokens."""
        length = super().__new__(cls, tokens)
        length._meet = meet
        return length

    def __rsub__(self, other: int) -> int:
        meet, frame = self._meet(), sys._getframe(1)
        if meet is None or not module_of(frame).startswith(_MODULES):
            return int(other) - int(self)
        model = frame.f_locals.get("self")
        ids = tensor_in(frame.f_locals, "input_ids")
        return meet(int(other), ids, model if isinstance(model, torch.nn.Module) else None)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def is_generation(frame: FrameType, name: str = "generate") -> bool:
    """Whether the function that runs in a frame is `generate` of the host, or one beside it."""
    return frame.f_code.co_name == name and module_of(frame).startswith(_MODULES)


def generated_length() -> int | None:
    """Tokens of a row at which the innermost `generate` of the host on this thread's stack stops.

    None where there is none. Rows may hold more: a prompt given as embeddings, or what a cache held before.
    """
    for frame in stack(sys._getframe(1)):
        if is_generation(frame):
            length = getattr(frame.f_locals.get("generation_config"), "max_length", None)
            return length if isinstance(length, int) else None
    return None


def drafts_feed_all_of() -> int | None:
    """Tokens of the whole prompt, if what has called the caller is the host's assisted decoding.

    Its first forward feeds all ids that it was given, whatever the cache holds. That is right for new ids
    alone, which come with a longer mask; then, and for any other function, the answer is None.
    """
    frame: FrameType | None = sys._getframe(2)
    if frame is not None and frame.f_code is EncoderDecoderCache.activate_past_recording.__code__:
        frame = frame.f_back
    if frame is None or not is_generation(frame, "_assisted_decoding"):
        return None
    names = frame.f_locals
    ids, given = tensor_in(names, "input_ids"), names.get("model_kwargs", {})
    tokens = None if ids is None else int(ids.shape[1])
    name = "attention_mask" if given.get("encoder_outputs") is None else "decoder_attention_mask"
    mask, settings = tensor_in(given, name), names.get("generation_config")
    masked = getattr(settings, "_mask_length", tokens) if mask is None else mask.shape[1]
    return tokens if masked == tokens else None


def tensor_in(names: Mapping[str, Any], name: str) -> torch.Tensor | None:
    """The value of a variable, if it is a tensor."""
    value = names.get(name)
    return value if isinstance(value, torch.Tensor) else None
