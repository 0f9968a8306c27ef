"""Compiles the kernel on first use with the system compiler, and keeps the result for later processes.

The library is kept in a per-user folder (`library_folder`) under a name that hashes the sources, the flags
and the compiler's version: when one of them changes another file is made, so an old file is never wrong.
Where the folder cannot be trusted, written, or run from, the library is compiled for this process only.

Environment:
    CXX: The compiler, with arguments if it needs some; otherwise the first of `g++`, `c++`, `clang++`.
    HF_PAGED_CACHE_CXXFLAGS: More flags for it, after all others.
    HF_PAGED_CACHE_DIR: Where to keep compiled libraries, an absolute path; otherwise
        `$XDG_CACHE_HOME/hf_paged_cache` or `~/.cache/hf_paged_cache`.
    HF_PAGED_CACHE_CPU_ISA: `avx512`, `avx2` or `portable`, in place of the best that this CPU has.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from .library_folder import LibraryFile, LibraryFolder, cache_dir, private_folder, reason_of, take_back

_SOURCE_DIR = Path(__file__).parent / "src"
_SOURCES = ("attend/decode.cpp", "attend/attend_records.cpp", "storage/tokens.cpp")
_COMMON_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=fast")
_EXPORTS = tuple(
    f"paged_{name}"
    for name in (
        *("decode", "write", "gather", "convert_blocks", "copy_blocks", "scratch_bytes"),
        *("bytes_of_blocks", "bytes_of_call", "bytes_of_tokens"),
    )
)
_NOT_KEPT = "The compiled kernel is not kept, so that every process compiles it anew"
_VERSION_TIMEOUT_S = 60
_COMPILE_TIMEOUT_S = 300

_ISA_NEEDS = {
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma", "f16c"},
    "avx2": {"avx2", "fma", "f16c"},
    "portable": set[str](),
}
"""CPU flags that each instruction set needs, best first."""


class BuildError(Exception):
    """The kernel cannot be compiled or loaded here; the message is a sentence that says why."""


@dataclass(frozen=True)
class Library:
    """A loaded kernel."""

    handle: ctypes.CDLL
    isa: str  # avx512, avx2 or portable
    stem: str  # what its file is called, without the digest of its bytes
    problems: tuple[str, ...] = ()  # sentences: why a kept file was not loaded, or this one is not kept


def load() -> Library:
    """Compile the kernel unless it is kept already, and load it.

    Raises:
        BuildError: No compiler works here, or `HF_PAGED_CACHE_CPU_ISA` names what this CPU lacks.
    """
    if os.name != "posix":
        raise BuildError("The C++ kernel is made for Linux and other POSIX systems.")
    cpu_flags = _cpu_flags()
    isa = _choose_isa(cpu_flags)
    compiler, version = find_compiler()
    named = _split_variable("HF_PAGED_CACHE_CXXFLAGS")
    problems: list[str] = []
    errors: list[str] = []
    with contextlib.ExitStack() as stack:
        folder = None
        try:
            path = cache_dir()
            if take_back(path):
                problems.append(
                    f"Other users could write to {path}: it was emptied, and is this user's alone now."
                )
            folder = stack.enter_context(LibraryFolder(path))
        except OSError as error:
            problems.append(f"{_NOT_KEPT}: {error}.")
        for flags in _candidate_flags(isa, cpu_flags, is_clang="clang" in version):
            command = [*compiler, *_COMMON_FLAGS, *flags, *named]
            stem = f"cpu-{isa}-{_digest(command, version)}"
            try:
                handle = None if folder is None else _load_kept(folder, stem, problems)
                if handle is None:
                    handle = _compile_and_load(folder, stem, command, problems)
            except BuildError as error:
                errors.append(str(error))
            else:
                return Library(handle, isa, stem, tuple(problems))
    raise BuildError(" ".join([errors[0], *problems]))


def find_compiler() -> tuple[list[str], str]:
    """The command of the compiler that is used, and what it says of its version.

    Raises:
        BuildError: There is none, or it does not run.
    """
    named = _split_variable("CXX")
    compilers = [named] if named else [["g++"], ["c++"], ["clang++"]]
    compiler = next((candidate for candidate in compilers if shutil.which(candidate[0])), None)
    if compiler is None:
        tried = "g++, c++ and clang++ are not on PATH"
        if named:
            tried = f"CXX names {named[0]!r}, which is not there"
        raise BuildError(
            f"No C++ compiler: {tried}. Install one (e.g. `apt install g++`) for the fast CPU kernel."
        )
    return compiler, _run([[*compiler, "--version"]], "said its version", _VERSION_TIMEOUT_S)


def _cpu_flags() -> set[str]:
    """Of an x86 CPU; where nothing tells them, none."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return set()  # an emulator may show the CPU of its host
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


