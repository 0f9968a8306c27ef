"""The reference in `docs/` speaks of what exists, and of all that is public."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import hf_paged_cache
from eval.cli import COMMANDS
from hf_paged_cache.config import KV_CACHE_DTYPES

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs/pages").glob("*.md"))
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
_DIRECTIVE = re.compile(r"^::: (?P<name>\S+)\n(?P<options>(?:    .*\n)*)", re.MULTILINE)
DIRECTIVES: list[tuple[str, dict[str, Any]]] = [
    (found["name"], (yaml.safe_load(found["options"]) or {}).get("options", {}))
    for found in _DIRECTIVE.finditer(TEXT)
]


def look_up(name: str) -> Any:
    """The object of a dotted name: a module, or an attribute of the longest part that is one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise AttributeError(name)


def documented(directive: str) -> list[str]:
    """The names whose docstrings a directive shows."""
    members = dict(DIRECTIVES)[directive].get("members")
    return [directive, *(f"{directive}.{member}" for member in members or [])]


@pytest.mark.parametrize("name", hf_paged_cache.__all__)
def test_every_public_name_is_in_the_reference_once(name: str) -> None:
    shown = [directive for directive, _ in DIRECTIVES]
    assert shown.count(f"hf_paged_cache.{name}") == 1, (
        f"give `::: hf_paged_cache.{name}` a place in docs/pages"
    )


def test_nothing_is_shown_twice_under_another_name() -> None:
    objects = [id(look_up(directive)) for directive, _ in DIRECTIVES]
    assert len(objects) == len(set(objects)) > len(hf_paged_cache.__all__)


@pytest.mark.parametrize("directive", [directive for directive, _ in DIRECTIVES])
def test_every_directive_shows_something_that_exists_and_says_what_it_is(directive: str) -> None:
    for name in documented(directive):
        assert (look_up(name).__doc__ or "").strip(), f"{name} has no docstring"


def test_public_methods_of_the_tools_are_all_shown() -> None:
    from hf_paged_cache.cache.editing import CacheTools

    public = {name for name in vars(CacheTools) if not name.startswith("_") and name != "layers"}
    shown = {name.rpartition(".")[2] for name in documented("hf_paged_cache.PagedCache")}
    assert public <= shown


def test_links_to_what_a_page_shows_have_a_target() -> None:
    targets = {directive for directive, _ in DIRECTIVES}
    links = re.findall(r"\(#(hf_paged_cache\.[\w.]+)\)", TEXT)
    assert links
    assert set(links) <= targets


def in_contents(entries: list[dict[str, Any]]) -> Iterator[str]:
    """The files that a table of contents names, also in its sections."""
    for entry in entries:
        for page in entry.values():
            yield from in_contents(page) if isinstance(page, list) else [page]


def test_every_page_and_notebook_is_in_the_table_of_contents() -> None:
    settings = yaml.safe_load((ROOT / "docs/mkdocs.yml").read_text(encoding="utf-8"))
    notebooks = [f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")]
    assert sorted(in_contents(settings["nav"])) == sorted([*notebooks, *(path.name for path in PAGES)])


def test_every_command_line_is_described() -> None:
    described = dict(re.findall(r"<!-- command: (\S+) as python -m (.+) -->", TEXT))
    commands = {module: f"eval {name}" for name, module in COMMANDS.items()}
    assert described == {"hf_paged_cache.tools.cli": "hf_paged_cache", **commands}
    with_typer = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for folder in ("eval", "hf_paged_cache")
        for path in (ROOT / folder).rglob("cli.py")
        if "typer.Typer(" in path.read_text(encoding="utf-8")
    ]
    assert sorted([*described, "eval.cli"]) == sorted(with_typer)


def test_the_table_of_formats_has_them_all() -> None:
    page = (ROOT / "docs/pages/formats.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `(\w+)` \| ", page, re.MULTILINE)[1:]) == sorted(KV_CACHE_DTYPES)


def test_variables_that_are_named_are_read_somewhere() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "hf_paged_cache").rglob("*.py"))
    named = set(re.findall(r"HF_PAGED_CACHE_\w+", TEXT))
    assert named == set(re.findall(r"HF_PAGED_CACHE_(?:BACKEND|CPU_ISA|CXXFLAGS|DIR)", sources))
