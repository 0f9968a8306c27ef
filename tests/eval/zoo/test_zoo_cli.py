"""The table, the files and the exit codes of `python -m eval zoo`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eval.zoo import checks, cli, kinds, reads, registry
from eval.zoo.checks import Verdict
from eval.zoo.cli import app
from eval.zoo.examine import RUNS, Options, Report, examine


@pytest.fixture
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def reports(entries: list[Any], options: Options, **_: Any) -> Iterator[Report]:
        return (examine(entry, options) for entry in entries)

    monkeypatch.setattr(cli, "reports_of", reports)


@pytest.mark.usefixtures("_in_this_process")
def test_a_run_of_two_types_prints_a_table_and_writes_both_files(tmp_path: Path) -> None:
    file = tmp_path / "zoo.json"
    arguments = ["--types", "rwkv,llama", "--formats", "int8", "--block-size", "32", "--attn", "eager"]
    result = CliRunner().invoke(app, [*arguments, "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert "2 types, 2 model classes: 1 blocks, 1 refused" in result.output
    assert "│ llama" in result.output

    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["settings"] == {"block_size": 32, "attention": "eager", "formats": ["int8"]}
    assert document["counts"] == {"blocks": 1, "refused": 1}
    llama, rwkv = document["types"]
    assert (llama["name"], llama["class_name"], llama["group"]) == ("llama", "LlamaForCausalLM", "blocks")
    assert llama["formats"] == {"auto": RUNS, "int8": RUNS}
    assert {name: verdict["status"] for name, verdict in llama["verdicts"].items()} == dict.fromkeys(
        ("plain", "padded", "second turn", "beams"), checks.EQUAL
    )
    assert rwkv["verdicts"]["plain"]["status"] == checks.REFUSED

    lines = (tmp_path / "SUPPORT.md").read_text(encoding="utf-8").splitlines()
    assert lines[2] == "**2 types, 2 model classes: 1 blocks, 1 refused.**"
    assert any("transformers 5." in line and "blocks of 32 tokens, eager" in line for line in lines)
    assert "| `llama` | `LlamaForCausalLM` | full | all | equal |" in lines
    assert any(line.startswith("| `rwkv` | `RwkvForCausalLM` | PagedCache cannot serve") for line in lines)


@pytest.mark.parametrize(
    ("verdict", "exit_code"),
    [
        (Verdict(checks.EQUAL, 0.0), 0),
        (Verdict(checks.DIFFERENT, 0.5, default=checks.EQUAL), 1),
        (Verdict(checks.FAILED, reason="oops", default=checks.EQUAL), 1),
        (Verdict(checks.FAILED, reason="oops", default=checks.FAILED), 0),
        (Verdict(checks.REFUSED, reason="no", default=checks.EQUAL), 0),
    ],
)
def test_a_wrong_type_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, verdict: Verdict, exit_code: int
) -> None:
    report = Report("llama", "llama", "LlamaForCausalLM", ("full",), reads.BLOCKS, {}, {"plain": verdict})
    monkeypatch.setattr(cli, "reports_of", lambda *_, **__: iter([report]))
    result = CliRunner().invoke(app, ["--types", "llama"])
    assert result.exit_code == exit_code, result.output


def test_a_kind_selects_the_types_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def reports(entries: list[Any], *_: Any, **__: Any) -> Iterator[Report]:
        seen.extend(entry.name for entry in entries)
        return iter(())

    monkeypatch.setattr(cli, "reports_of", reports)
    result = CliRunner().invoke(app, ["--kind", "chunked"])
    assert result.exit_code == 0, result.output
    assert seen == ["llama4", "llama4_text"]
    assert all("chunked" in kinds.of_entry(registry.entries()[name]) for name in seen)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--types", "lama"], "transformers registers no generative type 'lama'; did you mean: "),
        (["--types", " , "], "--types names no type; leave it away for all"),
        (["--kind", "round"], "unknown kind 'round'; choose from: chunked, conv, cross, full, "),
        (["--types", "llama", "--kind", "linear"], "none of the types has layers of kind 'linear'"),
        (["--formats", "int5"], "unknown format 'int5'; choose from: adaptive, auto, fp8, int4, "),
        (["--attn", "flash"], "unknown attention 'flash'; choose from: eager, sdpa"),
        (["--block-size", "24"], "block_size must be a power of two from 16 to 256, got 24"),
        (["--types", "llama", "--json", "/does/not/exist.json"], "cannot write the results to"),
    ],
)
def test_a_request_that_cannot_be_met_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1
