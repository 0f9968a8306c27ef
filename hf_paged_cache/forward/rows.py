"""The rows of a cache: how many there are, how many tokens each layer holds of them, which, and whose."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from hf_paged_cache.errors import CacheMismatchError, PagedCacheError

from .left_padding import NO_PADDING
from .token_ids import TokenIds

if TYPE_CHECKING:
    from hf_paged_cache.store.window_store import Restore

    from .left_padding import Padding
    from .ownership import Owner


class Rows:
    """What all layers of a cache hold alike."""

    def __init__(self, layers: Iterable[int]) -> None:
        self.batch = 0  # rows; none before the first update and after a reset
        self.tokens = dict.fromkeys(layers, 0)  # layer index -> tokens it holds, in the order of writing
        self.start = 0  # tokens of every row before the step in progress (or the last one)
        self.end = 0  # tokens of every row when that step is complete
        self.ids = TokenIds()
        self.padding: Padding = NO_PADDING
        self.record_past = False  # window layers keep what they would drop, so that `crop` can bring it back
        self.gradients_from: int | None = None  # first token whose K or V wanted a gradient when it came
        self.owner: Owner | None = None  # whose weights computed what is stored, if that is known
        self.equal_rows = 0  # rows of prompts so far that were stored by reference to an equal one
        self.is_lost = False  # see `check_lost`; only a reset helps
        self._last_written: int | None = None

    def begin(self, start: int, end: int, padding: Padding) -> None:
        """Expect the tokens `start … end - 1` in every layer."""
        self.start, self.end, self.padding = start, end, padding

    def written(self, layer_idx: int) -> None:
        """Note that a layer holds the tokens of this step."""
        self.tokens[layer_idx] = self.end
        self._last_written = layer_idx

    def lengthen(self, length: int) -> None:
        """Note how far compiled steps have come, in the layers that took part."""
        self.tokens = {index: length if n == self.end else n for index, n in self.tokens.items()}
        self.start = self.end = length

    def is_next(self, layer_idx: int) -> bool:
        """Whether a layer has yet to join a step in progress."""
        return self.tokens[layer_idx] == self.start < self.end

    def behind(self) -> list[int]:
        """The layers that have not come as far as the last step.

        Layers that a model never writes hold nothing; layers after the last one written were not reached.
        """
        order = list(self.tokens)
        missed = [] if self._last_written is None else order[order.index(self._last_written) + 1 :]
        held = self.tokens
        return [index for index in order if held[index] != self.end and (held[index] or index in missed)]

    def crop(self, num_tokens: int) -> None:
        """Keep the first tokens of every row, more than none."""
        self.ids.crop(num_tokens)
        self.tokens = {index: min(count, num_tokens) for index, count in self.tokens.items()}
        self.start = self.end = num_tokens
        self._last_written = None
        self.padding = self.padding.crop(num_tokens)
        if self.gradients_from is not None and self.gradients_from >= num_tokens:
            self.gradients_from = None

    def clear(self) -> None:
        """Forget all rows."""
        kept = {"equal_rows": self.equal_rows, "record_past": self.record_past}
        vars(self).update(vars(Rows(self.tokens)) | kept)

    def reorder(self, row_indices: Sequence[int]) -> None:
        """Make the rows copies of the given old rows."""
        self.ids.reorder(row_indices)
        self.padding = self.padding.reorder(row_indices)
        self.batch = len(row_indices)

    def checked(self, row_indices: Sequence[int], batch: int) -> list[int]:
        """Rows counted from the first; a PagedCacheError if there are none, or none of that index."""
        bad = [row for row in row_indices if not -batch <= row < batch]
        if bad or not row_indices:
            raise PagedCacheError(
                f"row indices must be a non-empty selection of 0…{batch - 1} (the cache holds "
                f"{batch} rows), got {list(row_indices)}"
            )
        return [row % batch for row in row_indices]

    def copy(self) -> Rows:
        """The same for another cache."""
        copied = copy.copy(self)
        copied.tokens, copied.ids = dict(self.tokens), self.ids.copy()
        return copied

    def save(self) -> Restore:
        """Remember all of it. Returns what puts it back."""
        attributes, tokens, restore_ids = dict(vars(self)), dict(self.tokens), self.ids.save()

        def restore() -> None:
            vars(self).update(attributes | {"tokens": dict(tokens)})
            restore_ids()

        return restore

    def unlike(self, layer_idx: int, held: int) -> CacheMismatchError:
        """What to raise where a layer holds other tokens than the cache."""
        return CacheMismatchError(
            f"layer {layer_idx} holds {held} tokens per row, and the cache {self.end}: a forward ended "
            "before it came to that layer (layers that were left out, an early exit). "
            f"`cache.crop({held - self.end})` takes back what the layer has missed, `cache.reset()` "
            "starts anew"
        )

    def check_lost(self) -> None:
        """Raise CacheMismatchError if a forward has moved states on that nobody can take back."""
        if self.is_lost:
            raise CacheMismatchError(
                "a forward failed, or was only to read, after recurrent states had moved on that this model "
                "keeps in itself, or rows were copied over each other (compile=True) and that was "
                "interrupted: nobody can take that back; call `cache.reset()` and start from the "
                "prompt"
            )

    def check_integrity(self) -> None:
        """Raise an AssertionError if the layers disagree."""
        assert max(self.tokens.values(), default=0) <= self.end, (
            f"layers hold {sorted(set(self.tokens.values()))} tokens, but the last step ended at {self.end}"
        )
        assert self.ids.count <= self.end, "ids are known of tokens that are not stored"


class EqualRows:
    """Neighbouring rows that have brought the same K and V to every layer so far.

    Judged by the K and V themselves, to the bit: ids may be the same under other masks, and are not always
    known. Most batches are done with after a look at one token of the first layer.
    """

    def __init__(self) -> None:
        self._is_like_previous: list[bool] = []  # of the rows after the first

    def begin(self, rows: int) -> None:
        """Take all of so many rows for the same until a layer shows otherwise; 0 gives up looking."""
        self._is_like_previous = [True] * (rows - 1)

    def compare(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Look at what a layer gets, `[batch, kv_heads, tokens, head_dim]`."""
        if not self._is_like_previous:
            return  # as at every decode step
        for states in (key_states[:, :, -1:], key_states, value_states):
            if not any(self._is_like_previous):
                return
            same = (states[1:] == states[:-1]).flatten(1).all(dim=1).tolist()
            self._is_like_previous = [a and b for a, b in zip(self._is_like_previous, same, strict=True)]

    def sources(self, padding: Sequence[object]) -> list[int] | None:
        """For every row the first one that is the same; None if no two are. Equal rows agree in padding."""
        if not any(self._is_like_previous):
            return None
        rows = [0]
        for row, is_like in enumerate(self._is_like_previous, start=1):
            rows.append(rows[-1] if is_like and padding[row] == padding[row - 1] else row)
        return rows
