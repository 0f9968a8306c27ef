from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from eval import plots, report
from eval.core.errors import UsageError
from eval.core.statistics import Spread
from eval.report import numbers
from eval.report.render import markdown
from eval.report.terminal import COLUMNS, DIFFERENCE_RULE, cells
from eval.run.rows import Metric, Prediction, Row, Run
from tests.eval.report.fake_runs import ATTACK, BITS, CONTEXTS, FAILED, MISSING, few_rows, full_run

SPREAD = Spread(80.0, 70.0, 95.5, 40)
DEFAULT = Row(
    "summarization",
    "dynamic",
    samples=24,
    metrics=(Metric("rouge_l", "ROUGE-L", "%", 20.04, 17.0, 23.4, True, 0.0, 0.0, 0.0),),
    identical_percent=100.0,
    kv_bytes=3 * 2**20 // 2,
    bits_per_value=32.0,
    rise_bytes=12 * 2**20,
    prefill_ms=Spread(1234.56, 1200.0, 1300.0, 3),
    decode_ms=SPREAD,
    tokens_per_s=101.4,
)
OTHER = dataclasses.replace(
    DEFAULT,
    cache="paged-int4",
    metrics=(Metric("rouge_l", "ROUGE-L", "%", 19.7, 16.5, 22.9, True, -0.34, -0.9, 0.2),),
    identical_percent=91.7,
    bits_per_value=4.86,
    decode_ms=Spread(40.0, 39.0, 41.0, 40),
)
CELLS = ["dynamic", "20.0 ±3.2", "-", "100.0", "32.0", "1.50", "12.0", "1235", "80.0 x1.00", "101"]
OTHERS = [
    "paged-int4",
    "19.7 ±3.2",
    "-0.34 noise",
    "91.7",
    "4.9",
    "1.50",
    "12.0",
    "1235",
    "40.0 x0.50",
    "101",
]
KL = Metric("kl", "KL", "nats", 2.31e-4, 2.0e-4, 2.6e-4, False, 2.31e-4, 2.0e-4, 2.6e-4)
PERPLEXITY = Metric("perplexity", "perplexity", "", 14.834, 13.0, 16.2, False, -0.0126, -0.02, -0.01)


@pytest.fixture
def _without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "draw", lambda run, folder: None)


def _rendered(rows: list[Row], width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(report.table(rows, width))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_cells_say_the_interval_the_difference_its_verdict_and_the_ratio_of_times() -> None:
    assert cells([DEFAULT, OTHER]) == [CELLS, OTHERS]


@pytest.mark.parametrize(
    ("metric", "score", "difference", "interval"),
    [
        (KL, "2.3e-4 ±3e-5", "+2.3e-4 worse", "2.3e-4 [2.0e-4, 2.6e-4]"),
        (PERPLEXITY, "14.83 ±1.60", "-0.013 better", "14.83 [13.00, 16.20]"),
        (DEFAULT.metrics[0], "20.0 ±3.2", "0.00 same", "20.0 [17.0, 23.4]"),
        (
            dataclasses.replace(KL, value=math.inf, high=math.inf),
            "inf ±inf",
            "+2.3e-4 worse",
            "inf [2.0e-4, inf]",
        ),
        (dataclasses.replace(KL, difference=None), "2.3e-4 ±3e-5", "-", "2.3e-4 [2.0e-4, 2.6e-4]"),
    ],
    ids=["nats", "no unit", "percent", "infinite", "no default"],
)
def test_a_metric_is_written_with_the_digits_its_unit_needs(
    metric: Metric, score: str, difference: str, interval: str
) -> None:
    assert (numbers.score(metric), numbers.difference(metric), numbers.interval(metric)) == (
        score,
        difference,
        interval,
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(78.901, "78.9"), (12345.6, "12346"), (0.01234, "0.0123"), (2.1e-5, "2.10e-5"), (0.0, "0"), (None, "-")],
)
def test_numbers_have_three_significant_digits(value: float | None, text: str) -> None:
    assert numbers.significant(value) == text


def test_a_difference_that_rounds_to_zero_has_no_sign() -> None:
    metric = Metric("a", "A", "%", 20.0, 19.0, 21.0, True, -0.001, -0.2, 0.1)
    assert numbers.difference(metric) == "0.00 noise"


