from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_paged_cache.kernels import cpu
from hf_paged_cache.kernels.cpu import build

PROGRAM = """
import torch
from hf_paged_cache.kernels import cpu
from hf_paged_cache.kernels.problem import Attention, LayerBlocks

assert cpu.unavailable_reason() is None, cpu.unavailable_reason()
blocks = LayerBlocks(torch.ones(1, 1, 16, 8), torch.ones(1, 1, 16, 8), torch.zeros(1, 1, dtype=torch.int32))
assert cpu.decode(blocks, Attention(torch.ones(1, 1, 1, 8), 0, 16, 1.0)).tolist() == [[[[1.0] * 8]]]
mapped = {line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line}
print(cpu.isa(), len(mapped))
"""

needs_compiler = pytest.mark.skipif(
    cpu.unavailable_reason() is not None, reason=str(cpu.unavailable_reason())
)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A process that has loaded nothing yet, with an empty cache of its own."""
    monkeypatch.setattr(cpu, "_loaded", None)
    monkeypatch.setenv("HF_PAGED_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HF_PAGED_CACHE_CPU_ISA", "portable")
    return tmp_path


@needs_compiler
def test_processes_that_compile_at_once_leave_one_good_library(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_PAGED_CACHE_DIR": str(tmp_path), "HF_PAGED_CACHE_CPU_ISA": "portable"}
    command = [sys.executable, "-c", PROGRAM]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], answers
    names = [path.name for path in tmp_path.iterdir()]
    assert len(names) == 1, names
    assert names[0].startswith("cpu-portable-")
    assert names[0].endswith(".so")
    if sys.platform == "linux":
        # One OpenMP runtime: torch's own, not a second one with threads of its own.
        assert [out.split() for out, _ in answers] == [["portable", "1"]] * 2


@pytest.fixture
def tiny_source(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A kernel of one function, which compiles at once."""
    sources = tmp_path_factory.mktemp("sources")
    (sources / "attention.cpp").write_text(
        'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'
    )
    monkeypatch.setattr(build, "_SOURCE_DIR", sources)
    monkeypatch.setattr(build, "_SOURCES", ("attention.cpp",))


@needs_compiler
@pytest.mark.usefixtures("tiny_source")
def test_a_compiled_library_is_kept_and_a_damaged_one_is_compiled_again(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Path] = []
    compile_kernel = build._compile
    monkeypatch.setattr(
        build, "_compile", lambda command, path: (compiled.append(path), compile_kernel(command, path))
    )
    assert build.load().handle.answer() == 42
    assert build.load().handle.answer() == 42
    assert len(compiled) == 1
    (kept,) = fresh.iterdir()

    other = fresh / "other"  # a name once loaded is not read again, so the damaged file lies elsewhere
    other.mkdir()
    (other / kept.name).write_bytes(b"not a library")
    monkeypatch.setenv("HF_PAGED_CACHE_DIR", str(other))
    assert build.load().handle.answer() == 42
    assert len(compiled) == 2
    assert [path.name for path in other.iterdir()] == [kept.name]


@needs_compiler
@pytest.mark.usefixtures("tiny_source")
def test_a_cache_that_cannot_be_written_is_done_without(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fresh / "file").write_text("")
    monkeypatch.setenv("HF_PAGED_CACHE_DIR", str(fresh / "file" / "below"))
    assert build.load().handle.answer() == 42
    assert [path.name for path in fresh.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"PATH": "/nowhere", "CXX": ""}, ["No C++ compiler", "g++", "Install"]),
        ({"CXX": "/nowhere/c++ -m64"}, ["No C++ compiler", "CXX", "/nowhere/c++"]),
        ({"CXX": "false"}, ["'false'", "failed with status 1"]),
        ({"HF_PAGED_CACHE_CPU_ISA": "sse9"}, ["HF_PAGED_CACHE_CPU_ISA", "'sse9'", "portable"]),
    ],
)
def test_why_there_is_no_kernel_is_said_in_a_sentence(
    variables: dict[str, str], words: list[str], fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    reason = cpu.unavailable_reason()
    assert reason is not None
    assert [word for word in words if word not in reason] == [], reason
    assert reason.endswith((".", ":")) or "status" in reason
    assert cpu.unavailable_reason() == reason
    assert list(fresh.iterdir()) == []


def test_a_failing_compiler_is_quoted(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = fresh / "c++"
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "x.h:1: error: no such luck" >&2\nexit 4\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    assert "status 4: x.h:1: error: no such luck" in str(cpu.unavailable_reason())
    assert [path.name for path in fresh.iterdir()] == ["c++"]


@pytest.mark.parametrize(
    ("flags", "isa"),
    [
        (set(), "portable"),
        ({"avx2", "fma"}, "portable"),
        ({"avx2", "fma", "f16c"}, "avx2"),
        ({"avx2", "fma", "f16c", "avx512f"}, "avx2"),
        ({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"}, "avx512"),
    ],
)
def test_the_best_instruction_set_that_the_cpu_has_is_chosen(
    flags: set[str], isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_PAGED_CACHE_CPU_ISA", raising=False)
    assert build._choose_isa(flags) == isa


def test_another_source_flag_or_compiler_means_another_file() -> None:
    digests = {
        build._digest(["g++", "-O3"], "12.2"),
        build._digest(["g++", "-O3"], "13.1"),
        build._digest(["g++", "-O2"], "12.2"),
    }
    assert len(digests) == 3


def test_clang_is_not_given_an_openmp_of_its_own() -> None:
    assert all("-fopenmp" not in flags for flags in build._candidate_flags("avx2", set(), is_clang=True))
    assert "-fopenmp" in build._candidate_flags("avx2", set(), is_clang=False)[0]
