"""Places of tables in a text: between `<!-- table:NAME -->` and `<!-- /table -->`, each on its own line."""

from __future__ import annotations

import re
from collections.abc import Mapping

from eval.core.errors import UsageError, check_choice

_BEGIN = re.compile(r"<!-- table:(?P<name>\S+) -->")
_END = "<!-- /table -->"


def filled(lines: list[str], tables: Mapping[str, str]) -> list[str]:
    """The text with the tables in their places, an empty line before and behind each.

    A marker of an unknown table, or one that is not closed or opened, is a `UsageError`, and so is a table
    that has no place or two.
    """
    new: list[str] = []
    found: list[str] = []
    opened: str | None = None
    for number, line in enumerate(lines, start=1):
        begin = _BEGIN.fullmatch(line.strip())
        if begin and opened is not None:
            raise UsageError(f"line {number}: table {opened!r} is not closed with {_END}")
        if begin:
            opened = check_choice("table", begin["name"], tables)
            found.append(opened)
            new += [line, "", *tables[opened].splitlines(), ""]
        elif line.strip() == _END:
            if opened is None:
                raise UsageError(f"line {number}: {_END} closes no table")
            opened = None
        if opened is None:
            new.append(line)
    if opened is not None:
        raise UsageError(f"table {opened!r} is not closed with {_END}")
    for name in tables:
        if found.count(name) != 1:
            raise UsageError(f"there are {found.count(name)} places <!-- table:{name} -->, instead of one")
    return new
