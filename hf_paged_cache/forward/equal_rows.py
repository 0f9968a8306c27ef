"""Which rows of a prompt are the same, as those of beams and of several samples are."""

from __future__ import annotations

from collections.abc import Sequence

import torch


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
