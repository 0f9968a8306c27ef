"""The store, which several caches can share: blocks, the tensors they lie in, and the lock for both.

A cache has a store of its own unless it was forked from another. Every cache keeps its rows to itself: block
ids in tables. Caches of one store may run in different threads: whoever takes blocks, gives them back or
replaces tensors holds the lock; kernels run without it, since no two caches ever write to one block.

Whatever is done under the lock is done whole or not at all, also when an interrupt arrives between any two
lines of it: see `Store.change`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from hf_paged_cache.errors import PagedCacheError
from hf_paged_cache.host.frames import Frame

if TYPE_CHECKING:
    from .window_store import Restore, WindowStore

_T = TypeVar("_T")


class Saved(NamedTuple):
    """What something outside a store was, before a change of both."""

    restore: Restore  # puts integers and references back
    follow: Restore  # brings what is made of them up to date (device tables, pointers), when counts are right


class Store:
    """The window stores of one or more caches."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # held by whoever changes what belongs to whom
        self.by_window: dict[int | None, WindowStore] = {}
        self._undo: tuple[Frame, Restore] | None = None

    @property
    def is_torn(self) -> bool:
        """Whether a change is in progress, or was interrupted and has yet to be taken back."""
        return self._undo is not None

    @property
    def is_shared(self) -> bool:
        """Whether several caches use it."""
        return any(each.is_shared for each in self.by_window.values())

    def change(self, save: Callable[[], Saved], make: Callable[[], _T]) -> _T:
        """Make a change, all of it or none; `save` remembers what it will touch, outside the store as well.

        It is good from one assignment on, the last line here. If it raises, or is interrupted at any line,
        everything is put back; if that is interrupted as well, whoever comes next does it first. What `make`
        overwrites in tensors must lie in blocks that were free when it began, or `keep` has to come before.
        A change within a change raises a PagedCacheError: a signal's handler may ask for one.
        """
        with self.lock:
            if not self.recover():
                raise PagedCacheError("the cache is in the middle of a change; call this after it")
            self._undo = Frame.here(), self._saver(save)
            try:
                result = make()
            except BaseException:
                self._take_back()
                raise
            self._undo = None
            return result

    def keep(self, save: Callable[[], Saved]) -> None:
        """Inside a change: what has been done so far stays, also if the rest is taken back."""
        if self._undo is not None:
            self._undo = self._undo[0], self._saver(save)

    def recover(self) -> bool:
        """Take back a change that was interrupted. Returns whether none is in progress in this thread."""
        if self._undo is not None:
            with self.lock:
                if self._undo is not None and self._undo[0].is_running():
                    return False
                self._take_back()
        return True

    def _take_back(self) -> None:
        if self._undo is not None:
            self._undo[1]()
            self._undo = None

    def _saver(self, save: Callable[[], Saved]) -> Restore:
        by_window = dict(self.by_window)
        restores = [each.save() for each in by_window.values()]
        saved = save()

        def restore() -> None:
            self.by_window = dict(by_window)
            saved.restore()
            for each in restores:
                each()
            saved.follow()

        return restore

    def collect(self) -> None:
        """Take back the blocks of caches that were dropped."""
        for each in [each for each in self.by_window.values() if each.left]:
            self.change(lambda: Saved(lambda: None, lambda: None), each.collect)
