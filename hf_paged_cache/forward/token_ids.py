"""Token ids that the rows of a cache stand for, as far as they are known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from hf_paged_cache.errors import CacheMismatchError, PagedCacheError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hf_paged_cache.host.frames import Frame
    from hf_paged_cache.host.running_forward import ModelCall
    from hf_paged_cache.store.window_store import Restore

_BEGINNING = 16  # tokens that tell one text from another
Ids = npt.NDArray[Any]  # `[rows, tokens]`, on the host like all bookkeeping


class TokenIds:
    """The ids of the first tokens of every row, from forwards that fed them, and from whoever calls `commit`.

    Once a forward shows none (embeddings, or ids that would have to be fetched from a device), later ones
    are not noted either: what is known is always a beginning.
    """

    def __init__(self) -> None:
        self.count = 0  # tokens of every row whose ids are known
        self._ids = np.empty((0, 0), dtype=np.int64)
        self._prompt: Ids | None = None  # of the `generate` in progress, with tokens that are yet to come

    @property
    def known(self) -> torch.Tensor:
        """The known ids `[rows, count]`, on the CPU."""
        return torch.from_numpy(self._ids[:, : self.count].copy())

    def feed(self, start: int, end: int, rows: int, ids: torch.Tensor | None) -> None:
        """Note the tokens `start … end - 1` of a forward, if it shows their ids `[rows, end - start]`."""
        if start != self.count:
            return
        if ids is not None and ids.shape == (rows, end - start) and not ids.is_floating_point():
            if ids.is_cpu or end - start > 1:  # a device would be waited for at every token
                self._put(ids.detach().cpu().numpy(), start, end)
        elif (prompt := self._prompt) is not None and prompt.shape[0] == rows and prompt.shape[1] >= end:
            self._put(prompt[:, start:end], start, end)

    def check_prompt(self, ids: torch.Tensor) -> None:
        """Raise CacheMismatchError unless a prompt `[rows, tokens]` begins with what is known.

        It may have more rows where all of them go on from one cached sequence. It then tells of later tokens.
        """
        shared = self.shared_prefix(ids)
        if shared < min(self.count, ids.shape[1]):
            raise CacheMismatchError(
                f"the prompt is another text than what is cached: they differ at token {shared} (of "
                f"{self.count} known ones). `cache.truncate_to(input_ids)` keeps what they share, "
                "`cache.reset()` starts anew"
            )
        self._prompt = ids.detach().cpu().numpy()

    def check_restart(self, ids: torch.Tensor | None) -> None:
        """Raise CacheMismatchError if ids `[rows, tokens]` to be fed begin as the cached text does."""
        if ids is None or not self.count or ids.shape[0] != self._ids.shape[0]:
            return
        if (ids[:, 0].detach().cpu().numpy() == self._ids[:, 0]).all():
            raise CacheMismatchError(
                f"the decoder would be fed a text from its beginning ({ids.shape[1]} tokens), after the "
                f"{self.count} that are cached. `reset()` both caches of the pair for another source; to go "
                "on, pass `decoder_input_ids` with all tokens and a `decoder_attention_mask` as long, or new "
                "ids alone"
            )

    def shared_prefix(self, ids: torch.Tensor) -> int:
        """How many leading tokens of all rows agree with ids `[rows, tokens]`."""
        length = min(self.count, ids.shape[1])
        if not length:
            return 0
        if ids.shape[0] != self._ids.shape[0] and self._ids.shape[0] != 1:
            raise CacheMismatchError(
                f"input_ids has {ids.shape[0]} rows, but the cache holds {self._ids.shape[0]} rows. Use "
                "`cache.batch_repeat_interleave(n)` to give every row n copies, "
                "`cache.batch_select_indices(...)` to drop rows, or `cache.reset()` for a new batch"
            )
        same = (ids[:, :length].detach().cpu().numpy() == self._ids[:, :length]).all(axis=0)
        return length if same.all() else int(same.argmin())

    def commit(self, ids: torch.Tensor, length: int) -> None:
        """Learn the ids of all `length` cached tokens; a PagedCacheError if they disagree with known ones."""
        if ids.shape[1] < length:
            raise PagedCacheError(
                f"input_ids has {ids.shape[1]} tokens per row, but the cache holds {length}; pass the ids of "
                "all tokens that were fed, e.g. the output of `generate`"
            )
        shared = self.shared_prefix(ids)
        if shared < min(self.count, length):
            raise PagedCacheError(
                f"input_ids disagrees at token {shared} with what the cached forwards were fed; "
                "`cache.truncate_to(input_ids)` keeps what they share"
            )
        self.count = 0
        self._put(ids[:, :length].detach().cpu().numpy(), 0, length)

    def forget_prompt(self) -> None:
        """A prompt tells of no forward but those of its `generate`."""
        self._prompt = None

    def crop(self, count: int) -> None:
        """Forget all but the first tokens."""
        self.count = min(self.count, count)
        self._prompt = None

    def reorder(self, rows: Sequence[int]) -> None:
        """Follow rows that were moved."""
        if self.count and list(rows) != list(range(self._ids.shape[0])):
            self._ids = self._ids[list(rows)]
        self._prompt = None

    def save(self) -> Restore:
        """Remember what is known. Returns what puts it back."""
        attributes = dict(vars(self))  # ids are only ever written behind those that count
        return lambda: vars(self).update(attributes)

    def copy(self) -> TokenIds:
        """The same for another cache, but for what was cropped, and what a prompt says of tokens to come."""
        copied = TokenIds()
        copied._put(self._ids[:, : self.count], 0, self.count)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenIds:
        return self.copy()

    def _put(self, ids: Ids, start: int, end: int) -> None:
        rows, room = self._ids.shape
        if not start or rows != ids.shape[0] or room < end:
            grown = np.empty((ids.shape[0], max(end + 64, end * 3 // 2)), dtype=np.int64)
            if start:
                grown[:, :start] = self._ids[:, :start]
            self._ids = grown
        self._ids[:, start:end] = ids
        self.count = end


class UncountedText:
    """What models without attention have been fed: their caches have no length that says what is new.

    `generate` feeds all of a prompt then, which is right for new ids alone, and not for a whole conversation.
    """

    def __init__(self) -> None:
        self._ids: torch.Tensor | None = None
        self._count = 0
        self._root: Frame | None = None

    def check(self, call: ModelCall) -> None:
        """Raise CacheMismatchError if a prompt begins as the text does that a cache was fed already."""
        ids, held = call.input_ids, self._ids
        if ids is None or held is None or not call.is_generating or call.root == self._root:
            return
        is_as_long = ids.shape[0] == held.shape[0] and 1 < self._count <= ids.shape[1]
        known = held[:, : self._count]
        if is_as_long and torch.equal(ids[:, : known.shape[1]], known.to(ids.device)):
            raise CacheMismatchError(
                f"the prompt of {ids.shape[1]} tokens begins as the {self._count} that the cache was fed "
                "already do, and the cache of a model without attention does not know which are new. Pass "
                "the new ids alone, or `cache.reset()` and feed everything"
            )

    def begin(self, call: ModelCall, *, is_warm: bool) -> None:
        """Count the tokens of a forward that `check` has let pass; a cache that is not warm is empty."""
        ids = call.input_ids
        if ids is None:
            return
        self._root = call.root
        if not is_warm:
            self._ids, self._count = ids[:, :_BEGINNING].clone(), 0
        self._count += ids.shape[1]

    def select(self, rows: Sequence[int]) -> None:
        """Make the rows copies of the given old rows."""
        if self._ids is not None and max(rows) < self._ids.shape[0]:
            self._ids = self._ids[list(rows)]

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"_root": None}  # a call of the original's
