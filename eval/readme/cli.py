"""The command line of `python -m eval readme`."""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from eval.core.console import EXIT_WRONG, usage_errors, write_results
from eval.core.errors import UsageError, check_choice
from eval.core.results import FOLDER

README = Path(__file__).resolve().parents[2] / "README.md"
_BEGIN = re.compile(r"<!-- table:(?P<name>\S+) -->")
_END = "<!-- /table -->"  # a table stands between these two, each on its own line

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def readme(
    write: Annotated[bool, typer.Option("--write", help="Put the tables into the file.")] = False,
    file: Annotated[Path, typer.Option(help="The text; default: README.md.", show_default=False)] = README,
    results: Annotated[
        Path, typer.Option(help="A folder; default: eval/results.", show_default=False)
    ] = FOLDER,
) -> None:
    """Check that the tables of the README are what `eval/results/` gives, or with --write make them so.

    The exit code is 1 where they differ; the lines that do are printed.
    """
    with usage_errors():
        differences = update(file, results, write)
    for line in differences:
        typer.echo(line)
    if differences and not write:
        way_out = "`python -m eval readme --write` makes it agree"
        typer.echo(f"{file} disagrees with {results}; {way_out}", err=True)
        raise typer.Exit(EXIT_WRONG)


def update(file: Path, folder: Path, write: bool) -> list[str]:
    """Lines to take out of the file (`-`) and to put in (`+`), with their numbers; `write` does it."""
    from eval.readme.tables import tables

    try:
        old = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    new = filled(old, {name: make() for name, make in tables(folder).items()})
    if write and new != old:
        write_results(file, "\n".join(new) + "\n")
    lines = []
    for kind, first, last, new_first, new_last in difflib.SequenceMatcher(None, old, new).get_opcodes():
        if kind != "equal":
            lines += [f"{first + 1}: - {line}" for line in old[first:last]]
            lines += [f"{first + 1}: + {line}" for line in new[new_first:new_last]]
    return lines


def filled(lines: list[str], tables: Mapping[str, str]) -> list[str]:
    """The text with each table in its one place, between empty lines; or a `UsageError` of the markers."""
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