@pytest.mark.parametrize(("difference", "text"), [(-1.2e-5, "-1e-5 worse"), (3e-4, "+3e-4 better")])
def test_a_difference_that_rounds_to_zero_and_is_real_shows_its_size(difference: float, text: str) -> None:
    metric = Metric("a", "A", "%", 20.0, 19.0, 21.0, True, difference, difference, difference)
    assert numbers.difference(metric) == text
    assert numbers.difference_interval(metric).split()[0] == text.split()[0]


@pytest.mark.parametrize("failed", [False, True])
def test_a_problem_is_a_row_and_what_was_not_measured_is_a_dash_and_not_a_zero(failed: bool) -> None:
    row = Row("summarization", "paged", problem="no compiler", failed=failed)
    word = "failed" if failed else "not available"
    assert cells([DEFAULT, row])[1] == ["paged", word, *["-"] * 8]


def test_without_the_default_cache_there_are_times_and_no_ratios() -> None:
    alone = dataclasses.replace(OTHER, metrics=(dataclasses.replace(OTHER.metrics[0], difference=None),))
    assert cells([alone])[0][2] == "-"
    assert cells([alone])[0][8] == "40.0"


def test_speed_by_context_is_compared_at_the_longest_context_that_all_have() -> None:
    rows = few_rows(["latency"], ["dynamic", "paged"]).rows
    short = dataclasses.replace(rows[1], contexts=rows[1].contexts[:3])
    at = short.contexts[2]
    heading, *_ = [line for line in _rendered([rows[0], short], 100) if line.startswith("latency")]
    assert heading.split(maxsplit=1)[1] == f"at {CONTEXTS[2]} tokens"
    ratio = at.decode_ms.median / rows[0].contexts[2].decode_ms.median
    assert cells([rows[0], short])[1][8] == f"{numbers.significant(at.decode_ms.median)} x{ratio:.2f}"


@pytest.mark.parametrize("width", [80, 100, 140])
def test_a_full_table_fits_its_width_without_cutting_a_cell(width: int) -> None:
    rows = full_run().rows
    lines = _rendered(rows, width)
    assert "…" not in "".join(lines)
    assert max(map(len, lines)) <= width
    for cache in BITS:
        assert sum(line.split(" ")[0] == cache for line in lines) >= 6
    for number, task in enumerate(dict.fromkeys(row.task for row in rows)):
        assert sum(line.split(" ")[0] == task for line in lines) == 1, number


@pytest.mark.parametrize(("width", "left_out"), [(80, {"rise", "prefill", "tokens/"}), (100, set())])
def test_a_narrow_table_leaves_out_what_a_reader_can_do_without(width: int, left_out: set[str]) -> None:
    above = " ".join(_rendered(full_run().rows, width)[:3]).split()
    words = {column.heading.split()[0] for column in COLUMNS} - left_out
    assert words <= set(above)
    assert not left_out & set(above)


def test_what_kept_a_cache_from_running_is_said_once_below_the_table() -> None:
    text = " ".join(" ".join(_rendered(full_run().rows, 100)).split())
    assert text.count(f"{MISSING} is not available (every task): hqq is not installed: pip install hqq") == 1
    # Brackets in an error's message are no markup.
    assert text.count(f"{FAILED} failed (translation): RuntimeError: shape '[8, 3]' is invalid") == 1
    assert DIFFERENCE_RULE in text


@pytest.mark.usefixtures("_without_pictures")
def test_results_read_back_as_the_run_that_was_written(tmp_path: Path) -> None:
    run = full_run()
    folder = tmp_path / "a" / "b"
    report.write(run, folder)
    assert report.read(folder) == run
    assert report.read(folder / "results.json") == run


@pytest.mark.usefixtures("_without_pictures")
def test_numbers_that_are_not_finite_and_odd_line_ends_survive(tmp_path: Path) -> None:
    metrics = (dataclasses.replace(PERPLEXITY, value=math.inf, low=-math.inf, difference=None),)
    answer = Prediction("summarization", "dynamic", "ü", 'a\u2028b\x85c\r\nd"', "", None)
    run = dataclasses.replace(
        few_rows(), rows=[dataclasses.replace(DEFAULT, metrics=metrics)], predictions=[answer]
    )
    report.write(run, tmp_path)
    assert report.read(tmp_path) == run
    strict = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert strict["results"][0]["rows"][0]["metrics"][0]["value"] == "inf"


