from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_paged_cache.kernels import cpp
from hf_paged_cache.kernels.cpp import build

PROGRAM = """
import torch
from hf_paged_cache.kernels import cpp
from hf_paged_cache.kernels.call import Attention, LayerBlocks

assert cpp.unavailable_reason() is None, cpp.unavailable_reason()
blocks = LayerBlocks(torch.ones(1, 1, 16, 8), torch.ones(1, 1, 16, 8), torch.zeros(1, 1, dtype=torch.int32))
assert cpp.decode(blocks, Attention(torch.ones(1, 1, 1, 8), 0, 16, 1.0))[0].tolist() == [[[[1.0] * 8]]]
mapped = {line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line}
print(cpp.isa(), len(mapped))
"""

needs_compiler = pytest.mark.skipif(
    cpp.unavailable_reason() is not None, reason=str(cpp.unavailable_reason())
)


@needs_compiler
@pytest.mark.full  # two processes that import torch
def test_processes_that_compile_at_once_leave_one_good_library(tmp_path: Path) -> None:
    settings = {"DIR": str(tmp_path), "CPU_ISA": "portable", "CXXFLAGS": "-O0"}  # which compiles sooner
    environment = {**os.environ, **{f"HF_PAGED_CACHE_{name}": value for name, value in settings.items()}}
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


@needs_compiler
@pytest.mark.usefixtures("tiny_source", "fresh")
def test_arguments_of_the_compiler_and_more_flags_are_used_and_mean_another_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = build.load()
    monkeypatch.setenv("HF_PAGED_CACHE_CXXFLAGS", "-DANSWER=7 '-DTWO=\"a b\"'")
    more = build.load()
    monkeypatch.setenv("HF_PAGED_CACHE_CXXFLAGS", "")
    monkeypatch.setenv("CXX", f"{shlex.join(build.find_compiler()[0])} -DANSWER=8")
    argument = build.load()
    assert [kernel.handle.answer() for kernel in (plain, more, argument)] == [42, 7, 8]
    assert len({kernel.stem for kernel in (plain, more, argument)}) == 3


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"PATH": "/nowhere", "CXX": ""}, ["No C++ compiler", "g++", "Install"]),
        ({"CXX": "g++ 'one"}, ["CXX", "no command line", "No closing quotation"]),
        ({"CXX": "''"}, ["No C++ compiler", "CXX"]),
        ({"CXX": "/"}, ["No C++ compiler", "CXX"]),
        ({"HF_PAGED_CACHE_CXXFLAGS": '"'}, ["HF_PAGED_CACHE_CXXFLAGS", "no command line"]),
        ({"HF_PAGED_CACHE_CXXFLAGS": "--no-such-flag"}, ["failed with status 1", "--no-such-flag"]),
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
    reason = cpp.unavailable_reason()
    assert reason is not None
    assert [word for word in words if word not in reason] == [], reason
    assert reason.endswith((".", ":")) or "status" in reason
    assert cpp.unavailable_reason() == reason
    assert list(fresh.iterdir()) == []


SCRIPTS = {
    "fails": ('echo "x.h:1: error: no such luck" >&2; exit 4', ["status 4: x.h:1: error: no such luck"]),
    "writes nothing": ("exit 0", ["cannot be compiled", "No such file"]),
    "writes garbage": (
        'while [ "$1" != -o ]; do shift; done; echo garbage > "$2"',
        ["does not load", "file too short"],
    ),
    "prints garbage": (r"printf '\377\376 error \377'; exit 1", ["failed with status 1", "error"]),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_compiler_that_does_not_compile_is_quoted_and_leaves_nothing(
    name: str, fresh: Path, temporary: Path, compiler_script: Callable[[str], None]
) -> None:
    script, words = SCRIPTS[name]
    compiler_script(script)
    reason = cpp.unavailable_reason()
    assert reason is not None
    assert [word for word in words if word not in reason] == [], reason
    assert [*fresh.iterdir(), *temporary.iterdir()] == []


@needs_compiler
@pytest.mark.usefixtures("tiny_source")
def test_a_library_without_a_function_of_the_kernel_is_neither_used_nor_kept(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_EXPORTS", ("answer", "paged_decode"))
    assert "no function paged_decode" in str(cpp.unavailable_reason())
    assert list(fresh.iterdir()) == []


@pytest.fixture
def compiler_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a shell script the compiler; it answers when it is asked for its version."""

    def make(body: str) -> None:
        path = tmp_path / "c++"
        path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\n{body}\n')
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))

    return make


@pytest.fixture
def started(tmp_path: Path, compiler_script: Callable[[str], None]) -> Callable[[], list[int]]:
    """A compiler that hangs: a driver, and a part of it that goes on by itself where only that is killed.

    Returns:
        Gives the processes of such parts so far.
    """
    pids = tmp_path / "pids"
    pids.mkdir()
    compiler_script(f'sleep 600 & : > "{pids}/$!"; wait')
    return lambda: [int(path.name) for path in pids.iterdir()]


def assert_ended(pids: list[int]) -> None:
    assert pids
    for _ in range(200):
        if not any(map(goes_on, pids)):
            return
        time.sleep(0.01)
    raise AssertionError(f"of {pids} some go on")


def goes_on(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_a_compiler_that_hangs_is_ended_with_what_it_has_started(
    fresh: Path, temporary: Path, started: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_COMPILE_TIMEOUT_S", 0.5)
    assert "has not finished after" in str(cpp.unavailable_reason())
    assert_ended(started())
    assert [*fresh.iterdir(), *temporary.iterdir()] == []


def test_a_version_that_never_comes_is_not_waited_for(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = fresh / "c++"
    script.write_text("#!/bin/sh\nsleep 600\n")  # the script ends, what holds its pipe would not
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(build, "_VERSION_TIMEOUT_S", 0.2)
    assert "has not said its version" in str(cpp.unavailable_reason())


def test_a_compiler_that_fails_is_not_waited_for_behind_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    commands = [["sh", "-c", script] for script in ("sleep 60", "echo x.h: error: no such luck; exit 3")]
    with pytest.raises(build.BuildError, match=r"status 3: x\.h: error: no such luck"):
        build._run(commands, "finished", 30)


def test_what_a_compiler_leaves_behind_is_not_waited_for() -> None:
    assert build._run([["sh", "-c", "sleep 30 & echo done"]], "finished", 5) == "done\n"


@needs_compiler
@pytest.mark.usefixtures("tiny_source")
def test_an_interrupt_ends_the_compilers_and_the_next_call_compiles(
    fresh: Path, temporary: Path, started: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(seconds: float) -> None:
        if started():
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(build.time, "sleep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cpp.unavailable_reason()
    assert_ended(started())
    assert [*fresh.iterdir(), *temporary.iterdir()] == []
    assert cpp._loaded is None

    monkeypatch.delenv("CXX")
    assert build.load().handle.answer() == 42


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


@pytest.mark.parametrize(("machine", "flags"), [("x86_64", {"avx2", "fma"}), ("aarch64", set())])
def test_flags_of_a_cpu_that_an_emulator_shows_are_not_those_of_the_machine(
    machine: str, flags: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    monkeypatch.setattr(Path, "read_text", lambda path: "flags\t\t: avx2 fma\n")
    assert build._cpu_flags() == flags


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