def _choose_isa(cpu_flags: set[str]) -> str:
    possible = [isa for isa, needs in _ISA_NEEDS.items() if needs <= cpu_flags]
    forced = os.environ.get("HF_PAGED_CACHE_CPU_ISA") or possible[0]
    if forced not in possible:
        raise BuildError(
            f"HF_PAGED_CACHE_CPU_ISA is {forced!r}, but this machine can run {', '.join(possible)}: "
            "unset it or name one of them."
        )
    return forced


def _candidate_flags(isa: str, cpu_flags: set[str], *, is_clang: bool) -> list[tuple[str, ...]]:
    """Sets of flags to try in order, from the fastest code to what every compiler takes."""
    flags = tuple(f"-m{need}" for need in sorted(_ISA_NEEDS[isa]))
    # clang's -fopenmp would bring a second thread pool beside torch's, which costs more than it gains.
    openmp = () if is_clang else ("-fopenmp",)
    # Not every CPU has these, and not every compiler: GCC has the former since 8, the latter since 10.
    extensions = {"avx512_vnni": "-mavx512vnni", "avx512_bf16": "-mavx512bf16"}
    more = [flag for name, flag in extensions.items() if isa == "avx512" and name in cpu_flags]
    candidates = [(*flags, *more[:count], *openmp) for count in range(len(more), -1, -1)]
    return candidates if is_clang else [*candidates, flags]


def _split_variable(name: str) -> list[str]:
    try:
        return shlex.split(os.environ.get(name, ""))
    except ValueError as error:
        raise BuildError(f"{name} is {os.environ[name]!r}, which is no command line: {error}.") from error


def _digest(command: list[str], version: str) -> str:
    digest = hashlib.sha256("\0".join([*command, version, platform.machine()]).encode())
    for path in sorted([*_SOURCE_DIR.rglob("*.h"), *_SOURCE_DIR.rglob("*.cpp")]):
        digest.update(path.relative_to(_SOURCE_DIR).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:20]


def _load_kept(folder: LibraryFolder, stem: str, problems: list[str]) -> ctypes.CDLL | None:
    """The library that an earlier process has kept, None if there is none that is whole and loads here."""
    try:
        for library in folder.libraries(stem, problems):
            with contextlib.suppress(OSError):  # of a machine that shares this folder, and not its loader
                return _load_file(library)
    except OSError as error:
        problems.append(f"{folder.path} cannot be read: {reason_of(error)}.")
    return None


