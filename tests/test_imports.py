"""Rooms import downward only, no import goes round in a circle, and the bookkeeping needs no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import hf_paged_cache
from dev.structure import cycles, import_graph, room_graph

PACKAGE = Path(hf_paged_cache.__file__).parent

# From the ground up: a room imports from itself and from rooms before it.
ROOMS = (
    "_moved",
    "errors",
    "formats",
    "blocks",
    "config",
    "kernels",
    "host",
    "store",
    "forward",
    "attention",
    "display",
    "cache",
    "tools",
)


def test_every_room_has_its_place() -> None:
    assert set(room_graph(import_graph(PACKAGE))) == set(ROOMS)


def test_rooms_import_downward_only() -> None:
    rank = {room: number for number, room in enumerate(ROOMS)}
    upward = [
        f"{source} imports {target}"
        for source, targets in import_graph(PACKAGE).items()
        for target in targets
        if (room := source.split(".")[0]) in rank
        if rank.get(target.split(".")[0], len(rank)) > rank[room]
    ]
    assert upward == []


def test_no_import_goes_round_in_a_circle() -> None:
    assert [sorted(circle) for circle in cycles(import_graph(PACKAGE)) if len(circle) > 1] == []


def test_bookkeeping_imports_without_torch() -> None:
    code = (
        "import sys; import hf_paged_cache.blocks; "
        "print([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_are_all_importable() -> None:
    for name in hf_paged_cache.__all__:
        assert getattr(hf_paged_cache, name) is not None
    assert "PagedCache" in dir(hf_paged_cache)
