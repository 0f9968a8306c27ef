"""A function call on the stack of a thread, and how it ends: what CPython tells of it.

What is put beside the variables of a running frame goes with them, and sees whether the call returned or an
exception left it. Of CPython this needs (`tests/host/test_running_forward.py` pins all of it):

- `sys._getframe` and `sys._current_frames`: the stack of this thread, and of others;
- names that are added to `frame.f_locals` stay with the frame;
- a frame that returns lets go of its variables before its caller goes on, while the caller's `f_lasti` is
  still that of the call;
- `gc.get_referrers` leads from such a name's value to its frame, whose last instruction (`f_lasti` in
  `f_code.co_code`, named by `dis.opname`) begins with RETURN if it returned.
"""

from __future__ import annotations

import dis
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType

_MARK = "__hf_paged_cache__"


def stack(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame, its caller, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def module_of(frame: FrameType) -> str:
    """Name of the module whose function runs in a frame."""
    return str(frame.f_globals.get("__name__", ""))


class Frame:
    """A function call of some thread; no reference to its frame, so that nothing is kept alive."""

    __slots__ = ("_afterwards", "_caller", "_frame_id", "_has_returned", "_mark", "_thread", "is_known")

    def __init__(self, frame: FrameType | None) -> None:
        self.is_known = frame is not None  # otherwise it is the thread as a whole
        self._thread, self._frame_id = threading.get_ident(), id(frame)
        self._caller = None if frame is None else _position(frame.f_back)
        self._has_returned: bool | None = None
        self._mark: weakref.ref[_Mark] | None = None
        self._afterwards: list[Callable[[], None]] = []

    @classmethod
    def of(cls, frame: FrameType | None) -> Frame:
        """That of a running frame of this thread, always the same one; without a frame, of the thread."""
        if frame is None:
            return cls(None)
        mark = frame.f_locals.get(_MARK)
        if isinstance(mark, _Mark) and mark.owner is not None:
            return mark.owner
        owner = cls(frame)
        # Names that the function does not have stay with its frame, and nobody else sees them.
        frame.f_locals[_MARK] = _Mark(owner)
        return owner

    @classmethod
    def here(cls) -> Frame:
        """The function that asks."""
        return cls.of(sys._getframe(1))

    @property
    def is_here(self) -> bool:
        """Whether it belongs to the thread that asks."""
        return self._thread == threading.get_ident()

    def is_running(self) -> bool:
        """Whether the frame is on the stack of its thread; without a frame, whether the thread lives."""
        # The own stack, without the lock that looking at others takes.
        top = sys._getframe(1) if self.is_here else sys._current_frames().get(self._thread)
        if not self.is_known:
            return top is not None
        frame = next((frame for frame in stack(top) if id(frame) == self._frame_id), None)
        # The next call of the same function often gets the same memory.
        mark = None if frame is None else frame.f_locals.get(_MARK)
        return mark is not None and mark.owner is self

    def has_returned(self) -> bool | None:
        """Whether the call, which is over, has returned, or an exception left it; None if nobody can say."""
        mark = None if self._mark is None else self._mark()
        # Somebody keeps the frame, if there is a mark: a traceback, mostly.
        for names in () if mark is None else gc.get_referrers(mark):
            for frame in gc.get_referrers(names):
                if isinstance(frame, FrameType) and frame.f_locals.get(_MARK) is mark:
                    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")
        return self._has_returned

    def when_returned(self, do: Callable[[], None]) -> None:
        """Have something done when the call returns, before its caller goes on; never, if no call is known.

        It must not raise.
        """
        self._afterwards.append(do)


class _Mark:
    """Lies beside the variables of a frame, and goes with them."""

    owner: Frame | None = None  # of a mark that an interrupt has kept from being made

    def __init__(self, owner: Frame) -> None:
        self.owner = owner
        owner._mark = weakref.ref(self)

    def __del__(self) -> None:
        if (owner := self.owner) is None:
            return
        # A frame that returns is cleared while its caller still stands at the call. One that an exception
        # has left lives on in the traceback, and by the time that goes its caller is elsewhere.
        owner._has_returned = _position(sys._getframe(0).f_back) == owner._caller
        for do in owner._afterwards if owner._has_returned else ():
            do()


def _position(frame: FrameType | None) -> tuple[int, int] | None:
    return None if frame is None else (id(frame), frame.f_lasti)
