"""Where tables go in a text: between `<!-- table:NAME -->` and `<!-- /table -->`, each on its own line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from eval.errors import UsageError, check_choice

_BEGIN = re.compile(r"<!-- table:(?P<name>\S+) -->")
_END = "<!-- /table -->"


@dataclass(frozen=True)
class Place:
    """Lines of a text that hold one table: `lines[first:end]`, markers excluded."""

    name: str
    first: int
    end: int


def places(lines: list[str], names: Mapping[str, object]) -> list[Place]:
    """Where the tables are, in the order of the text.

    Raises:
        UsageError: A marker of an unknown table, one that is not closed or not opened, a table that has no
            place or two.
    """
    found: list[Place] = []
    opened: tuple[str, int] | None = None
    for index, line in enumerate(lines):
        begin = _BEGIN.fullmatch(line.strip())
        if begin:
            if opened:
                raise UsageError(f"line {index + 1}: table {opened[0]!r} is not closed with {_END}")
            opened = check_choice("table", begin["name"], names), index + 1
        elif line.strip() == _END:
            if not opened:
                raise UsageError(f"line {index + 1}: {_END} closes no table")
            found.append(Place(*opened, index))
            opened = None
    if opened:
        raise UsageError(f"table {opened[0]!r} is not closed with {_END}")
    _check_once([place.name for place in found], names)
    return found


def _check_once(found: list[str], names: Mapping[str, object]) -> None:
    for name in names:
        if found.count(name) != 1:
            raise UsageError(f"there are {found.count(name)} places <!-- table:{name} -->, instead of one")


def filled(lines: list[str], tables: Mapping[str, str]) -> list[str]:
    """The text with the tables in their places, an empty line before and behind each.

    Raises:
        UsageError: as `places`.
    """
    new: list[str] = []
    done = 0
    for place in places(lines, tables):
        new += [*lines[done : place.first], "", *tables[place.name].splitlines(), ""]
        done = place.end
    return [*new, *lines[done:]]
