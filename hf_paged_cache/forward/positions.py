"""Positions of tokens whose rows have hidden ones: how they are counted, and where the next one may stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hf_paged_cache.errors import CacheMismatchError


class Run(NamedTuple):
    """The tokens `start … end - 1` of a row, neighbours in place and position."""

    start: int
    end: int
    position: int | None  # of the first one; None if the model does not say it

    @property
    def next_position(self) -> int | None:
        """Where the token after these stands."""
        return None if self.position is None else self.position + self.end - self.start


def runs_of(real: torch.Tensor, positions: torch.Tensor | None, start: int) -> list[list[Run]]:
    """The runs of every row of tokens, of which the first is token `start`."""
    goes_on = real[:, 1:] & real[:, :-1]
    if positions is not None:
        goes_on &= positions[:, 1:] == positions[:, :-1] + 1
    edge = torch.zeros(real.shape[0], 1, dtype=torch.bool)
    firsts = (real & ~torch.cat((edge, goes_on), 1)).nonzero().tolist()
    lasts = (real & ~torch.cat((goes_on, edge), 1)).nonzero().tolist()
    found: list[list[Run]] = [[] for _ in range(real.shape[0])]
    for (row, first), (_, last) in zip(firsts, lasts, strict=True):
        position = None if positions is None else int(positions[row, first])
        found[row].append(Run(start + first, start + last + 1, position))
    return found


def joined(old: tuple[Run, ...], new: Sequence[Run]) -> tuple[Run, ...]:
    """Runs of one row in which neighbours are one run."""
    runs = list(old)
    for run in new:
        if runs and runs[-1].end == run.start and runs[-1].next_position == run.position:
            runs[-1] = runs[-1]._replace(end=run.end)
        else:
            runs.append(run)
    return tuple(runs)


def next_positions(runs: Sequence[Run], start: int) -> list[int]:
    """Where token `start` of a row may stand, of which these tokens are shown; empty if nothing is known."""
    skips = counts = True  # hidden tokens have no positions, or have
    end, following = 0, 0
    for run in runs:
        if run.position is None or run.next_position is None:
            return []
        if run.start > end:
            skips &= run.position == following
            counts &= run.position == following + run.start - end
        end, following = run.end, run.next_position
    if skips == counts or start == end:
        return sorted({following, following + start - end})
    return [following if skips else following + start - end]


def discontinuous(
    row: int, expected: list[int], got: int, newly_hidden: int, is_generating: bool
) -> CacheMismatchError:
    """What to raise where the next token of a row does not stand where it may."""
    nexts = " or ".join(map(str, expected))
    if newly_hidden:
        why = (
            f"This attention_mask hides {newly_hidden} tokens that the forwards so far have seen, and they "
            "still count in the positions of those cached after them. Pass the whole mask as before"
        )
        if is_generating:
            why += " (without one, `generate` takes pad tokens in the prompt for padding)"
        return CacheMismatchError(
            f"position_ids: row {row} has tokens that attention_mask hides, and its next token stands at "
            f"{nexts}; got {got}. {why}, or `cache.reset()`"
        )
    now = "`generate` counts" if is_generating else "the new ones count"
    return CacheMismatchError(
        f"position_ids: row {row} has tokens that attention_mask hides, and its last cached token stands at "
        f"position {expected[0] - 1}, so the next one stands at {nexts}; got {got}. "
        f"Either those cached count the hidden ones and {now} real tokens only, or the other way round: a "
        "plain forward counts all tokens unless it is given `position_ids=(attention_mask.cumsum(-1) - 1)"
        ".clamp(min=0)` (of the new tokens), as `generate` does. Give them to every forward of a padded "
        "batch; `cache.reset()` starts anew"
    )
