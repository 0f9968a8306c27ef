"""A report as Markdown. Nothing that a text says is taken for markup: models answer what they like."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from eval.report.document import Block, Bullets, Document, Figure, Grid, Paragraph, Section

_MARKUP = re.compile(r"([\\`*<>\[\]|&$~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")
"""Characters that mean something to Markdown; an underscore within a word does not."""


def markdown(document: Document) -> str:
    """Return the text of `report.md`; pictures are links to the files beside it."""
    blocks = [f"# {document.title}", *_sections(document.sections, 2)]
    return "\n\n".join(blocks) + "\n"


def _sections(sections: Sequence[Section], level: int) -> Iterator[str]:
    for section in sections:
        yield f"{'#' * level} {_escape(section.title)}"
        yield from map(_block, section.blocks)
        yield from _sections(section.sections, level + 1)


def _block(block: Block) -> str:
    match block:
        case Paragraph(text):
            return _escape(text)
        case Bullets(items):
            return "\n".join(
                f"- **{_escape(what)}**: {_escape(said)}" if what else f"- {_escape(said)}"
                for what, said in items
            )
        case Grid():
            return _grid(block)
        case Figure(picture):
            return f"![{_escape(picture.title)}]({picture.file_name})\n\n{_escape(picture.caption)}"


def _grid(grid: Grid) -> str:
    rules = ["---" if index < grid.text_columns else "---:" for index in range(len(grid.headings))]
    lines = [[_escape(cell) for cell in line] for line in (grid.headings, *grid.rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rules, *lines[1:]])


def _escape(text: str) -> str:
    return _MARKUP.sub(r"\\\1", " ".join(text.split()))
