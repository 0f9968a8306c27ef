"""Verdicts, tables, pictures and exit codes of `python -m eval quality`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eval.core import models
from eval.core.models import LoadedModel
from eval.core.table import Result
from eval.quality import picture, tables
from eval.quality.cli import app
from eval.quality.protocol import Comparison, Outcome, Score
from eval.quality.schemes import SCHEMES
from eval.quality.storage import Storage
from eval.quality.tables import REQUIRED, Protocol

ARGUMENTS = ["--tokens", "96", "--rows", "1", "--chunk", "32", "--model", "tiny"]
SMALL = Protocol("tiny", rows=1, tokens=96, chunk=32)


def outcome(name: str, kl_nats: float, *, bits: int = 4, log_perplexity: float = 1.0) -> Outcome:
    score = Score(
        divergence=100 * kl_nats, agreed=99, tokens=100, surprise=100 * log_perplexity, predicted=100
    )
    return Outcome(SCHEMES[name], score, Storage(bits, 8, 2 * bits, 8))


def comparison(*outcomes: Outcome, key_offset: bool = False) -> Comparison:
    return Comparison(Score(surprise=100.0, predicted=100, tokens=100), list(outcomes), key_offset)


def verdicts(compared: Comparison) -> dict[str, list[tuple[str, bool]]]:
    found = {
        outcome.scheme.name: [
            (bound.what, bound.holds) for bound in tables.bounds(outcome, compared, REQUIRED)
        ]
        for outcome in compared.outcomes
    }
    return {name: bounds for name, bounds in found.items() if bounds}


# --- verdicts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kl_nats", "holds"),
    [
        ("int8", 3.9e-4, True),
        ("int8", 4.1e-4, False),
        ("fp8", 7.9e-3, True),
        ("fp8", 8.1e-3, False),
        ("k8v4", 6.9e-3, True),
        ("k8v4", 7.1e-3, False),
        ("int8", float("nan"), False),
    ],
)
def test_a_divergence_is_judged_by_its_limit(name: str, kl_nats: float, holds: bool) -> None:
    assert verdicts(comparison(outcome(name, kl_nats))) == {name: [("KL", holds)]}


def test_int4_is_judged_by_divergence_bits_and_every_stock_cache_that_ran() -> None:
    absent = Outcome(SCHEMES["stock hqq"], problem="not installed")
    compared = comparison(outcome("int4", 0.02), outcome("stock quanto", 0.079), absent)
    assert verdicts(compared) == {"int4": [("KL", True), ("bits", True), ("below stock quanto", False)]}
    compared = comparison(outcome("int4", 0.03, bits=5), outcome("stock hqq", 0.12))
    assert verdicts(compared) == {"int4": [("KL", False), ("bits", False), ("below stock hqq", True)]}


def test_with_the_offset_perplexity_is_judged_in_both_directions_and_full_precision_must_stay() -> None:
    compared = comparison(
        outcome("dynamic", 1.1e-3),
        outcome("int8", 9.0, log_perplexity=1.029),
        outcome("k8v4", 9.0, log_perplexity=0.96),
        outcome("int4", 9.0, log_perplexity=1.049),
        outcome("stock quanto", 9.0, log_perplexity=9.0),
        key_offset=True,
    )
    assert verdicts(compared) == {
        "dynamic": [("KL", False)],
        "int8": [("perplexity change", True)],
        "k8v4": [("perplexity change", False)],
        "int4": [("perplexity change", False)],
    }


@pytest.mark.parametrize(
    "other",
    [Protocol("smollm2", 1, 1024, 16), Protocol("smollm2", 2, 512, 16), Protocol("gpt2", 2, 1024, 16)],
)
def test_of_another_run_nothing_is_required(other: Protocol) -> None:
    compared = comparison(outcome("int8", 1.0))
    assert [*tables.bounds(compared.outcomes[0], compared, other)] == []


# --- tables and pictures ------------------------------------------------------------------------------------


def test_a_table_has_a_row_for_what_did_not_run_and_says_which_layers_moved() -> None:
    moved = outcome("int4", 0.02)
    moved.moved = {0: "k8v4", 2: "k8v4", 3: "k8v4", 1: "k8v4", 7: "k8v4", 5: "int8"}
    absent = Outcome(SCHEMES["stock hqq"], problem="not installed")
    result = tables.result(comparison(moved, absent), REQUIRED, 1.0)
    assert result.rows[0].cells["note"] == "layers 5 as int8; layers 0-3, 7 as k8v4"
    assert result.rows[0].cells["stored_bits"] == 4.0
    assert result.rows[0].cells["all_bits"] == 8.0
    assert result.rows[1].cells["note"] == "not installed"
    assert result.rows[1].cells.get("kl_nats") is None
    assert result.rows[1].bounds == ()


def results() -> list[Result]:
    absent = Outcome(SCHEMES["stock hqq"], problem="not installed")
    outcomes = [
        outcome("dynamic", 0.0, bits=32),
        outcome("int8", 1e-4, bits=8),
        outcome("int4", 0.02),
        absent,
    ]
    return [
        tables.result(comparison(*outcomes, key_offset=shifted), REQUIRED, 1.0) for shifted in (False, True)
    ]


def test_a_picture_has_a_panel_for_each_table(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "quality.png"
    assert picture.draw(results(), file)
    head = file.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(head[16:20]) == 2 * 720
    assert file.stat().st_size > 10_000


def test_bars_carry_the_numbers_of_the_table_and_gaps_are_named() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(12, 3), layout="constrained")
    picture._fill(figure, results())
    figure.canvas.draw()
    for axes in figure.axes:
        assert [label.get_text() for label in axes.get_yticklabels()] == [
            "dynamic",
            "int8",
            "int4",
            "stock hqq",
        ]
        assert [text.get_text() for text in axes.texts] == [
            "0.0e+00, 32.00 bits",
            "1.0e-04, 8.00 bits",
            "2.0e-02, 4.00 bits",
            "not measured",
        ]
        ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
        assert ends == pytest.approx([1e-6, 1e-4, 0.02, 1e-6])
        boxes = [text.get_window_extent() for text in (*axes.texts, axes.xaxis.label)]
        assert not any(boxes[i].overlaps(boxes[j]) for i in range(5) for j in range(i))
        assert all(box.x1 < figure.bbox.x1 for box in boxes)


def test_without_matplotlib_there_is_no_picture(tmp_path: Path, without_matplotlib: None) -> None:
    assert not picture.draw(results(), tmp_path / "quality.png")
    assert list(tmp_path.iterdir()) == []


# --- the command line ---------------------------------------------------------------------------------------


@pytest.fixture
def _tiny(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "load", lambda name: loaded)


@pytest.mark.usefixtures("_tiny")
def test_a_run_prints_both_tables_and_writes_json_and_picture(tmp_path: Path) -> None:
    file = tmp_path / "quality.json"
    result = CliRunner().invoke(app, [*ARGUMENTS, "--only", "auto,int8", "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert "key offset" in result.output
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["settings"] == {"model": "tiny", "rows": 1, "tokens": 96, "chunk": 32, "source": "tiny"}
    assert [table["bench"] for table in document["results"]] == ["quality", "offset"]
    assert [row["scheme"] for row in document["results"][0]["rows"]] == ["auto", "int8"]
    assert document["results"][0]["rows"][0]["perplexity_ratio"] == pytest.approx(1.0, abs=1e-6)
    assert all(row["required"] == [] for table in document["results"] for row in table["rows"])


@pytest.mark.usefixtures("_tiny")
@pytest.mark.parametrize(("limit", "exit_code"), [(1.0, 0), (0.0, 1)])
def test_a_required_number_that_is_missed_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, limit: float, exit_code: int
) -> None:
    monkeypatch.setattr(tables, "REQUIRED", SMALL)
    monkeypatch.setattr(tables, "MAX_KL_NATS", {"int8": limit})
    result = CliRunner().invoke(app, [*ARGUMENTS, "--only", "int8"])
    assert result.exit_code == exit_code, result.output
    assert ("✗ quality [int8]: KL is" in result.output) is bool(exit_code)


@pytest.mark.usefixtures("_tiny")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "int5"], "unknown scheme 'int5'; choose from: auto, dynamic, fp8, int4, "),
        (["--only", "int8", "--json", "/does/not/exist.json"], "cannot write the results to"),
        (
            ["--only", "int8", "--tokens", "10000000"],
            "1 rows of 10000000 tokens are more than catalogue.jsonl",
        ),
    ],
)
def test_a_request_that_cannot_be_met_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, [*ARGUMENTS, *arguments])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1
