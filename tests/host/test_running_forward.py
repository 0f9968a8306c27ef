"""What the frames of a running call tell, on this Python and under this host."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.generation import GenerationMixin
from transformers.models.llama.modeling_llama import LlamaModel

from hf_paged_cache import PagedCache
from hf_paged_cache.host import running_forward
from hf_paged_cache.host.frames import Frame
from tests.support.models import cache_kwarg, shared_model
from tests.support.quantized import feed, ids

HELD: list[Any] = []


@pytest.fixture(autouse=True)
def _nothing_held() -> None:
    HELD.clear()


def _planted() -> Frame:
    frame = sys._getframe(1)
    planted = Frame.of(frame)
    assert Frame.of(frame) is planted
    assert planted.is_running()
    return planted


def forward(do: Callable[[], Any] = lambda: None) -> Any:
    HELD.append(_planted())
    return do()


def fail() -> None:
    raise ZeroDivisionError


def catch_inside() -> None:
    try:
        fail()
    except ZeroDivisionError as error:
        HELD.append(error)  # and with it the frames up to the one that caught it


def test_a_call_that_returned() -> None:
    forward()
    assert HELD[0].has_returned() is True


def test_a_call_that_failed_seen_while_its_traceback_lives_and_after() -> None:
    seen = []
    try:
        forward(fail)
    except ZeroDivisionError:
        seen.append(HELD[0].has_returned())
    seen.append(HELD[0].has_returned())
    assert seen == [False, False]


def test_many_calls_from_one_place_that_return_and_fail_in_turn() -> None:
    seen = []
    for turn in range(6):
        HELD.clear()
        with contextlib.suppress(ZeroDivisionError):
            forward(fail if turn % 2 else lambda: None)
        seen.append(HELD[0].has_returned())
    assert seen == [True, False] * 3


def test_what_waits_for_a_return_happens_before_the_caller_goes_on_and_not_after_a_failure() -> None:
    seen: list[str] = []

    def planned(do: Callable[[], Any]) -> None:
        _planted().when_returned(lambda: seen.append("returned"))
        do()

    planned(lambda: None)
    seen.append("caller")
    with contextlib.suppress(ZeroDivisionError):
        planned(fail)
    assert seen == ["returned", "caller"]


def test_an_error_that_was_caught_inside() -> None:
    def caught() -> Any:
        ending = _planted()
        try:
            fail()
        except ZeroDivisionError as error:
            HELD.append(error)
        return ending

    ending = caught()
    assert ending.has_returned() is True  # its frame is kept by the error's traceback
    forward(catch_inside)
    assert next(held for held in HELD if isinstance(held, Frame)).has_returned() is True


def test_a_call_that_a_thread_began_with() -> None:
    thread = threading.Thread(target=forward)
    thread.start()
    thread.join()
    assert HELD[0].has_returned() is True


# --- which call of a model is in progress -------------------------------------------------------------------


@pytest.mark.parametrize("case", ["llama", "gpt2", "falcon", "gemma2"])
def test_the_stack_tells_which_call_brings_keys(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared_model(case)
    seen: list[running_forward.ModelCall] = []
    update: Callable[..., Any] = PagedCache.update

    def watch(self: PagedCache, *args: Any, **kwargs: Any) -> Any:
        call = running_forward.current()
        assert call.forward.is_here
        assert [each.is_running() for each in (call.forward, call.root)] == [True, True]
        seen.append(call)
        return update(self, *args, **kwargs)

    monkeypatch.setattr(PagedCache, "update", watch)
    feed(model, PagedCache(model), ids(7))
    model.generate(ids(7), max_new_tokens=2, do_sample=False, **{cache_kwarg(): PagedCache(model)})
    plain, generated = seen[0], seen[-1]
    assert (plain.is_generating, generated.is_generating) == (False, True)
    assert torch.equal(plain.input_ids, ids(7))  # type: ignore[arg-type]
    assert plain.position_ids.flatten()[:7].tolist() == list(range(7))  # type: ignore[union-attr]
    assert not any(each.is_running() for call in seen for each in (call.forward, call.root))


def test_without_a_model_on_the_stack_nothing_is_claimed() -> None:
    call = running_forward.current()
    assert (call.forward.is_known, call.root.is_known) == (False, False)
    assert (call.use_cache, call.position_ids, call.input_ids) == (None, None, None)
    assert not call.is_generating


def test_the_host_has_the_names_that_are_looked_for() -> None:
    generate, drafts = map(inspect.unwrap, (GenerationMixin.generate, GenerationMixin._assisted_decoding))
    assert (generate.__code__.co_name, drafts.__code__.co_name) == ("generate", "_assisted_decoding")
    assert all(each.__module__.startswith("transformers.generation") for each in (generate, drafts))
    assert {"input_ids", "generation_config", "model_kwargs"} <= set(inspect.signature(drafts).parameters)
    around, function = [], LlamaModel.forward
    while hasattr(function, "__wrapped__"):
        around.append(function.__code__)
        function = function.__wrapped__
    assert running_forward._FILLS_IN_DEFAULTS in [code.co_qualname for code in around]
    assert any(code.co_flags & running_forward._TAKES_ANYTHING for code in around)
    named = {"self", "input_ids", "attention_mask", "position_ids", "use_cache"}
    assert named <= {*inspect.signature(function).parameters}
