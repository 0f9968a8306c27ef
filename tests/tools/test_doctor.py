"""`python -m hf_paged_cache doctor`: what it finds on a machine, and what it says of that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import hf_paged_cache
from hf_paged_cache.kernels import cpp, dispatch
from hf_paged_cache.tools import doctor
from hf_paged_cache.tools.cli import app

KERNELS = ("auto", "int8", "fp8", "k8v4", "int4", "int8_block", "int4_group")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


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
    unloaded.setattr(dispatch, "decode", lambda blocks, a: (right(blocks, a)[0] * 1.01, None))
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
