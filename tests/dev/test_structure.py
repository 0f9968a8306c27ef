from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from dev import structure
from dev.structure import cycles, import_graph, longest_chain, room_graph

FILES = {
    "__init__.py": "from pack.high.top import build\n",
    "errors.py": "class PackError(Exception): ...\n",
    "low/__init__.py": "",
    "low/base.py": "from ..errors import PackError\n",
    "low/side.py": "from .base import PackError\n",
    "high/__init__.py": "from .top import build\n",
    "high/top.py": "import torch\nfrom pack.low import side\nimport pack.low.base\n",
}
INSIDE = "def f():\n    from pack.high import top\n"
FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pack.high.top import build\n"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "pack" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "pack"


def circles(package: Path, *, when_loaded: bool = False) -> list[set[str]]:
    return [part for part in cycles(import_graph(package, when_loaded=when_loaded)) if len(part) > 1]


def test_imports_of_every_spelling_are_seen_and_others_left_out(package: Path) -> None:
    graph = import_graph(package)
    assert graph["low.base"] == {"errors"}
    assert graph["low.side"] == {"low.base"}
    assert graph["high.top"] == {"low.side", "low.base"}
    assert graph["errors"] == set()


def test_rooms_stand_on_floors(package: Path) -> None:
    rooms = room_graph(import_graph(package))
    assert rooms == {"errors": set(), "low": {"errors"}, "high": {"low"}}
    assert longest_chain(rooms) == ["high", "low", "errors"]
    assert circles(package) == []


@pytest.mark.parametrize(
    ("text", "when_loaded"),
    [("from pack.low import side\n", True), (INSIDE, False), (FOR_TYPES, False)],
    ids=["at the top", "inside a function", "under TYPE_CHECKING"],
)
def test_a_planted_circle_is_found(text: str, when_loaded: bool, package: Path) -> None:
    (package / "low" / "base.py").write_text(text)
    (circle,) = circles(package)
    assert {"low.base", "low.side"} <= circle
    assert bool(circles(package, when_loaded=True)) is when_loaded
    assert longest_chain(import_graph(package))  # ends


@pytest.mark.parametrize("text", [INSIDE, FOR_TYPES], ids=["inside a function", "under TYPE_CHECKING"])
def test_a_planted_import_upward_is_an_arrow_of_its_room(text: str, package: Path) -> None:
    (package / "low" / "new.py").write_text(text)
    assert room_graph(import_graph(package))["low"] == {"errors", "high"}
    assert room_graph(import_graph(package, when_loaded=True))["low"] == {"errors"}


def test_attributes_are_those_of_objects_that_can_change(package: Path) -> None:
    (package / "low" / "many.py").write_text(
        "class A:\n    def __init__(self):\n        self.x = self.y = 1\n        self.z: int = 2\n"
        "@dataclass(frozen=True)\nclass B:\n    def f(self):\n        self.a = self.b = self.c = self.d = 0\n"
    )
    assert structure.largest_class(package) == ("low.many.A", 3)


def test_a_number_over_its_limit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, code in ((1, 0), (3, 1)):
        found = [structure.Finding("rooms", value, 2, "here"), structure.Finding("stems", 9, None)]
        monkeypatch.setattr(structure, "findings", lambda root, found=found: found)
        result = CliRunner().invoke(structure.app, [])
        assert result.exit_code == code
        assert result.stdout.startswith("OVER rooms: 3 (at most 2)  here") == bool(code)
