"""A report as one HTML file that needs nothing from elsewhere."""

from __future__ import annotations

import base64
from pathlib import Path

import jinja2

from eval.report.document import Document

_TEMPLATE_FILE = "report.html.j2"


def html(document: Document, folder: Path) -> str:
    """Return the text of `report.html`.

    Args:
        document: what it says; all of it is text, and shown as text.
        folder: where the pictures lie, which are written into the file.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        # Not by the name's ending: a model's answer must never become markup.
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    def png_base64(file_name: str) -> str:
        return base64.b64encode((folder / file_name).read_bytes()).decode("ascii")

    template = environment.get_template(_TEMPLATE_FILE)
    return template.render(document=document, png_base64=png_base64, kind=lambda block: type(block).__name__)
