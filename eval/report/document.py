"""A report before it is Markdown or HTML: sections of paragraphs, lists, tables, pictures; all plain text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from eval.plots import Picture


@dataclass(frozen=True)
class Paragraph:
    """A few sentences."""

    kind: ClassVar[str] = "paragraph"
    text: str


@dataclass(frozen=True)
class Bullets:
    """A list; each point is (what it is about, what is said of it)."""

    kind: ClassVar[str] = "bullets"
    points: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Grid:
    """A table."""

    kind: ClassVar[str] = "grid"
    headings: Sequence[str]  # one for each column
    rows: Sequence[Sequence[str]]  # the text of every cell
    text_columns: int = 1  # so many columns at the left hold words, the others numbers


@dataclass(frozen=True)
class Figure:
    """A picture that lies beside the report."""

    kind: ClassVar[str] = "figure"
    picture: Picture


Block = Paragraph | Bullets | Grid | Figure


@dataclass(frozen=True)
class Section:
    """A heading, and what stands below it."""

    title: str
    blocks: Sequence[Block] = ()
    sections: Sequence[Section] = ()


@dataclass(frozen=True)
class Document:
    """A whole report."""

    title: str
    sections: Sequence[Section]
