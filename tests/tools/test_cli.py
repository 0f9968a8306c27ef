"""`python -m hf_paged_cache`: what it prints, what it refuses, and with which exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, T5Config
from typer.testing import CliRunner

import hf_paged_cache
from hf_paged_cache import plan_memory
from hf_paged_cache.kernels import cpp, dispatch
from hf_paged_cache.tools import doctor
from hf_paged_cache.tools.cli import app

KERNELS = ("auto", "int8", "fp8", "k8v4", "int4", "int8_block", "int4_group")


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


# --- plan ---------------------------------------------------------------------------------------------------


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
        (lambda path: _file(path, '{"model_type": "nonsense"}'), "it is no config of a model type"),
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


def test_the_package_runs_as_a_module(folder: str) -> None:
    root = Path(hf_paged_cache.__file__).parent.parent
    command = [sys.executable, "-m", "hf_paged_cache", "plan", folder, "--context", "64"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert (done.returncode, done.stderr) == (0, "")
    assert "llama in bfloat16: 64 tokens" in done.stdout


# --- doctor -------------------------------------------------------------------------------------------------


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As in a new process: no kernel is loaded, no backend chosen, no variable set."""
    for name in ("CXX", "HF_PAGED_CACHE_BACKEND", "HF_PAGED_CACHE_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cpp, "_loaded", None)
    monkeypatch.setattr(dispatch, "_chosen", {})
    return monkeypatch


needs_compiler = pytest.mark.skipif(cpp.unavailable_reason() is not None, reason="no C++ compiler")


@needs_compiler
def test_doctor_says_healthy_and_what_runs(unloaded: pytest.MonkeyPatch) -> None:
    done = run("doctor")
    assert done.exit_code == 0
    for part in ("transformers", hf_paged_cache.__version__, "will run", cpp.isa(), "cache folder"):
        assert part in done.stdout
    assert done.stdout.count(" ok: ") == len(KERNELS) + 1
    assert done.stdout.endswith("healthy\n")


@needs_compiler
def test_doctor_prints_json(unloaded: pytest.MonkeyPatch) -> None:
    unloaded.setattr(doctor, "LAYER_DTYPES", ())
    data = json.loads(run("doctor", "--json").stdout)
    assert data["is_healthy"] is True
    assert data["backends"]["cpp"] == f"will run ({cpp.isa()})"
    assert data["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert [check["name"] for check in data["checks"]] == ["generate"]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"CXX": "/bin/false"},
            "'cpp' does not run here, and a slower one takes over: The compiler '/bin/false'",
        ),
        ({"CXX": "no-such-compiler"}, "CXX names 'no-such-compiler', which is not there"),
        ({"PATH": "/nowhere"}, "g++, c++ and clang++ are not on PATH"),
        ({"HF_PAGED_CACHE_CPU_ISA": "sse"}, "HF_PAGED_CACHE_CPU_ISA is 'sse', but this machine can run"),
        (
            {"CXX": "/bin/false", "HF_PAGED_CACHE_BACKEND": "cpp"},
            "HF_PAGED_CACHE_BACKEND asks for 'cpp', which cannot run here: The compiler '/bin/false'",
        ),
        ({"HF_PAGED_CACHE_BACKEND": "gpu"}, "HF_PAGED_CACHE_BACKEND must be one of cpp, triton, torch"),
    ],
    ids=str,
)
def test_doctor_reports_what_keeps_the_fast_kernel_from_running(
    unloaded: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for name, value in variables.items():
        unloaded.setenv(name, value)
    report = doctor.examine("cpu")
    assert not report.is_healthy
    assert any(message in problem for problem in report.problems)
    assert report.environment.items() >= {k: v for k, v in variables.items() if k != "PATH"}.items()
    assert "NOT HEALTHY" in str(report)
    if "HF_PAGED_CACHE_BACKEND" not in variables:  # slower, and right
        assert all(check.is_ok for check in report.checks)
        assert {check.detail.split(",")[0] for check in report.checks[:-1]} == {"torch"}


def test_doctor_exits_with_1_when_a_kernel_answers_wrongly(unloaded: pytest.MonkeyPatch) -> None:
    unloaded.setenv("HF_PAGED_CACHE_BACKEND", "torch")
    right = dispatch.decode
    unloaded.setattr(dispatch, "decode", lambda blocks, a: right(blocks, a) * 1.01)
    done = run("doctor")
    assert done.exit_code == 1
    assert "  - self-test int4: torch, error of write 0.0e+00, of attention 1.0e-02" in done.stdout


def test_a_slower_backend_that_was_asked_for_is_healthy(unloaded: pytest.MonkeyPatch) -> None:
    unloaded.setenv("HF_PAGED_CACHE_BACKEND", "torch")
    report = doctor.examine("cpu")
    assert report.is_healthy
    assert report.backends["torch"] == "will run"


def test_doctor_reports_a_folder_that_cannot_be_used(unloaded: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    unloaded.setenv("HF_PAGED_CACHE_BACKEND", "torch")  # nothing is compiled for this
    unloaded.setenv("CXX", "/bin/false")
    unloaded.setenv("HF_PAGED_CACHE_DIR", str(tmp_path / "file" / "below"))
    report = doctor.examine("cpu")
    assert not report.is_healthy
    assert [problem for problem in report.problems if "cannot be used (Not a directory)" in problem]
