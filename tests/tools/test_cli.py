"""`python -m hf_paged_cache`: what it prints, what it refuses, and with which exit code."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, T5Config
from typer.testing import CliRunner

from hf_paged_cache import plan_memory
from hf_paged_cache.tools.cli import app


def small(**others: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=1000,
        max_position_embeddings=4096,
        **{"dtype": "bfloat16"} | others,
    )


@pytest.fixture
def folder(tmp_path: Path) -> str:
    small().save_pretrained(tmp_path)
    return str(tmp_path)


def run(*arguments: str) -> Any:
    """Several words in one string are several arguments."""
    return CliRunner().invoke(app, [word for argument in arguments for word in argument.split()])


def test_plan_prints_the_plan_of_a_folder_and_of_a_file(folder: str) -> None:
    want = plan_memory(small(), context=4096, batch=20, memory="1GiB", kv_cache_dtype="int4")
    for model in (folder, f"{folder}/config.json"):
        done = run("plan", model, "--context 4096 --batch 20 --memory 1GiB --kv-cache-dtype int4")
        assert (done.exit_code, done.stderr) == (0, "")
        assert done.stdout == f"{want}\n"
    assert "int4 fits" in done.stdout


def test_plan_prints_json(folder: str) -> None:
    done = run("plan", folder, "--context 100 --memory 1000000000 --weights float32 --json")
    data = json.loads(done.stdout)
    assert data == json.loads(plan_memory(small(), context=100, memory=10**9, weights="float32").to_json())
    assert data["formats"][0]["bytes_per_token"] == 2 * 4 * 2 * 64 * 2
    assert data["verdict"].startswith("auto fits")


def test_a_context_beyond_the_model_is_a_warning_and_no_error(folder: str) -> None:
    done = run("plan", folder, "--context", "5000")
    assert done.exit_code == 0
    assert done.stderr.startswith("warning: a context of 5,000 tokens is longer than the 4,096")
    assert done.stderr.count("\n") == 1


def test_nothing_fits_is_an_error_that_says_what_would(folder: str) -> None:
    done = run("plan", folder, "--context 4096 --batch 1000 --memory 50MiB")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: Nothing fits.")
    assert "What would: a batch of " in done.stderr
    assert "int4_group" in done.stdout
    assert run("plan", folder, "--context 4096 --batch 8 --memory 60MiB").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--batch 2", "--context is missing"),
        ("--context 32k", "--context must be a whole number, got '32k'"),
        ("--context 0", "context must be a positive number of tokens"),
        ("--context 64 --batch 1.5", "--batch must be a whole number, got '1.5'"),
        ("--context 64 --memory 24Gi", "units are B, KB, MB, GB"),
        ("--context 64 --kv-cache-dtype int2", "kv_cache_dtype must be one of auto, int8, fp8"),
        ("--context 64 --dtype int8", "dtype must be one of float32, bfloat16, float16"),
        ("--context 64 --weights tiny", "weights must be a number of bytes"),
        ("--context 64 --block-size 60", "block_size must be a power of two"),
    ],
)
def test_plan_refuses_bad_input_in_one_line(folder: str, arguments: str, message: str) -> None:
    done = run("plan", folder, arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert (done.stderr.count("\n"), done.stdout) == (1, "")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: "nobody/has-this-model", "no config of 'nobody/has-this-model'"),
        (lambda path: str(path), "Expected a hub id"),
        (lambda path: _file(path, "{"), "no config of"),
        (lambda path: _file(path, '{"model_type": "nonsense"}'), "model type `nonsense`"),
        (lambda path: _file(path, T5Config().to_json_string()), "'t5' is an encoder-decoder"),
    ],
    ids=["hub id", "empty folder", "broken file", "unknown type", "encoder-decoder"],
)
def test_plan_refuses_what_is_no_decoder_in_one_line(tmp_path: Path, make: Any, message: str) -> None:
    done = run("plan", make(tmp_path), "--context", "64")
    assert done.exit_code == 2
    assert message in done.stderr
    assert (done.stderr.count("\n"), done.stdout) == (1, "")


def _file(folder: Path, text: str) -> str:
    path = folder / "some.json"
    path.write_text(text)
    return str(path)


def test_the_package_runs_as_a_module(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hf_paged_cache", "plan", folder, "--context", "64"])
    with pytest.raises(SystemExit) as left:
        runpy.run_module("hf_paged_cache", run_name="__main__")
    out, error = capsys.readouterr()
    assert (left.value.code, error) == (0, "")
    assert "llama in bfloat16: 64 tokens" in out
