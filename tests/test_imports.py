"""The layers of the code import downward only, and the bookkeeping needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import hf_paged_cache

PACKAGE = Path(hf_paged_cache.__file__).parent

# Lower layers first: a module may import from its own line and from lines above it.
LAYERS = [
    ["errors", "host_version", "autocast"],
    ["formats"],
    ["config", "spec", "plots"],
    ["blocks"],
    ["precision", "kernels", "stats"],
    [
        "memory",
        "virtual_memory",
        "streams",
        "lazy",
        "traced",
        "rows",
        "guard",
        "faults",
        "calls",
        "history",
        "deprecated",
        "undo",
        "twins",
        "display",
        "plain",
        "saved",
    ],
    ["kv_pool", "ownership", "padding", "uncounted", "usage"],
    ["tables", "step", "store"],
    ["group", "capacity"],
    ["static"],
    ["groups"],
    ["state", "view", "compiled"],
    ["architectures", "compat"],
    ["masks", "hosts"],
    ["layer", "attention"],
    ["compound", "convert", "snapshot"],
    ["layer_stack", "tools"],
    ["cache"],
    ["profiler", "planner", "timeline"],
    ["doctor"],
    ["cli"],
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def _module_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports_of(path: Path) -> set[str]:
    """First components, below the package, of everything that a file imports when it is loaded."""
    package = ["hf_paged_cache", *path.relative_to(PACKAGE).parent.parts]
    tree = ast.parse(path.read_text())
    type_checking = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    found: list[str] = []
    for node in ast.walk(tree):
        if id(node) in type_checking:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            found += [f"{prefix}.{alias.name}" for alias in node.names]
    return {name.split(".")[1] for name in found if name.startswith("hf_paged_cache.")}


def test_every_module_has_a_place_in_the_layers() -> None:
    modules = {_module_of(path) for path in PACKAGE.rglob("*.py")} - {"__init__", "__main__"}
    assert modules == set(RANK)


def test_imports_go_downward_only() -> None:
    upward = [
        f"{path.relative_to(PACKAGE)} imports {target}"
        for path in PACKAGE.rglob("*.py")
        if (source := _module_of(path)) in RANK
        for target in _imports_of(path)
        if target in RANK and RANK[target] > RANK[source]
    ]
    assert upward == []


def test_modules_of_one_layer_do_not_import_each_other() -> None:
    sideways = [
        f"{path.relative_to(PACKAGE)} imports {target}"
        for path in PACKAGE.rglob("*.py")
        if (source := _module_of(path)) in RANK
        for target in _imports_of(path)
        if target in RANK and target != source and RANK[target] == RANK[source]
    ]
    assert sideways == []


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
