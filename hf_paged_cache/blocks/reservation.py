"""What making room for new tokens takes, before and after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Reservation:
    """Room for the tokens of columns `start … end - 1`, of every row from where it begins.

    Attributes:
        start: First reserved column.
        end: One past the last reserved column: the new length.
        copies: (source, destination) block ids whose content must be copied before any new token is written.
        changed_from: First logical block whose entry changed in some row's table, the new ones included; the
            number of logical blocks where none changed.
        needed_blocks: Blocks taken from the pool less those given back to it; may be negative.
    """

    start: int
    end: int
    copies: list[tuple[int, int]]
    changed_from: int
    needed_blocks: int


class RowPlan(NamedTuple):
    """What a reservation will do to one row."""

    offset: int  # columns before it begins, from now on
    new_tokens: int
    dropped: list[int]  # logical blocks to release: they left the window
    first_new: int  # logical blocks that get an entry: NULL up to first_stored, then a block each
    first_stored: int
    end_blocks: int


class Plan(NamedTuple):
    """What a reservation will do."""

    rows: list[RowPlan]
    needed_blocks: int
