from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval.gpu import goals, table
from eval.gpu.items import NO_TIME, Record
from eval.gpu.report import Report
from eval.gpu.settings import Settings

# --- goals --------------------------------------------------------------------------------------------------


def _goal_states(letter: str, key: str, values: dict[str, Any], **fields: Any) -> dict[str, str]:
    found = goals.goals_of({letter: {key: Record(key, values=values, **fields)}}, (letter,))
    return {goal.what: goal.state for goal in found}


@pytest.mark.parametrize(
    ("values", "state"),
    [
        ({"graph_percent_of_copy": 85.0, "eager_percent_of_copy": 10.0}, "reached"),
        ({"graph_percent_of_copy": 84.9}, "missed"),
        ({"eager_percent_of_copy": 86.0}, "reached"),
        ({"graph_percent_of_copy": float("nan")}, "missed"),
        ({}, "not measured"),
    ],
    ids=str,
)
def test_the_goal_of_decoding_is_that_of_the_kernels_alone(values: dict[str, float], state: str) -> None:
    states = _goal_states("c", "decode/8x8192", values)
    assert len(states) == 6
    assert states["decode, batch 8, 8192 tokens, % of copy bandwidth"] == state
    assert states["decode, batch 32, 8192 tokens, % of copy bandwidth"] == "not measured"


@pytest.mark.parametrize(("speedup", "state"), [(2.0, "reached"), (1.99, "missed"), (None, "not measured")])
def test_the_goal_end_to_end_is_twice_the_dynamic_cache(speedup: float | None, state: str) -> None:
    states = _goal_states("d", "eager/8x32768", {"paged_over_dynamic": speedup})
    assert states["end to end, batch 8, 32768 tokens, x DynamicCache"] == state


def test_a_goal_that_was_not_measured_says_why() -> None:
    (goal, *_) = goals.goals_of({"c": {"decode/8x8192": Record("decode/8x8192", skipped=NO_TIME)}}, ("c",))
    assert str(goal).endswith("% of copy bandwidth (skipped: no time)")


def test_missed_goals_do_not_decide_the_exit_code(tmp_path: Path) -> None:
    report = Report(Settings(sections=("c",)), tmp_path / "out.json", finished=True)
    report.add("c", Record("decode/8x8192", values={"graph_percent_of_copy": 1.0}))
    assert report.goals()[0].state == "missed"
    assert report.exit_code == 0


# --- what is written ----------------------------------------------------------------------------------------


def _report(tmp_path: Path, letter: str, *records: Record) -> Report:
    report = Report(Settings(sections=(letter,), seed=7), tmp_path / "out.json", finished=True)
    for record in records:
        report.add(letter, record)
    return report


def test_the_file_is_json_even_where_an_error_is_infinite(tmp_path: Path) -> None:
    report = _report(tmp_path, "a", Record("decode/float32/x", values={"rms_ratio": float("inf")}))
    report.write()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    document = json.loads(report.path.read_text(), parse_constant=refuse)
    assert document["sections"]["a"]["records"][0]["values"] == {"rms_ratio": "inf"}


def test_the_table_names_the_worst_case_of_each_kernel_and_dtype(tmp_path: Path) -> None:
    text = table.text_of(
        _report(
            tmp_path,
            "a",
            Record("decode/float32/gqa_8", values={"rms_ratio": 2e-7}),
            Record("decode/float32/gqa_5", values={"rms_ratio": 3e-7}),
            Record("decode/bfloat16/gqa_5", values={"rms_ratio": 1e-3}),
            Record("write/float32/head_dim_64", values={"rms_ratio": 0.0}),
            Record("write/bfloat16/head_dim_64", crash="RuntimeError: no"),
        )
    )
    lines = [line.split() for line in text.splitlines()]
    assert ["decode", "3.0e-07", "gqa_5", "1.0e-03", "gqa_5", "-"] in lines
    assert ["write", "exact", "(1)", "1", "crashed", "-"] in lines
    assert "CRASHED a:write/bfloat16/head_dim_64: RuntimeError: no" in text


def test_the_table_shows_decoding_beside_the_copy(tmp_path: Path) -> None:
    values = {
        "eager_us": 70.0, "masked_us": 75.0,
        "graph_us": 60.04, "graph_gb_per_s": 4000.0, "graph_percent_of_copy": 93.0,
        "eager_percent_of_copy": 80.0, "sdpa_us": 90.0, "copy_gb_per_s": 4300.0, "rms_ratio": 1e-3,
    }  # fmt: skip
    launches = Record("launches/8x8192", values={"launches": 2, "kernels": ["write", "attend"]})
    text = table.text_of(_report(tmp_path, "c", Record("decode/8x8192", values=values), launches))
    assert ["8x8192", "70.0", "75.0", "60.0", "4000", "93.0", "80.0", "90.0", "4300", "1.0e-03"] in [
        line.split() for line in text.splitlines()
    ]
    assert "2 launches per layer: write, attend" in text
    assert "goal reached       decode, batch 8, 8192 tokens, % of copy bandwidth: 93, goal 85" in text


def test_the_table_compares_caches_with_the_dynamic_one(tmp_path: Path) -> None:
    def speed(tokens_per_s: float) -> dict[str, Any]:
        return {"step_ms": 1.0, "tokens_per_s": tokens_per_s, "peak_gib": 50.25}

    text = table.text_of(
        _report(
            tmp_path,
            "d",
            Record("eager/8x32768", values={"dynamic": speed(100.0), "paged": speed(250.0)}),
            Record("static/8x32768", values={"static": speed(150.0)}),
        )
    )
    lines = [line.split() for line in text.splitlines()]
    assert ["8x32768", "paged", "1.00", "250.0", "50.2", "2.50"] in lines
    assert ["8x32768", "static", "1.00", "150.0", "50.2", "1.50"] in lines


def test_what_was_skipped_is_said_with_its_reason(tmp_path: Path) -> None:
    records = [Record(f"decode/float32/{n}", skipped=NO_TIME) for n in range(20)]
    text = table.text_of(_report(tmp_path, "a", *records))
    assert "skipped: no time: a:decode/float32/0, a:decode/float32/1" in text
    assert "and 8 more" in text
    assert "0 of 20 items ok; 20 skipped" in text


def test_columns_are_as_wide_as_their_longest_cell() -> None:
    assert table.aligned([["a", "bb"], ["ccc", "d"]]) == ["a    bb", "ccc   d"]