def test_results_hold_the_fields_of_a_run_but_the_answers_and_read_alone(tmp_path: Path) -> None:
    run = full_run()
    path = tmp_path / "machine.json"
    path.write_text(report.results_json(run), encoding="utf-8")
    results = json.loads(path.read_text(encoding="utf-8"))
    assert list(results) == [
        "environment", "settings", "source", "memory_method", "seconds", "processes", "titles", "results",
    ]  # fmt: skip
    (table,) = results["results"]
    assert table["bench"] == "caches"
    assert set(table["rows"][0]) == {field.name for field in dataclasses.fields(Row)}
    assert report.read(path) == dataclasses.replace(run, predictions=[])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot read the results"),
        ("{", "Expecting property name"),
        ("[1]", "no results of this version"),
        ('{"settings": {}}', "missing 6 required positional arguments"),
        ('{"model_source": "x"}', "Run has no field 'model_source'"),
        (
            '{"results": [{"rows": [{"task": "a", "cache": "b", "identical": 1}]}]}',
            "Row has no field 'identical'",
        ),
    ],
)
def test_a_file_of_something_else_is_refused_by_name(
    content: str | None, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "results.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=reason) as caught:
        report.read(path)
    assert str(path) in str(caught.value)


@pytest.mark.usefixtures("_without_pictures")
def test_a_run_folder_holds_config_results_answers_and_reports(tmp_path: Path) -> None:
    run = few_rows()
    report.write(run, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.yaml",
        "predictions.jsonl",
        "report.html",
        "report.md",
        "results.json",
    }
    assert yaml.safe_load((tmp_path / "config.yaml").read_text(encoding="utf-8")) == run.settings
    lines = (tmp_path / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[0]) == dataclasses.asdict(run.predictions[0])


def _markdown(run: Run) -> str:
    return markdown(run, [])


def test_the_report_states_subject_table_rule_meanings_memory_settings_and_machine() -> None:
    run = dataclasses.replace(full_run(), rows=[DEFAULT, OTHER])
    text = _markdown(run)
    for line in (
        "- **model**: SmolLM2-135M-Instruct.Q8_0.gguf",
        "| paged-int4 | what paged-int4 is |",
        "### summarization, 24 samples",
        DIFFERENCE_RULE,
        f"| {' | '.join(OTHERS)} |",
        "19.7 \\[16.5, 22.9\\] | -0.34 \\[-0.90, +0.20\\] noise |",
        "40.0 \\[39.0, 41.0\\]",
        "- **memory**: resident memory, sampled every 2 ms",
        "| dtype | float32 |",
        "| versions | torch 2.13.0 |",
        *(f"- **{column.heading.replace('/ ', '/')}**: " for column in COLUMNS),
    ):
        assert line in text


def test_the_report_shows_an_answer_of_each_task_and_alike_ones_once() -> None:
    text = _markdown(full_run())
    assert text.count("an answer to translation") == 1
    line = next(line for line in text.splitlines() if line.endswith("an answer to translation"))
    assert line.startswith("- **dynamic, static, quanto-int4,")
    assert "### translation, first" in text
    assert "### translation, second" not in text


def test_columns_that_say_nothing_of_a_task_are_left_out_of_its_report() -> None:
    headings = {
        task: next(
            line
            for line in _markdown(few_rows([task])).splitlines()
            if line.startswith("| cache | ") and "Δ" in line
        )
        for task in ("summarization", "perplexity")
    }
    assert "| same tokens % |" in headings["summarization"]
    assert "same tokens" not in headings["perplexity"]


def test_a_text_is_never_taken_for_markdown() -> None:
    text = _markdown(full_run())
    assert ATTACK not in text
    assert "\\<script\\>" in text
    assert "!\\[y\\]" in text
    heads = [
        len(line.replace("\\|", "").split("|")) for line in text.splitlines() if line.startswith("| ---")
    ]
    assert min(heads) > 3


def test_a_long_answer_is_cut_and_says_so() -> None:
    answer = Prediction("retrieval", "dynamic", "first", "word " * 1000, "", None)
    text = _markdown(dataclasses.replace(few_rows(), predictions=[answer]))
    assert "… (4399 more characters)" in text
    assert "- **reference**: (nothing)" in text


def test_without_a_run_to_speak_of_there_is_still_a_report() -> None:
    missing = Row("summarization", "dynamic", problem="no compiler")
    text = _markdown(dataclasses.replace(few_rows(), rows=[missing], predictions=[]))
    assert "| dynamic | not available |" in text
    assert "## Answers" not in text
