"""The structure of the project in numbers, each held to a limit: `python -m dev.structure`.

Imports are read from the source. For cycles, those inside functions and under `TYPE_CHECKING` count too, so
that no circle can hide; chains are those of loading. A room is a folder of the package or a file beside
those folders; a floor is how far a room lies above those that import nothing.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "hf_paged_cache"
SOURCES = frozenset((".py", ".h", ".cpp", ".j2"))
MOST_PACKAGE_LINES = 21_500
MOST_EVAL_LINES = 10_500
"""What needs more says why where it raises them."""
COMMON_STEMS = frozenset(("__init__", "__main__"))

Graph = dict[str, set[str]]
"""Name -> names that it imports."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One number, and the most that it may be.

    Attributes:
        what: What was counted.
        value: How many.
        limit: The most there may be; None if there is no limit.
        where: The place that has so many.
    """

    what: str
    value: int
    limit: int | None
    where: str = ""

    @property
    def is_over(self) -> bool:
        """Whether it is more than it may be."""
        return self.limit is not None and self.value > self.limit

    def __str__(self) -> str:
        limit = "" if self.limit is None else f" (at most {self.limit:,})"
        where = f"  {self.where}" if self.where else ""
        return f"{'OVER ' if self.is_over else '     '}{self.what}: {self.value:,}{limit}{where}"


def findings(root: Path = ROOT) -> Iterator[Finding]:
    """Everything that is counted, of the checkout in a folder."""
    package = root / PACKAGE
    for name in (PACKAGE, "eval", "dev"):
        yield _largest_folder(root / name)
    modules = import_graph(package)
    rooms = room_graph(modules)
    floors = longest_chain(rooms)
    yield Finding("floors of the package", len(floors), 10, " > ".join(floors))
    chain = longest_chain(import_graph(package, when_loaded=True))
    yield Finding("deepest import chain", len(chain), 10, " > ".join(_short(name) for name in chain))
    circles = [circle for circle in cycles(modules) if len(circle) > 1]
    yield Finding("import cycles", len(circles), 0, "; ".join(" ".join(sorted(circle)) for circle in circles))
    stems = Counter(path.stem for path in _sources(package) if path.stem not in COMMON_STEMS)
    twice = sorted(stem for stem, count in stems.items() if count > 1)
    yield Finding("stems used for two or more files", len(twice), None, " ".join(twice))
    name, attributes = largest_class(package)
    yield Finding("attributes of the largest class", attributes, 14, name)
    yield Finding("lines of the package", _lines(package), MOST_PACKAGE_LINES)
    yield Finding("lines of eval", _lines(root / "eval"), MOST_EVAL_LINES)


def import_graph(package: Path, *, when_loaded: bool = False) -> Graph:
    """Every module of a package, and which others it imports, by dotted names below the package.

    Args:
        package: Its folder.
        when_loaded: Leave out imports inside functions and under `TYPE_CHECKING`.
    """
    modules = {_dotted(path, package): path for path in package.rglob("*.py")}
    graph: Graph = {}
    for name, path in modules.items():
        found = (_as_module(target, modules) for target in _imports(path, package, when_loaded))
        graph[name] = {target for target in found if target not in (None, name)}
    return graph


def room_graph(modules: Graph) -> Graph:
    """The same for the top level of the package."""
    rooms: Graph = {}
    for name, targets in modules.items():
        room = name.split(".")[0]
        if room not in ("", "__main__"):  # they only hand on
            rooms.setdefault(room, set()).update({target.split(".")[0] for target in targets} - {room, ""})
    return rooms


def cycles(graph: Graph) -> list[set[str]]:
    """The strongly connected parts of a graph (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph.get(node, ()):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            at = stack.index(node)
            found.append(set(stack[at:]))
            del stack[at:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def longest_chain(graph: Graph) -> list[str]:
    """The longest way down; parts of a circle count once."""
    home = {node: number for number, part in enumerate(cycles(graph)) for node in part}
    chains: dict[int, list[str]] = {}
    for number, part in enumerate(cycles(graph)):  # whatever a part imports comes before it
        below = {home[target] for node in part for target in graph.get(node, ()) if home[target] != number}
        chains[number] = [min(part), *max((chains[part] for part in below), key=len, default=[])]
    return max(chains.values(), key=len, default=[])


def largest_class(package: Path) -> tuple[str, int]:
    """The class with most attributes of its own instances, and how many."""
    found = [
        (f"{_dotted(path, package)}.{node.name}", len(_attributes(node)))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and not _is_value(node)
    ]
    return max(found, key=lambda item: item[1], default=("", 0))


def _attributes(node: ast.ClassDef) -> set[str]:
    return {
        target.attr
        for statement in ast.walk(node)
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign)
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
    }


def _is_value(node: ast.ClassDef) -> bool:
    """Whether its instances are frozen: a record may have as many fields as there is to say."""
    return any("frozen=True" in ast.unparse(decorator) for decorator in node.decorator_list)


def _imports(path: Path, package: Path, when_loaded: bool) -> set[str]:
    """Dotted names, below the package, of what a file imports anywhere in it; names in modules included."""
    here = _dotted(path, package).split(".") if path.parent != package else []
    if path.name != "__init__.py" and here:
        here = here[:-1]
    found: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    left_out = {
        id(inner)
        for node in ast.walk(tree)
        if when_loaded and (isinstance(node, ast.FunctionDef) or _is_for_types(node))
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [package.name, *here[: len(here) + 1 - node.level]] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            found.update(f"{prefix}.{alias.name}" for alias in node.names)
    return {name.removeprefix(f"{package.name}.") for name in found if name.startswith(f"{package.name}.")}


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _as_module(name: str, modules: dict[str, Path]) -> str | None:
    parts = name.split(".")
    return next((dotted for end in (None, -1, -2) if (dotted := ".".join(parts[:end])) in modules), None)


def _dotted(path: Path, package: Path) -> str:
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _short(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _largest_folder(top: Path) -> Finding:
    counts = Counter(path.parent for path in _sources(top))
    folder, count = max(counts.items(), key=lambda item: item[1])
    return Finding(f"files in a folder of {top.name}", count, 14, str(folder.relative_to(top.parent)))


def _lines(top: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in _sources(top))


def _sources(top: Path) -> Iterable[Path]:
    return (path for path in sorted(top.rglob("*")) if path.suffix in SOURCES)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(root: Annotated[Path, typer.Argument(help="A checkout of the project.")] = ROOT) -> None:
    """Print the structure in numbers. The exit code is 1 if one of them is over its limit."""
    found = list(findings(root))
    for finding in found:
        typer.echo(str(finding))
    sys.exit(any(finding.is_over for finding in found))


if __name__ == "__main__":
    app()
