"""Every report of the collection is a test, or stands in `todo.md` with what it waits for.

`python -m tests.cases.test_index` prints the table: row, tests, whether the right answer or a refusal is what
they see.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

FOLDER = Path(__file__).parent
TODO = FOLDER / "todo.md"

LEFT_OUT = frozenset((7, 13, 16, 18, 24, 29, 38, 40, 44, 48, 52, 57, 64, 68, 76, 80))
ROWS = frozenset(range(1, 82)) - LEFT_OUT
"""Numbers of the collection, which leaves some out."""


REFUSALS = r"(PagedCache|CacheMismatch|UnsupportedLayer|Value|Type|Attribute|Index|Import)Error|PoolExhausted"
"""Errors that tests of a refusal name."""


def _tests() -> dict[int, list[tuple[str, str, str]]]:
    """Row -> (file, test, `right`, `refused` or both)."""
    found: dict[int, list[tuple[str, str, str]]] = defaultdict(list)
    for path in sorted(FOLDER.glob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for number in re.findall(r"\bCase (\d+)\.", ast.get_docstring(node) or ""):
                    found[int(number)].append((path.name, node.name, _outcome(node)))
    return found


def _outcome(test: ast.FunctionDef) -> str:
    source = ast.unparse(test)
    refuses = re.search(REFUSALS, source) is not None
    answers = (
        re.search(r"torch\.equal|\.tolist\(\)|norm\(|\.abs\(\)|allclose|_close|got == ", source) is not None
    )
    return "right, refused" if refuses and answers else "refused" if refuses else "right"


def _waiting() -> tuple[list[int], list[int]]:
    """Rows that wait as a whole, and rows of which a part does."""
    text = TODO.read_text(encoding="utf-8")
    whole = [int(number) for number in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)]
    return whole, [int(number) for number in re.findall(r"^\| (\d+), part \|", text, re.MULTILINE)]


def test_every_row_is_a_test_or_waits_for_something_and_none_is_both() -> None:
    tested, (whole, parts) = set(_tests()), _waiting()
    assert tested | set(whole) == ROWS
    assert tested & set(whole) == set()
    assert len(whole) == len(set(whole))
    assert len(parts) == len(set(parts))
    assert set(parts) <= tested


def table() -> str:
    """The rows as Markdown."""
    lines = ["| row | test | seen |", "|---|---|---|"]
    tests, (whole, _) = _tests(), _waiting()
    for row in sorted(ROWS):
        if row in whole:
            lines.append(f"| {row} | `todo.md` | waits |")
        for file, name, outcome in tests.get(row, []):
            topic = file.removesuffix(".py").removeprefix("test_")
            lines.append(f"| {row} | `{topic}`: {name.removeprefix('test_')} | {outcome} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
