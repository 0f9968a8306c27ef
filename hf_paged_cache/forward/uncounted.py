"""The beginning of a text whose tokens no layer counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hf_paged_cache.errors import CacheMismatchError
from hf_paged_cache.host.frames import Place
from hf_paged_cache.host.running_forward import ModelCall

_BEGINNING = 16
"""Tokens that tell one text from another."""


class UncountedText:
    """What models without attention have been fed: their caches have no length that says what is new.

    `generate` feeds all of a prompt then. New ids alone are right; a whole conversation, its beginning
    included, would be fed once more, after itself.
    """

    def __init__(self) -> None:
        self._ids: torch.Tensor | None = None
        self._count = 0
        self._root: Place | None = None
        self._before: tuple[torch.Tensor | None, int] = (None, 0)

    def begin(self, call: ModelCall, *, is_warm: bool, is_counted: bool) -> None:
        """Hear of a forward that begins.

        Args:
            call: What the stack says of it.
            is_warm: Whether the cache holds something.
            is_counted: Whether some layer counts tokens; then there is nothing to do.

        Raises:
            CacheMismatchError: A prompt begins as the text that was fed already does.
        """
        self._before = self._ids, self._count
        ids = call.input_ids
        if is_counted or ids is None:
            return
        if is_warm and call.is_generating and call.root != self._root:
            self._check(ids)
        self._root = call.root
        if not is_warm:
            self._ids, self._count = ids[:, :_BEGINNING].clone(), 0
        self._count += ids.shape[1]

    def save(self) -> Callable[[], None]:
        """Remember what is known. Returns what puts it back."""
        attributes = dict(vars(self))
        return lambda: vars(self).update(attributes)

    def take_back(self) -> None:
        """Forget the forward that began last."""
        self._ids, self._count = self._before

    def select(self, rows: Sequence[int]) -> None:
        """Make the rows copies of the given old rows."""
        if self._ids is not None and max(rows) < self._ids.shape[0]:
            self._ids = self._ids[list(rows)]

    def _check(self, ids: torch.Tensor) -> None:
        if self._ids is None or ids.shape[0] != self._ids.shape[0] or not 1 < self._count <= ids.shape[1]:
            return
        known = self._ids[:, : self._count]
        if torch.equal(ids[:, : known.shape[1]], known.to(ids.device)):
            raise CacheMismatchError(
                f"the prompt of {ids.shape[1]} tokens begins as the {self._count} that the cache was fed "
                "already do, and the cache of a model without attention does not know which are new. Pass "
                "the new ids alone, or `cache.reset()` and feed everything"
            )

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"_root": None}  # a call of the original's
