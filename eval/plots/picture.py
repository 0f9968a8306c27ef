"""A picture as a report speaks of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Picture:
    """One question, answered by a PNG.

    Attributes:
        file_name: in the run folder.
        title: what it shows.
        caption: how it is read.
    """

    file_name: str
    title: str
    caption: str
