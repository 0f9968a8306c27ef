"""A report as Markdown and as one HTML file that needs nothing from elsewhere, from its templates.

Nothing that a text says is taken for markup: models answer what they like.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path

import jinja2

from eval.report.document import Document

_MARKUP = re.compile(r"([\\`*<>\[\]|&$~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")
"""Characters that mean something to Markdown; an underscore within a word does not."""


def markdown(document: Document) -> str:
    """Return the text of `report.md`; pictures are links to the files beside it."""
    environment = _environment(is_html=False)
    environment.filters["md"] = lambda text: _MARKUP.sub(r"\\\1", " ".join(text.split()))
    return environment.get_template("report.md.j2").render(document=document)


def html(document: Document, folder: Path) -> str:
    """Return the text of `report.html`; the pictures, which lie in the folder, are written into it."""

    def png_base64(file_name: str) -> str:
        return base64.b64encode((folder / file_name).read_bytes()).decode("ascii")

    template = _environment(is_html=True).get_template("report.html.j2")
    return template.render(document=document, png_base64=png_base64)


def _environment(*, is_html: bool) -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=is_html,  # not by the name's ending: a model's answer must never become markup
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
