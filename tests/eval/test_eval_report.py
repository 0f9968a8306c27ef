from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from eval import report
from eval.report import COLUMNS, Run
from eval.runner import Prediction, Row
from eval.settings import Settings

GOOD = Row(
    task="summarization",
    cache="dynamic",
    metric_names="ROUGE-1/2/L",
    metrics={"rouge_1": 21.14, "rouge_2": 5.66, "rouge_l": 20.0},
    identical=1.0,
    kv_bytes=3 * 2**20 // 2,
    kv_allocated_bytes=2 * 2**20,
    kv_details={"tensor_bytes": 3},
    peak_bytes=700 * 2**20,
    rise_bytes=12 * 2**20,
    prefill_ms=1234.56,
    decode_ms_per_token=78.901,
    samples=24,
)
CELLS = {
    "task": "summarization",
    "cache": "dynamic",
    "metric": "ROUGE-1/2/L",
    "score": "21.1/5.7/20.0",
    "identical": "100.0%",
    "KV MiB": "1.50",
    "peak MiB": "700",
    "rise MiB": "12",
    "prefill ms": "1234.6",
    "decode ms/token": "78.90",
}
MISSING = Row("summarization", "paged", "ROUGE-1/2/L", problem="no compiler")
RUN = Run(
    settings=Settings(),
    source="tiny.gguf",
    environment={"cpu": "A | B", "versions": {"torch": "2.13.0", "triton": None}},
    memory_method="measured somehow",
    seconds=61.4,
    rows=[GOOD, MISSING],
    predictions=[Prediction("summarization", "dynamic", "pkg", "two\nlines", "ref", True)],
)


def _rendered(rows: list[Row], width: int = 120) -> str:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(report.table(rows, width))
    return captured.get()


def test_cells_show_the_units_of_their_headings() -> None:
    assert {column.heading: column.cell(GOOD) for column in COLUMNS} == CELLS


def test_what_was_not_measured_is_a_dash_and_not_a_zero() -> None:
    cells = {column.heading: column.cell(MISSING) for column in COLUMNS}
    assert [text for heading, text in cells.items() if heading not in ("task", "cache", "metric")] == [
        "-"
    ] * 7


def test_the_terminal_table_shows_every_row_and_the_reason_below_it() -> None:
    text = _rendered([GOOD, MISSING])
    row = next(line for line in text.splitlines() if "dynamic" in line)
    assert row.split() == list(CELLS.values())
    assert "paged is not available (summarization): no compiler" in text


@pytest.mark.parametrize(("width", "has_metric"), [(80, False), (100, True)])
def test_the_table_fits_its_width_without_cutting_a_cell(width: int, has_metric: bool) -> None:
    text = _rendered([GOOD], width)
    assert "…" not in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert ("ROUGE-1/2/L" in text) is has_metric


def test_one_problem_of_two_tasks_is_said_once_and_an_error_is_called_failed() -> None:
    failed = dataclasses.replace(MISSING, failed=True)
    text = _rendered([failed, dataclasses.replace(failed, task="translation")])
    assert text.count("no compiler") == 1
    assert "paged failed (summarization, translation): no compiler" in text


def test_the_report_states_table_settings_machine_and_answers() -> None:
    text = report.markdown(RUN)
    assert "| " + " | ".join(CELLS.values()) + " |" in text
    assert "- **paged is not available (summarization): no compiler**" in text
    assert "| batch_size | 8 |" in text
    assert "| cpu | A \\| B |" in text
    assert "| versions | torch 2.13.0 |" in text
    assert "memory is measured somehow" in text
    assert "- `dynamic`: two lines" in text


def test_a_run_folder_holds_config_results_answers_and_report(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    report.write(RUN, folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.yaml",
        "predictions.jsonl",
        "report.md",
        "results.json",
    ]
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert results["rows"] == [dataclasses.asdict(GOOD), dataclasses.asdict(MISSING)]
    assert results["environment"] == RUN.environment
    assert yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")) == RUN.settings.to_dict()
    lines = (folder / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [dataclasses.asdict(RUN.predictions[0])]
