"""A report as Markdown, and as one HTML file that needs nothing else; no text is taken for markup."""

import base64
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markdown_it import MarkdownIt

from eval.plots import Picture
from eval.report.content import content
from eval.run.rows import Run

# Characters that mean something to Markdown; an underscore within a word does not.
_MARKUP = re.compile(r"([\\`*<>\[\]|&$~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")


def markdown(run: Run, pictures: Sequence[Picture] | None) -> str:
    """Return the text of `report.md`, with links to pictures beside it; None: they could not be drawn."""
    environment = templates()
    environment.filters["md"] = lambda text: _MARKUP.sub(r"\\\1", " ".join(text.split()))
    return environment.get_template("report.md.j2").render(content(run, pictures))


def html(text: str, folder: Path) -> str:
    """Return the text of `report.html` from that of `report.md`, whose pictures lie in the folder."""
    parser = MarkdownIt("commonmark", {"html": False, "xhtmlOut": False}).enable("table")
    tokens = parser.parse(text)
    sections = []
    for before, token, inner, end in zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False):
        if token.type == "heading_open" and token.tag == "h2":
            sections.append(inner.content)
            token.attrSet("id", f"s{len(sections)}")
        elif token.type == "th_open":
            token.attrSet("scope", "col")
        elif token.type == "td_open" and before.type == "tr_open":
            token.tag = end.tag = "th"
            token.attrSet("scope", "row")
        elif token.type == "td_open" and (inner.content.endswith(" worse") or inner.content == "failed"):
            token.attrSet("class", "worse")
        for image in token.children or ():
            if image.type == "image":
                png = (folder / str(image.attrs["src"])).read_bytes()
                image.attrSet("src", f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}")
    body = parser.renderer.render(tokens, parser.options, {})
    body = body.replace("<table>", '<div class="scroll" tabindex="0"><table>')
    body = body.replace("</table>", "</table></div>")
    return templates().get_template("report.html.j2").render(sections=sections, body=body)


def templates(folder: Path = Path(__file__).parent) -> jinja2.Environment:
    """The templates in a folder, in which a line of a statement alone leaves nothing."""
    options: dict[str, Any] = {
        "trim_blocks": True,
        "lstrip_blocks": True,
        "undefined": jinja2.StrictUndefined,
    }
    return jinja2.Environment(loader=jinja2.FileSystemLoader(folder), **options)
