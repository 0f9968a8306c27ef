"""The README says what `eval/results/` says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eval.core.errors import UsageError
from eval.core.results import FOLDER, read
from eval.readme.cli import README, app, filled, update
from eval.readme.tables import NAMES, hardware, ratio, tables, times


def test_the_tables_of_the_readme_are_those_of_the_results() -> None:
    assert update(README, FOLDER, write=False) == [], "run `python -m eval readme --write`"


def copied(tmp_path: Path) -> tuple[Path, Path]:
    shutil.copy(README, tmp_path / "README.md")
    shutil.copytree(FOLDER, tmp_path / "results")
    return tmp_path / "README.md", tmp_path / "results"


def command(readme: Path, results: Path, *options: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["--file", str(readme), "--results", str(results), *options])
    return done.exit_code, done.stdout, done.stderr


def test_a_number_that_is_edited_by_hand_is_found_and_put_right(tmp_path: Path) -> None:
    readme, results = copied(tmp_path)
    text = readme.read_text(encoding="utf-8")
    number = text.splitlines().index(next(line for line in text.splitlines() if "535 µs" in line)) + 1
    readme.write_text(text.replace("535 µs", "235 µs"), encoding="utf-8")
    status, out, err = command(readme, results)
    assert status == 1
    assert [line.partition("|")[0] for line in out.splitlines()] == [f"{number}: - ", f"{number}: + "]
    assert "235 µs" in out.splitlines()[0]
    assert "535 µs" in out.splitlines()[1]
    assert "disagrees" in err
    assert command(readme, results, "--write")[0] == 0
    assert readme.read_text(encoding="utf-8") == text
    assert command(readme, results) == (0, "", "")


def test_a_result_that_changes_is_found(tmp_path: Path) -> None:
    readme, results = copied(tmp_path)
    document = json.loads((results / "quality.json").read_text(encoding="utf-8"))
    row = next(row for row in document["results"][0]["rows"] if row["scheme"] == "int8")
    row["kl_nats"] = 0.25
    (results / "quality.json").write_text(json.dumps(document))
    status, out, _ = command(readme, results)
    assert status == 1
    assert "2.5e-01" in out


def test_the_hardware_under_a_table_is_that_of_its_files(tmp_path: Path) -> None:
    _, results = copied(tmp_path)
    document = json.loads((results / "quality.json").read_text(encoding="utf-8"))
    document["environment"]["cpu"] = "abacus"
    (results / "quality.json").write_text(json.dumps(document))
    assert "of abacus, 2 threads, torch 2." in tables(results)["quality"]()
    both = hardware(lambda file: read(results / file), "quality.json", "bench_epyc_zen4_2cores.json")
    assert len(both.splitlines()) == 2


@pytest.mark.parametrize("name", NAMES)
def test_every_row_of_a_table_has_a_cell_for_each_column(name: str) -> None:
    table, _, measured = tables()[name]().partition("\n\n")
    assert len({line.count("|") for line in table.splitlines()}) == 1
    assert len(table.splitlines()) > 3
    assert measured.startswith("Measured on ")


# --- what is wrong with files and markers -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table:a -->\n<!-- /table -->", r"there are 0 places <!-- table:b -->, instead of one"),
        ("<!-- table:a -->\n<!-- /table -->\n" * 2, r"there are 2 places <!-- table:a -->"),
        ("<!-- table:c -->\n<!-- /table -->", r"unknown table 'c'; choose from: a, b"),
        ("<!-- table:a -->\n<!-- table:b -->", r"line 2: table 'a' is not closed with <!-- /table -->"),
        ("<!-- table:a -->\n", r"table 'a' is not closed"),
        ("text\n<!-- /table -->", r"line 2: <!-- /table --> closes no table"),
    ],
)
def test_markers_that_do_not_fit_are_named(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        filled(text.splitlines(), {"a": "1", "b": "2"})


def test_tables_replace_what_is_between_their_markers_and_nothing_else() -> None:
    lines = [
        "x",
        "<!-- table:b -->",
        "old",
        "older",
        "<!-- /table -->",
        "y",
        "<!-- table:a -->",
        "<!-- /table -->",
    ]
    new = filled(lines, {"a": "1", "b": "2\n3"})
    assert new == [
        *("x", "<!-- table:b -->", "", "2", "3", "", "<!-- /table -->"),
        *("y", "<!-- table:a -->", "", "1", "", "<!-- /table -->"),
    ]
    assert filled(new, {"a": "1", "b": "2\n3"}) == new


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read .*quality.json: No such file"),
        ("{", "quality.json is no JSON object"),
        ("{}", "quality.json: 0 rows of 'quality' with scheme='auto', instead of one"),
    ],
)
def test_results_that_are_missing_are_one_line_and_exit_code_2(
    tmp_path: Path, content: str | None, message: str
) -> None:
    readme, results = copied(tmp_path)
    (results / "quality.json").unlink()
    if content is not None:
        (results / "quality.json").write_text(content)
    status, _, err = command(readme, results)
    assert status == 2
    assert err.count("\n") == 1
    with pytest.raises(UsageError, match=message):
        update(readme, results, write=False)


# --- numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"), [(0.681, "0.68x"), (1.5, "1.50x"), (3.51, "3.5x"), (9.96, "10x"), (16.97, "17x")]
)
def test_ratios_have_two_or_three_digits(value: float, text: str) -> None:
    assert ratio(value) == text


@pytest.mark.parametrize(
    ("seconds", "texts"),
    [
        ((0.00514, 0.000301), ["5140 µs", "301 µs"]),
        ((0.0241, 0.0056), ["24.1 ms", "5.6 ms"]),
        ((0.1002, 0.0669), ["100 ms", "67 ms"]),
    ],
)
def test_times_of_one_row_share_a_unit(seconds: tuple[float, ...], texts: list[str]) -> None:
    assert times(seconds) == texts
