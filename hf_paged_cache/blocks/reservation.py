"""What making room for new tokens takes, before and after."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class Reservation:
    """Room for the tokens `start … end - 1` of every row.

    Attributes:
        start: First reserved token.
        end: One past the last reserved token: the new length.
        copies: (source, destination) block ids whose content must be copied before any new token is written.
        changed_from: First logical block whose entry changed in some row's table, the new ones included; the
            number of logical blocks where none changed.
        needed_blocks: Blocks taken from the pool less those given back to it; may be negative.
        blanks: Block ids whose content must be zero before any new token is written: a row was cropped to the
            middle of a block that was not stored, because its tokens were padding.
    """

    start: int
    end: int
    copies: list[tuple[int, int]]
    changed_from: int
    needed_blocks: int
    blanks: list[int] = field(default_factory=list)


class Plan(NamedTuple):
    """What a reservation will do; the same logical blocks in every row, but for padding."""

    dropped: list[int]  # logical blocks to release: they left the window
    padded: list[int]  # of each row, leading logical blocks that hold nothing but padding: NULL in any case
    first_new: int  # logical blocks that get an entry: NULL up to first_stored, then a block each
    first_stored: int
    end_blocks: int
    needed_blocks: int
