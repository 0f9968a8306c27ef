"""Which thread uses a cache."""

from __future__ import annotations

from hf_paged_cache.errors import CacheMismatchError
from hf_paged_cache.host.frames import Place
from hf_paged_cache.host.running_forward import ModelCall


class Usage:
    """The call of the host that has used a cache last, and whether it still runs."""

    def __init__(self) -> None:
        self._user: Place | None = None

    def take(self, call: ModelCall | None, *, is_open: bool) -> None:
        """Let this thread use the cache.

        Args:
            call: On whose behalf; None does not change who that is.
            is_open: Whether a forward is in progress.

        Raises:
            CacheMismatchError: Another thread is using it.
        """
        self.check(is_open=is_open)
        if call is not None:
            self._user = call.root

    def check(self, *, is_open: bool) -> None:
        """Raise CacheMismatchError if another thread is using the cache."""
        user = self._user
        if user is None or user.is_here or not user.is_running():
            return
        if user.frame is None and not is_open:
            return  # nobody knows, but no forward is in progress
        raise CacheMismatchError(
            "a forward or `generate` in another thread is using this cache, and one cache serves one thread "
            "at a time. Give every thread its own: `cache.fork()` shares what is cached so far, "
            "`PagedCache(model)` starts empty"
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Usage:
        """Nobody uses a copy yet."""
        return Usage()
