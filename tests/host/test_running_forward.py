"""What the frames of a running call tell, on this Python."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from hf_paged_cache.host.running_forward import Ending

HELD: list[Any] = []


@pytest.fixture(autouse=True)
def _nothing_held() -> None:
    HELD.clear()


def _planted() -> Ending:
    frame = sys._getframe(1)
    assert Ending.of(frame) is Ending.of(frame)
    return Ending.of(frame)


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
    assert next(held for held in HELD if isinstance(held, Ending)).has_returned() is True


def test_a_call_that_a_thread_began_with() -> None:
    thread = threading.Thread(target=forward)
    thread.start()
    thread.join()
    assert HELD[0].has_returned() is True
