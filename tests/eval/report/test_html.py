from __future__ import annotations

import base64
import dataclasses
from html.parser import HTMLParser
from pathlib import Path

import pytest

from eval import report
from eval.plots import Picture
from eval.report.content import NO_PICTURES
from eval.report.render import html, markdown
from eval.run.rows import Prediction, Row
from tests.eval.report.fake_runs import ATTACK, few_rows, full_run

_VOID = {"meta", "img"}
_LOADING = {"src", "href", "srcset", "data", "action", "poster", "background"}
PNG = b"\x89PNG not really"


class _Page(HTMLParser):
    """Collects what a browser would see, and whether every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


@pytest.fixture
def page(tmp_path: Path) -> _Page:
    (tmp_path / "a.png").write_bytes(PNG)
    return _Page(html(markdown(full_run(), [Picture("a.png", "A <title>", "A & caption")]), tmp_path))


def test_every_element_is_closed(page: _Page) -> None:
    assert page.open == []


def test_it_loads_nothing_from_elsewhere_and_runs_nothing(page: _Page) -> None:
    addresses = [value or "" for _, attrs in page.elements for key, value in attrs.items() if key in _LOADING]
    assert addresses
    assert all(address.startswith(("data:image/png;base64,", "#")) for address in addresses)
    assert not {"script", "link", "iframe", "object", "base"} & {tag for tag, _ in page.elements}
    assert not [key for _, attrs in page.elements for key in attrs if key.startswith("on")]
    policy = [attrs["content"] for _, attrs in page.elements if "http-equiv" in attrs]
    assert policy == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]
    style = next(text for text in page.texts if "font-size" in text)
    assert "url(" not in style
    assert "@import" not in style


def test_links_within_it_lead_somewhere(page: _Page) -> None:
    places = {f"#{attrs['id']}" for _, attrs in page.elements if "id" in attrs}
    assert {attrs["href"] for tag, attrs in page.elements if tag == "a"} <= places


def test_pictures_are_written_into_it_with_a_text_for_those_who_cannot_see(page: _Page) -> None:
    (image,) = [attrs for tag, attrs in page.elements if tag == "img"]
    assert base64.b64decode((image["src"] or "").removeprefix("data:image/png;base64,")) == PNG
    assert image["alt"] == "A <title>"
    assert "A & caption" in page.texts


def test_an_answer_of_a_model_is_shown_and_cannot_inject_html(page: _Page, tmp_path: Path) -> None:
    assert any(ATTACK in text for text in page.texts)
    assert sum(tag == "img" for tag, _ in page.elements) == 1


def test_what_means_something_to_markdown_is_shown_as_it_is(tmp_path: Path) -> None:
    text = r"a_b _c_ *d* `e` \* \\ [f](g) ![h](i.png) &amp; ~~j~~ $k$ <i> a|b \| https://l.m # n 1. o"
    answer = Prediction("summarization", "dynamic", "first", text, "", None)
    settings = {"odd": text}
    run = dataclasses.replace(few_rows(), predictions=[answer], settings=settings)
    page = _Page(html(markdown(run, []), tmp_path))
    assert sum(text in found for found in page.texts) == 2
    assert "img" not in {tag for tag, _ in page.elements}


@pytest.mark.parametrize("field", ["cache", "task", "problem", "source", "title", "setting"])
def test_no_other_text_can_inject_html_either(field: str, tmp_path: Path) -> None:
    evil = '"><img src=x onerror=alert(1)>'
    row = {
        "task": "t",
        "cache": "c",
        "problem": "p",
        **({field: evil} if field in ("cache", "task", "problem") else {}),
    }
    run = dataclasses.replace(
        full_run(),
        rows=[Row(**row)],
        predictions=[],
        source=evil if field == "source" else "s",
        titles={"c": evil if field == "title" else ""},
        settings={evil: evil} if field == "setting" else {},
    )
    text = html(markdown(run, []), tmp_path)
    assert evil not in text
    found = _Page(text)
    assert "img" not in {tag for tag, _ in found.elements}
    assert any(evil in said for said in found.texts)


def test_it_says_how_to_get_pictures_that_could_not_be_drawn(tmp_path: Path) -> None:
    assert NO_PICTURES in _Page(html(markdown(full_run(), None), tmp_path)).texts


def test_a_run_becomes_one_file_that_holds_all_its_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.write(few_rows(["latency"]), tmp_path)
    found = _Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    pictures = [attrs for tag, attrs in found.elements if tag == "img"]
    written = sorted(path.read_bytes() for path in tmp_path.glob("*.png"))
    assert sorted(base64.b64decode((p["src"] or "").split(",")[1]) for p in pictures) == written
    assert len(written) == 2
