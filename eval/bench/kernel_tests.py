"""No speed of kernels whose tests are red: they run before anything is measured, unless nothing changed."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.core.isolation import Workers, tell

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[2]  # the checkout that this file is in
FOLDER = "tests/kernels"
# Backend -> the files in `FOLDER` that guard what it computes; beside `cpp`, torch computes prompts.
FILES = {
    "cpp": ("test_cpp.py", "test_cpp_quantized.py", "test_prefill.py"),
    "triton": ("test_triton.py", "test_triton_quantized.py"),
    "torch": ("test_torch_kernels.py", "test_quantized.py", "test_prefill.py"),
    "reference": ("test_reference.py", "test_quantized.py"),
}
# Tests in those files that are about another backend.
NOT_IN_USE = {"torch": ("test_quantized and reference",), "reference": ("test_quantized and torch_kernels",)}
ISAS = ("avx512", "avx2", "portable")
_LAST_LINES = 3

_FOLDERS = ("hf_paged_cache", "tests")
_FILES = ("pyproject.toml", "eval/bench/kernel_tests.py", "eval/core/isolation.py")
_PACKAGES = ("torch", "transformers", "triton", "numpy", "pytest", "hypothesis")
# Beginnings of the names of environment variables that choose a backend or how it computes.
_VARIABLES = (
    "HF_PAGED_CACHE_", "CXX", "TRITON_", "OMP_", "GOMP_", "MKL_", "ATEN_", "TORCH", "PYTORCH_", "PYTHON",
    "LD_",
)  # fmt: skip


class NotGreen(Exception):
    """The kernel tests fail, or cannot say that all is well; the message is one line with the way out."""


@dataclass(frozen=True)
class Selection:
    """Tests of one backend."""

    backend: str
    left_out: tuple[str, ...] = ()  # expressions of `pytest -k` for tests that are not run

    @property
    def files(self) -> list[str]:
        """Their files."""
        return [f"{FOLDER}/{name}" for name in FILES[self.backend]]

    @property
    def arguments(self) -> list[str]:
        """As pytest takes them."""
        without = " or ".join(f"({expression})" for expression in self.left_out)
        return ["-m", "not slow", *(["-k", f"not ({without})"] if without else []), *self.files]

    @property
    def note(self) -> Path:
        """Where a green run is noted."""
        from hf_paged_cache.kernels.cpp import library_folder

        which = "some" if self.left_out else "all"
        return library_folder.cache_dir() / f"kernel-tests-{self.backend}-{which}.json"


@dataclass(frozen=True)
class Outcome:
    """A green run: what ran, when, and whether it was an earlier one that still holds."""

    backend: str
    files: list[str]
    left_out: list[str]
    passed: int
    skipped: int
    seconds: float
    finished: str
    from_earlier_run: bool = False

    def __str__(self) -> str:
        earlier = f"on {self.finished}, nothing changed since"
        when = earlier if self.from_earlier_run else f"{self.seconds:.0f} s"
        return f"kernel tests ({self.backend}): {self.passed} passed, {self.skipped} skipped, {when}"


def select(backend: str, isa: str | None, quick: bool) -> Selection:
    """The tests of a backend; a quick run leaves out what is not in use on this machine."""
    unused = [other for other in ISAS if isa is not None and other != isa]
    return Selection(backend, (*NOT_IN_USE.get(backend, ()), *unused) if quick else ())


def require_green(
    backend: str,
    isa: str | None = None,
    *,
    quick: bool = False,
    progress: Callable[[str], object] = lambda text: None,
    root: Path = ROOT,
) -> Outcome:
    """Run the kernel tests of a backend, unless they passed and nothing changed since; or `NotGreen`."""
    _check_can_run(root)
    selection = select(backend, isa, quick)
    before = digest(root, selection)
    for enough in (selection, select(backend, isa, quick=False)):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # no note, a damaged one, no home
            noted = json.loads(enough.note.read_text(encoding="utf-8"))
            if noted["digest"] == digest(root, enough):
                return Outcome(**{**noted["outcome"], "from_earlier_run": True})
    outcome = _run(selection, progress, root)
    if digest(root, selection) == before:  # nobody edited meanwhile
        with contextlib.suppress(OSError):  # where nothing can be written, the tests run each time
            _write(selection.note, {"digest": before, "outcome": asdict(outcome)})
    return outcome


def _write(path: Path, content: dict[str, Any]) -> None:
    from hf_paged_cache.kernels.cpp import library_folder

    library_folder.make(path.parent)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(content, indent=1), encoding="utf-8")
    os.replace(draft, path)


def _check_can_run(root: Path) -> None:
    if not (root / FOLDER).is_dir():
        raise NotGreen(f"there is no {FOLDER} in {root}; run from a checkout of the project, with tests")
    if importlib.util.find_spec("pytest") is None:
        raise NotGreen("pytest is not installed; in a checkout, `pip install -e '.[dev]'` brings it")
    import hf_paged_cache

    measured = Path(hf_paged_cache.__file__).resolve().parent
    if root == ROOT and measured.parent != root:
        raise NotGreen(f"the package is {measured}, and the tests are those of {root}; run from {root}")


def _run(selection: Selection, progress: Callable[[str], object], root: Path) -> Outcome:
    found = defaultdict[str, list[Any]](list)

    def follow(event: tuple[str, Any]) -> None:
        found[event[0]].append(event[1])
        done = len(found["passed"]) + len(found["skipped"])
        progress(f"kernel tests ({selection.backend}): {done} of {sum(found['collected'])}")

    # With tensors so small, threads that wait actively on a busy machine take ten times as long.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "OMP_WAIT_POLICY": "PASSIVE"}
    workers = Workers(run_pytest, environment=environment, on_event=follow)
    done = workers.one(root, selection.arguments)
    again = f"see it with (in {root}): {shlex.join(['python', '-m', 'pytest', *selection.arguments])}"
    if found["failed"]:
        test = shlex.join(["python", "-m", "pytest", found["failed"][0]])
        raise NotGreen(f"{found['failed'][0]} fails; see it with (in {root}): {test}")
    status = done.exit_code if done.value is None else done.value
    if status not in (0, 5):  # 5: no tests
        last = " / ".join([line.strip() for line in done.log.splitlines() if line.strip()][-_LAST_LINES:])
        raise NotGreen(f"pytest ended with status {status} ({last or done.problem or 'no message'}); {again}")
    passed, skipped = len(found["passed"]), len(found["skipped"])
    if not passed:
        raise NotGreen(
            f"no kernel test of backend {selection.backend!r} ran ({skipped} skipped) of "
            f"{', '.join(FILES[selection.backend])} in {root / FOLDER}; "
            "run from a full checkout of the project"
        )
    chosen = selection.backend, selection.files, list(selection.left_out)
    finished = datetime.now(UTC).isoformat(timespec="seconds")
    return Outcome(*chosen, passed, skipped, round(done.seconds, 1), finished)


# --- what a green run saves ---------------------------------------------------------------------------------


def digest(root: Path, tests: Selection) -> str:
    """A name for all that the outcome of tests depends on: arguments, `facts`, all sources byte by byte."""
    total = hashlib.sha256(json.dumps([tests.arguments, facts(tests.backend)], sort_keys=True).encode())
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


def _library() -> str | None:
    """The name of the compiled kernel, which hashes its sources, flags and compiler."""
    from hf_paged_cache.kernels.cpp import build

    try:
        return build.load().stem
    except (build.BuildError, OSError):
        return None


# --- in a process of their own ------------------------------------------------------------------------------


def run_pytest(root: Path, arguments: list[str]) -> int:
    """Run tests of a checkout, without what the user's variables and plugins would add; the exit status."""
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.chdir(root)
    sys.path.insert(0, str(root))
    import pytest

    return int(pytest.main(["-x", "-o", "addopts=", "-p", "no:cacheprovider", *arguments], [_Events()]))


class _Events:
    """A plugin that tells how the tests go."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        tell(("collected", len(session.items)))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:  # a file that cannot be imported is a test that failed
            tell(("failed", report.nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:  # before or after the test counts too
            tell(("failed", report.nodeid))
        elif report.skipped or report.when == "call":
            tell((report.outcome, report.nodeid))
