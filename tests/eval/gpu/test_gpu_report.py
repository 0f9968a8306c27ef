from __future__ import annotations

import json
import os
import re
from pathlib import Path

from rich.console import Console

from eval.core.isolation import NO_TIME
from eval.core.table import Bound, Row
from eval.gpu.plan import Record, Settings
from eval.gpu.report import Report


def _report(tmp_path: Path, letter: str, *records: Record) -> Report:
    report = Report(Settings(sections=(letter,), seed=7), tmp_path / "out.json", finished=True)
    for record in records:
        report.add(letter, record)
    return report


def _shown(report: Report) -> str:
    """What is printed, with one space between cells."""
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    report.show(console)
    return re.sub(r"[ │]+", " ", console.export_text())


def test_the_file_is_json_even_where_an_error_is_infinite(tmp_path: Path) -> None:
    report = _report(tmp_path, "a", Record("decode/float32/x", values={"rms_ratio": float("inf")}))
    report.write()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    document = json.loads(report.path.read_text(), parse_constant=refuse)
    assert document["sections"]["a"]["records"][0]["values"] == {"rms_ratio": "inf"}


def test_the_table_names_the_worst_case_of_each_kernel_and_dtype(tmp_path: Path) -> None:
    text = _shown(
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
    assert "decode 3.0e-07 gqa_5 1.0e-03 gqa_5 " in text
    assert "write exact (1) 1 crashed " in text
    assert "CRASHED a:write/bfloat16/head_dim_64: RuntimeError: no" in text


def test_the_tables_of_benches_have_their_rows_and_what_is_required_of_them(tmp_path: Path) -> None:
    cells = {"case": "8x8192", "kernel": "graph", "us": 60.04, "gb_per_s": 4000.0, "error": 1e-3}
    missed = Row({**cells, "bandwidth_percent": 80.0}, (Bound("copy bandwidth", 80.0, 85.0, unit=" %"),))
    launches = Record("launches/8x8192", values={"launches": 2, "kernels": ["write", "attend"]})
    report = _report(tmp_path, "c", Record("decode/8x8192", rows=[missed]), launches)
    text = _shown(report)
    assert "8x8192 graph 60.0 4,000.0" in text
    assert "2 launches per layer: write, attend" in text
    assert "✗ kernels [8x8192, graph]: copy bandwidth is 80 %, required ≥ 85 %" in text
    assert report.exit_code == 0  # a number that is missed is reported, and nothing is wrong with it
    report.write()
    (result,) = json.loads(report.path.read_text())["results"]
    assert (result["bench"], result["rows"][0]["required"][0]["holds"]) == ("kernels", False)


def test_what_was_skipped_is_said_with_its_reason(tmp_path: Path) -> None:
    records = [Record(f"decode/float32/{n}", skipped=NO_TIME) for n in range(20)]
    text = _shown(_report(tmp_path, "a", *records))
    assert "skipped: no time: a:decode/float32/0, a:decode/float32/1" in text
    assert "and 8 more" in text
    assert "0 of 20 items ok; 20 skipped" in text
