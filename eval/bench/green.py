"""What the kernel tests last passed on: they need not run again while nothing that they depend on changed.

It loads quickly, as does `kernel_tests`: the process that runs the tests begins with both.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_FOLDERS = ("hf_paged_cache", "tests")
_FILES = ("pyproject.toml", "eval/bench/green.py", "eval/bench/kernel_tests.py", "eval/core/isolation.py")
_PACKAGES = ("torch", "transformers", "triton", "numpy", "pytest", "hypothesis")
_VARIABLES = (
    "HF_PAGED_CACHE_", "CXX", "TRITON_", "OMP_", "GOMP_", "MKL_", "ATEN_", "TORCH", "PYTORCH_", "PYTHON",
    "LD_",
)  # fmt: skip
"""Beginnings of the names of environment variables that choose a backend or how it computes."""


def digest(root: Path, backend: str, tests: Iterable[str]) -> str:
    """A name for all that the outcome of a backend's tests in a checkout depends on.

    The sources of the package and of its tests, byte by byte; the arguments that select tests; versions; the
    processor; the compiled library, whose name tells compiler and flags; threads and environment variables.
    """
    total = hashlib.sha256(json.dumps([list(tests), facts(backend)], sort_keys=True).encode())
    sources = [path for folder in _FOLDERS for path in (root / folder).rglob("*")]
    for path in sorted([*sources, *(root / name for name in _FILES)]):
        if not path.is_file() or "__pycache__" in path.parts:
            continue
        content = path.read_bytes()
        total.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode() + content)
    return total.hexdigest()


def facts(backend: str) -> dict[str, Any]:
    """What the tests depend on besides sources, ready for JSON."""
    import torch

    from eval.core.device import describe, package_version

    described = describe(torch.device("cpu"))
    return {
        **{key: described[key] for key in ("machine", "cpu", "cpu_count", "torch_threads")},
        "python": platform.python_version(),
        "versions": {package: package_version(package) for package in _PACKAGES},
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "library": _library() if backend == "cpp" else None,
        "variables": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_VARIABLES)},
    }


def recall(name: str, wanted: str) -> dict[str, Any] | None:
    """What was noted under a name, if it was noted with this digest; None otherwise."""
    try:
        noted = json.loads(_path(name).read_text(encoding="utf-8"))
        return dict(noted["outcome"]) if noted["digest"] == wanted else None
    except (OSError, ValueError, KeyError, TypeError):  # none, damaged, no home
        return None


def note(name: str, made: str, outcome: dict[str, Any]) -> None:
    """Note a green run in place of the last one of this name; where nothing can be written, do nothing."""
    from hf_paged_cache.kernels.cpp import library_folder

    with contextlib.suppress(OSError):
        path = _path(name)
        library_folder.make(path.parent)
        handle, temporary = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"digest": made, "outcome": outcome}, file, indent=1)
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)


def _path(name: str) -> Path:
    from hf_paged_cache.kernels.cpp import library_folder

    return library_folder.cache_dir() / f"kernel-tests-{name}.json"


def _library() -> str | None:
    """The name of the compiled kernel, which hashes its sources, flags and compiler."""
    from hf_paged_cache.kernels.cpp import build

    try:
        return build.load().stem
    except (build.BuildError, OSError):
        return None
