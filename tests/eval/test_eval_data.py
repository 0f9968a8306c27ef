from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from eval.core.errors import UsageError
from eval.data import DATA_DIR
from eval.data.source import PRESETS, Source, chosen, read
from eval.run.settings import resolve

ROWS = [{"name": f"n{n}", "text": f"text {n}", "short": f"s {n}"} for n in range(12)]
ROLES = ("input", "reference")
COLUMNS = {"input": "text", "reference": "short"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def _write(path: Path, rows: list[dict[str, Any]]) -> Source:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        table = datasets.Dataset.from_list(rows)
        (table.to_csv if path.suffix == ".csv" else table.to_parquet)(str(path))
    return Source(str(path), COLUMNS)


def _served(monkeypatch: pytest.MonkeyPatch, table: datasets.Dataset) -> list[tuple[Any, ...]]:
    """Have `load_dataset` give a table; what it was called with."""
    calls: list[tuple[Any, ...]] = []

    def load(name: str, config: str | None = None, *, split: str) -> datasets.Dataset:
        calls.append((name, config, split))
        return table

    monkeypatch.setattr(datasets, "load_dataset", load)
    return calls


def _chosen(dataset: str, task: str = "summarization", **given: Any) -> Source:
    return chosen(resolve(None, {"dataset": dataset, "tasks": task, **given}), Source("shipped", {}))


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_local_file_is_read_whatever_it_is_written_in(tmp_path: Path, suffix: str) -> None:
    source = _write(tmp_path / f"mine{suffix}", ROWS)
    assert read(source, ROLES, None, 0) == [
        {"id": str(n), "input": f"text {n}", "reference": f"s {n}"} for n in range(12)
    ]


def test_a_text_file_is_a_row_for_each_line_that_is_not_empty(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("One.\n\nTwo.\n", encoding="utf-8")
    rows = read(Source(str(path), {"input": "text"}), ("input",), None, 0)
    assert rows == [{"id": "0", "input": "One."}, {"id": "2", "input": "Two."}]


def test_a_row_without_an_id_is_named_by_its_place_in_the_table(tmp_path: Path) -> None:
    rows = read(_write(tmp_path / "mine.jsonl", ROWS), ROLES, 5, seed=3)
    assert len({row["id"] for row in rows}) == 5
    assert [row["input"] for row in rows] == [f"text {row['id']}" for row in rows]
    assert [row["id"] for row in rows] != [str(n) for n in range(5)]


def test_a_column_of_ids_names_the_rows_and_a_row_without_one_is_still_there(tmp_path: Path) -> None:
    rows = [ROWS[0], {**ROWS[1], "name": None}]
    source = _write(tmp_path / "mine.jsonl", rows)
    named = Source(source.name, {**COLUMNS, "id": "name"})
    assert [row["id"] for row in read(named, ROLES, None, 0)] == ["n0", "1"]


def test_a_seed_chooses_always_the_same_rows_and_another_one_others(tmp_path: Path) -> None:
    source = _write(tmp_path / "mine.jsonl", ROWS)
    assert read(source, ROLES, 6, 1) == read(source, ROLES, 6, 1)
    assert read(source, ROLES, 6, 1) != read(source, ROLES, 6, 2)
    assert read(source, ROLES, 6, 1)[:3] == read(source, ROLES, 3, 1)


def test_a_limit_beyond_the_table_gives_each_row_once(tmp_path: Path) -> None:
    rows = read(_write(tmp_path / "mine.jsonl", ROWS), ROLES, 1000, 0)
    assert sorted(row["input"] for row in rows) == sorted(row["text"] for row in ROWS)


def test_rows_without_a_text_are_passed_over_for_others(tmp_path: Path) -> None:
    holes = [{**row, "short": None if n % 2 else ""} for n, row in enumerate(ROWS[:9])]
    rows = read(_write(tmp_path / "mine.jsonl", [*holes, *ROWS[9:]]), ROLES, 3, 0)
    assert sorted(row["id"] for row in rows) == ["10", "11", "9"]


def test_a_column_without_any_text_is_said_to_be_so(tmp_path: Path) -> None:
    source = _write(tmp_path / "mine.jsonl", [{**row, "short": ""} for row in ROWS])
    with pytest.raises(
        UsageError, match=r"no row of the dataset .*mine\.jsonl' has a text in 'text', 'short'"
    ):
        read(source, ROLES, 3, 0)


@pytest.mark.parametrize(
    ("name", "loaded", "row", "expected"),
    [
        (
            "cnn_dailymail",
            ("abisee/cnn_dailymail", "3.0.0", "test"),
            {"id": "a1", "article": "Long.", "highlights": "Short."},
            {"id": "a1", "input": "Long.", "reference": "Short."},
        ),
        (
            "xsum",
            ("EdinburghNLP/xsum", None, "test"),
            {"id": "7", "document": "Long.", "summary": "Short."},
            {"id": "7", "input": "Long.", "reference": "Short."},
        ),
        (
            "wmt16",
            ("wmt/wmt16", "de-en", "test"),
            {"translation": {"de": "Haus", "en": "house"}},
            {"id": "0", "input": "Haus", "reference": "house"},
        ),
    ],
)
def test_the_columns_of_well_known_data_sets_are_known(
    name: str,
    loaded: tuple[Any, ...],
    row: dict[str, Any],
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = _served(monkeypatch, datasets.Dataset.from_list([row]))
    source = _chosen(name)
    assert read(source, ROLES, 1, 0) == [expected]
    assert calls == [loaded]
    assert "{input}" in str(source.instruction)


def test_what_is_given_overrides_what_is_known_of_a_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    table = datasets.Dataset.from_list([{"translation": {"fr": "maison", "en": "house"}}])
    calls = _served(monkeypatch, table)
    source = _chosen(
        "wmt16",
        "translation",
        dataset_config="fr-en",
        split="train",
        input_column="translation.en",
        reference_column="translation.fr",
        instruction="Say it in French: {input}",
    )
    assert read(source, ROLES, 1, 0)[0] == {"id": "0", "input": "house", "reference": "maison"}
    assert calls == [("wmt/wmt16", "fr-en", "train")]
    assert source.instruction == "Say it in French: {input}"
    assert PRESETS["wmt16"].columns["input"] == "translation.de"


def test_texts_in_lists_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"turns": [{"text": "one"}, {"text": "two"}], "parts": ["a", "b"]}
    _served(monkeypatch, datasets.Dataset.from_list([row]))
    source = _chosen("mine", input_column="turns.text", reference_column="parts")
    assert read(source, ROLES, 1, 0) == [{"id": "0", "input": "one\ntwo", "reference": "a\nb"}]


@pytest.mark.parametrize(
    ("features", "row", "there"),
    [
        (None, {"b": "x", "a": "y"}, "a, b"),
        (None, {"pair": {"de": "x", "en": "y"}, "id": "z"}, "id, pair.de, pair.en"),
        (None, {"turns": [{"text": "x"}], "id": "z"}, "id, turns.text"),
        (
            datasets.Features({"pair": datasets.Translation(languages=["de", "en"])}),
            {"pair": {"de": "x", "en": "y"}},
            "pair.de, pair.en",
        ),
    ],
)
def test_an_unknown_column_is_answered_with_those_there_are(
    features: datasets.Features | None, row: dict[str, Any], there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _served(monkeypatch, datasets.Dataset.from_list([row], features=features))
    source = _chosen("mine", input_column=there.split(", ")[0], reference_column="pair.fr")
    with pytest.raises(UsageError) as caught:
        read(source, ROLES, 1, 0)
    assert str(caught.value) == f"unknown column 'pair.fr' in mine; choose from: {there}"


def test_an_empty_first_row_does_not_make_its_columns_unknown(tmp_path: Path) -> None:
    source = _write(tmp_path / "mine.jsonl", [{**ROWS[0], "short": None}, ROWS[1]])
    assert [row["id"] for row in read(source, ROLES, None, 0)] == ["1"]


def test_a_column_that_is_not_known_has_to_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    _served(monkeypatch, datasets.Dataset.from_list(ROWS))
    with pytest.raises(UsageError, match="'mine' needs --reference-column; choose from: name, short, text"):
        read(_chosen("mine", input_column="text"), ROLES, 1, 0)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the data file .*no\.jsonl is missing"):
        read(Source(str(tmp_path / "no.jsonl"), COLUMNS), ROLES, 1, 0)


@pytest.mark.parametrize(
    ("name", "content"),
    [("mine.jsonl", ""), ("mine.jsonl", "{no json\n"), ("mine.csv", "text,short\n"), ("mine.parquet", "x")],
)
def test_a_file_without_rows_is_one_line(name: str, content: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    with pytest.raises(
        UsageError, match=r"the dataset '.*' (is empty|cannot be had \(.*\); choose from: )"
    ) as caught:
        read(Source(str(path), COLUMNS), ROLES, 1, 0)
    assert "\n" not in str(caught.value)


def test_no_network_is_one_line_with_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*given: Any, **more: Any) -> None:
        raise ConnectionError("Couldn't reach the hub\n(after 5 tries)")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(UsageError) as caught:
        read(_chosen("xsum"), ROLES, 1, 0)
    assert str(caught.value) == (
        "the dataset 'EdinburghNLP/xsum' cannot be had (Couldn't reach the hub (after 5 tries)); choose "
        "from: cnn_dailymail, wmt16, xsum, any name on the hub, or a local file "
        "(.csv, .json, .jsonl, .parquet, .txt)"
    )


@pytest.mark.parametrize("given", [{"split": "train"}, {"dataset_config": "de-en"}])
def test_a_file_has_no_splits_and_no_configurations(given: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"mine\.csv is a file, without splits and configurations"):
        _chosen("mine.csv", **given)


@pytest.mark.parametrize(
    ("file", "roles"),
    [
        ("summarization.jsonl", ("id", "document", "summary")),
        ("translation_en_fr.jsonl", ("id", "en", "fr")),
        ("catalogue.jsonl", ("name", "name", "text")),
    ],
)
def test_what_ships_has_a_text_in_every_row(file: str, roles: tuple[str, str, str]) -> None:
    path = DATA_DIR / file
    source = Source(str(path), dict(zip(("id", "input", "reference"), roles, strict=True)))
    written = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert read(source, ROLES, None, 0) == [
        {"id": row[roles[0]], "input": row[roles[1]], "reference": row[roles[2]]} for row in written
    ]