def _compile_and_load(
    folder: LibraryFolder | None, stem: str, command: list[str], problems: list[str]
) -> ctypes.CDLL:
    """Compile, keep the result where there is a folder for it, and load it, from there if that can be.

    Raises BuildError if nothing comes out, or what does not load.
    """
    kept: LibraryFile | None = None
    fault: OSError | None = None
    try:
        with private_folder() as private:
            path = private / f"{stem}.so"
            _compile(command, private, path)
            if folder is not None:
                try:
                    kept = folder.keep(stem, path)
                    return _load_file(kept)
                except OSError as error:
                    fault = error
            try:
                handle = _load_file(LibraryFile(path))
            except OSError as error:
                if folder is not None and kept is not None:
                    folder.remove(kept.path.name)
                raise BuildError(f"The compiled kernel does not load: {error}.") from error
    except OSError as error:
        raise BuildError(f"The kernel cannot be compiled: {error}.") from error
    if folder is not None and fault is not None:
        if kept is None:  # read only, or the disk is full
            problem = f"{_NOT_KEPT}: {folder.path}: {reason_of(fault)}."
        else:
            problem = (
                f"The compiled kernel loads, but not from {folder.path} ({reason_of(fault)}), so that every "
                "process compiles it anew: let HF_PAGED_CACHE_DIR name a folder on a disk that is mounted "
                "without `noexec`."
            )
        problems.append(problem)
    return handle


def _load_file(library: LibraryFile) -> ctypes.CDLL:
    """Load a library; raises OSError if that fails, or it lacks a function of the kernel."""
    handle = library.load()
    if missing := [name for name in _EXPORTS if not hasattr(handle, name)]:
        raise OSError(f"it has no function {missing[0]}")
    return handle


def _compile(command: list[str], folder: Path, path: Path) -> None:
    """Compile the sources side by side in a folder, and link them to `path`."""
    objects = {str(_SOURCE_DIR / source): str(folder / f"{Path(source).stem}.o") for source in _SOURCES}
    compiling = [[*command, "-c", source, "-o", to] for source, to in objects.items()]
    linking = [*command, *objects.values(), "-o", str(path)]
    for commands in (compiling, [linking]):
        _run(commands, "finished", _COMPILE_TIMEOUT_S, folder)
    path.chmod(0o755)  # whatever the umask


def _run(commands: list[list[str]], deed: str, timeout_s: float, folder: Path | None = None) -> str:
    """Run compilers, one for each CPU, and end them with all that they have started if one fails or is slow.

    Their temporary files go to a folder. Returns what the last of them to end has printed.
    """
    waiting, printed = [*commands], ""
    running: list[tuple[list[str], subprocess.Popen[str], IO[str], float]] = []
    with contextlib.ExitStack() as stack:
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                command, log = waiting.pop(0), stack.enter_context(_log())
                process = stack.enter_context(_started(command, log, folder))
                running.append((command, process, log, time.monotonic() + timeout_s))
            time.sleep(0.01)
            for run in [*running]:
                command, process, log, until = run
                if process.poll() is not None:
                    running.remove(run)
                    log.seek(0)
                    printed = log.read()
                    _check_status(process, command, printed)
                elif time.monotonic() > until:
                    raise BuildError(f"The compiler {command[0]!r} has not {deed} after {timeout_s} s.")
    return printed


def _check_status(process: subprocess.Popen[str], command: list[str], printed: str) -> None:
    if process.returncode != 0:
        lines = printed.strip().splitlines() or ["no message"]
        why = next((line for line in lines if "error" in line), lines[-1])
        raise BuildError(
            f"The compiler {command[0]!r} failed with status {process.returncode}: {why.strip()}"
        )


def _log() -> IO[str]:
    """For what a compiler says: no pipe, which a daemon of its could hold open, and no disk, if it can be."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("compiler"), "w+", encoding="utf-8", errors="replace")
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


@contextlib.contextmanager
def _started(command: list[str], log: IO[str], folder: Path | None) -> Iterator[subprocess.Popen[str]]:
    """A compiler at work. It ends with the context, and all that it has started."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            text=True,
            env={**os.environ, "LC_ALL": "C", **({"TMPDIR": str(folder)} if folder else {})},
            process_group=0,  # drivers such as g++ leave their parts running when they are killed
        )
    except (OSError, ValueError) as error:  # not executable, a null byte in its name
        raise BuildError(f"The compiler {command[0]!r} does not run: {error}.") from error
    with process:
        try:
            yield process
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
