from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eval.cli import app


def _has_paged() -> bool:
    try:
        return bool(importlib.import_module("hf_paged_cache").PagedCache)
    except (ImportError, AttributeError):
        return False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--caches", "dynamic,fast"], "unknown cache 'fast'; choose from: dynamic, paged"),
        (["--tasks", "poetry"], "unknown task 'poetry'; choose from: summarization, translation"),
        (["--dtype", "int3"], "unknown dtype 'int3'; choose from: bfloat16, float16, float32"),
        (["--limit", "0"], "limit must be an integer of at least 1, got 0"),
        (["--device", "abacus"], "device 'abacus' cannot be used here"),
        (["--config", "/does/not/exist.yaml"], "cannot read the config file"),
        (["--model", "/does/not/exist", "--limit", "1"], "cannot load the model '/does/not/exist'"),
    ],
)
def test_a_request_that_cannot_be_met_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path)])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1


def test_an_unknown_option_is_exit_code_2() -> None:
    assert CliRunner().invoke(app, ["--colour", "red"]).exit_code == 2


def test_a_model_without_a_chat_template_is_refused(saved_model: Path, tmp_path: Path) -> None:
    for file in saved_model.glob("chat_template*"):
        file.unlink()
    result = CliRunner().invoke(
        app, ["--model", str(saved_model), "--limit", "1", "--output", str(tmp_path / "run")]
    )
    assert result.exit_code == 2
    assert "has no chat template" in result.stderr


def test_a_whole_run_prints_the_table_and_writes_its_folder(saved_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = f"--model {saved_model} --limit 3 --batch-size 2 --max-new-tokens 4 --output {folder}"
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code == 0, result.output
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    rows = {(row["task"], row["cache"]): row for row in results["rows"]}
    assert list(rows) == [
        ("summarization", "dynamic"),
        ("summarization", "paged"),
        ("translation", "dynamic"),
        ("translation", "paged"),
    ]
    for (_, cache), row in rows.items():
        if cache == "dynamic" or _has_paged():
            assert row["identical"] == 1.0
            assert row["kv_bytes"] > 0
        else:
            assert "cannot be imported" in row["problem"]
    assert results["environment"]["versions"]["torch"]
    report = (folder / "report.md").read_text(encoding="utf-8")
    table_lines = [
        line for line in result.output.splitlines() if line.startswith(("summarization", "translation"))
    ]
    assert len(table_lines) == 4
    assert all(line.split()[1] in report for line in table_lines)


@pytest.mark.slow
def test_the_bundled_model_runs_with_the_default_cache(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    folder = tmp_path / "run"
    arguments = f"--limit 2 --batch-size 2 --max-new-tokens 8 --tasks translation --output {folder}"
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code == 0, result.output
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    dynamic = results["rows"][0]
    assert dynamic["identical"] == 1.0
    # 30 layers, 3 kv heads, head_dim 64, float32.
    assert dynamic["kv_bytes"] % (2 * 30 * 3 * 64 * 4 * 2) == 0
    if _has_paged():
        assert results["rows"][1]["identical"] == 1.0
