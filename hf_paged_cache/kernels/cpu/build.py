"""Compiles the kernel on first use with the system compiler, and keeps the result for later processes.

The library is kept in a per-user cache under a name that hashes the sources, the flags and the compiler's
version: when one of them changes another file is made, so an old file is never wrong. It is compiled to a
temporary name and moved into place: processes that compile at once replace each other's equal results.

Environment:
    CXX: The compiler; otherwise the first of `g++`, `c++`, `clang++`.
    HF_PAGED_CACHE_DIR: Where to keep compiled libraries; otherwise `$XDG_CACHE_HOME/hf_paged_cache` or
        `~/.cache/hf_paged_cache`.
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
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_SOURCE_DIR = Path(__file__).parent
_SOURCES = ("quantised.cpp", "attention.cpp", "records.cpp", "copy.cpp")  # the slowest to compile first
_COMMON_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=fast")
_COMPILE_TIMEOUT_S = 300

_ISA_NEEDS = {
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma", "f16c"},
    "avx2": {"avx2", "fma", "f16c"},
    "portable": set[str](),
}
"""CPU flags that each instruction set needs, best first."""

_ISA_FLAGS = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "portable": (),
}


class BuildError(Exception):
    """The kernel cannot be compiled or loaded here; the message is a sentence that says why."""


@dataclass(frozen=True)
class Library:
    """A loaded kernel.

    Attributes:
        handle: The loaded library.
        isa: `avx512`, `avx2` or `portable`.
    """

    handle: ctypes.CDLL
    isa: str


def load() -> Library:
    """Compile the kernel unless it is in the cache already, and load it.

    Raises:
        BuildError: No compiler works here, or `HF_PAGED_CACHE_CPU_ISA` names what this CPU lacks.
    """
    cpu_flags = _cpu_flags()
    isa = _choose_isa(cpu_flags)
    compiler = _find_compiler()
    version = _run([*compiler, "--version"])
    errors = []
    for flags in _candidate_flags(isa, cpu_flags, is_clang="clang" in version):
        command = [*compiler, *_COMMON_FLAGS, *flags]
        try:
            return Library(_cached(f"cpu-{isa}-{_digest(command, version)}.so", command), isa)
        except BuildError as error:
            errors.append(str(error))
    raise BuildError(errors[0])


def _cpu_flags() -> set[str]:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return set()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


def _choose_isa(cpu_flags: set[str]) -> str:
    possible = [isa for isa, needs in _ISA_NEEDS.items() if needs <= cpu_flags]
    forced = os.environ.get("HF_PAGED_CACHE_CPU_ISA")
    if not forced:
        return possible[0]
    if forced not in possible:
        raise BuildError(
            f"HF_PAGED_CACHE_CPU_ISA is {forced!r}, but this machine can run {', '.join(possible)}: "
            "unset it or name one of them."
        )
    return forced


def _candidate_flags(isa: str, cpu_flags: set[str], *, is_clang: bool) -> list[tuple[str, ...]]:
    """Sets of flags to try in order, from the fastest code to what every compiler takes."""
    flags = _ISA_FLAGS[isa]
    # clang's -fopenmp would bring a second thread pool beside torch's, which costs more than it gains.
    openmp = () if is_clang else ("-fopenmp",)
    # Not every CPU has these, and not every compiler: GCC has the former since 8, the latter since 10.
    extensions = {"avx512_vnni": "-mavx512vnni", "avx512_bf16": "-mavx512bf16"}
    more = [flag for name, flag in extensions.items() if isa == "avx512" and name in cpu_flags]
    candidates = [(*flags, *more[:count], *openmp) for count in range(len(more), -1, -1)]
    if openmp:
        candidates.append(flags)
    return candidates


def _find_compiler() -> list[str]:
    named = shlex.split(os.environ.get("CXX", ""))
    for candidate in [named] if named else [["g++"], ["c++"], ["clang++"]]:
        if shutil.which(candidate[0]):
            return candidate
    tried = f"CXX names {named[0]!r}, which is not there" if named else "g++, c++ and clang++ are not on PATH"
    raise BuildError(
        f"No C++ compiler: {tried}. Install one (e.g. `apt install g++`) for the fast CPU kernel."
    )


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_COMPILE_TIMEOUT_S,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"The compiler {command[0]!r} does not run: {error}.") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        why = next((line for line in lines if "error" in line), lines[-1] if lines else "no message")
        raise BuildError(f"The compiler {command[0]!r} failed with status {done.returncode}: {why.strip()}")
    return done.stdout


def _digest(command: list[str], version: str) -> str:
    digest = hashlib.sha256("\0".join([*command, version]).encode())
    for path in sorted([*_SOURCE_DIR.glob("*.h"), *_SOURCE_DIR.glob("*.cpp")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:20]


def cache_dir() -> Path:
    """The user's folder for what need not be made again; it may be missing.

    Raises:
        RuntimeError: The user has no home.
    """
    if named := os.environ.get("HF_PAGED_CACHE_DIR"):
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hf_paged_cache"


def _cached(name: str, command: list[str]) -> ctypes.CDLL:
    """Load `name` from the cache; compile it first when it is missing or does not load."""
    try:
        directory = cache_dir()
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / name
        if path.exists():
            with contextlib.suppress(OSError):  # a damaged file is compiled again
                return ctypes.CDLL(str(path))
        handle, temporary = tempfile.mkstemp(prefix=f"{name}.", suffix=".tmp", dir=directory)
    except (OSError, RuntimeError):  # no home, or nowhere to write
        return _uncached(name, command)
    os.close(handle)
    try:
        _compile(command, Path(temporary))
        os.replace(temporary, path)
        return ctypes.CDLL(str(path))
    except OSError:  # the disk is full, or libraries may not be run from there
        return _uncached(name, command)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _uncached(name: str, command: list[str]) -> ctypes.CDLL:
    """Compile for this process only. Once loaded the file is no longer needed."""
    with tempfile.TemporaryDirectory(prefix="hf_paged_cache-") as directory:
        path = Path(directory) / name
        _compile(command, path)
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            raise BuildError(f"The compiled kernel does not load: {error}.") from error


def _compile(command: list[str], path: Path) -> None:
    """Compile the sources side by side, and link them."""
    with tempfile.TemporaryDirectory(prefix="hf_paged_cache-") as directory:
        objects = [f"{directory}/{source}.o" for source in _SOURCES]

        def compile_one(source: str, to: str) -> None:
            _run([*command, "-c", str(_SOURCE_DIR / source), "-o", to])

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for done in [pool.submit(compile_one, *pair) for pair in zip(_SOURCES, objects, strict=True)]:
                done.result()
        _run([*command, *objects, "-o", str(path)])
    path.chmod(0o755)
