"""The calls of the host that use a cache: from which thread, and with whose weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_paged_cache.errors import CacheMismatchError, PagedCacheError

from .ownership import owner_after

if TYPE_CHECKING:
    from hf_paged_cache.host.frames import Frame
    from hf_paged_cache.host.running_forward import ModelCall

    from .rows import Rows


class Caller:
    """The calls that have used a cache last."""

    def __init__(self) -> None:
        self._user: Frame | None = None
        self._root: Frame | None = None  # the one whose weights were looked at

    def take(self, call: ModelCall | None, *, is_open: bool) -> None:
        """Let this thread use the cache.

        Args:
            call: On whose behalf; None does not change who that is.
            is_open: Whether a forward is in progress.

        Raises:
            CacheMismatchError: Another thread is using it.
        """
        self.check_thread(is_open=is_open)
        if call is not None:
            self._user = call.root

    def check_thread(self, *, is_open: bool) -> None:
        """Raise CacheMismatchError if another thread is using the cache."""
        user = self._user
        if user is None or user.is_here or not user.is_running():
            return
        if not user.is_known and not is_open:
            return  # nobody knows, but no forward is in progress
        raise CacheMismatchError(
            "a forward or `generate` in another thread is using this cache, and one cache serves one thread "
            "at a time. Give every thread its own: `cache.fork()` shares what is cached so far, "
            "`PagedCache(model)` starts empty"
        )

    def is_new(self, call: ModelCall) -> bool:
        """Whether another call of the host has come than the last one; models of others do not tell."""
        return not call.root.is_known or call.root != self._root

    def take_weights(self, call: ModelCall, rows: Rows, tokens: int) -> None:
        """Note whose weights compute from now on.

        Raises:
            CacheMismatchError: Other weights computed the tokens that are cached.
        """
        rows.owner = owner_after(rows.owner, call, tokens)
        self._root = call.root


def check_reading(call: ModelCall, *, is_warm: bool) -> None:
    """Raise PagedCacheError if `generate` was told not to use a cache that holds something."""
    if call.use_cache is False and call.is_generating and is_warm:
        raise PagedCacheError(
            "generate(use_cache=False) would feed the whole text at every step, on top of what the cache "
            "holds. Leave `use_cache` away, or pass `cache.frozen()` to generate without changing this cache"
        )
