"""No speed of kernels whose tests are red: runs those of the backend in use before anything is measured."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eval.bench import green

ROOT = Path(__file__).resolve().parents[2]
"""The checkout that this file is in."""
FOLDER = "tests/kernels"
FILES = {
    "cpp": ("test_cpp.py", "test_cpp_quantized.py", "test_prefill.py"),
    "triton": ("test_triton.py", "test_triton_quantized.py"),
    "torch": ("test_torch_kernels.py", "test_quantized.py", "test_prefill.py"),
    "reference": ("test_reference.py", "test_quantized.py"),
}
"""Backend -> the files in `FOLDER` that guard what it computes; beside `cpp`, torch computes prompts."""
NOT_IN_USE = {"torch": ("test_quantized and reference",), "reference": ("test_quantized and torch_kernels",)}
"""Backend -> tests in those files that are about another one."""
ISAS = ("avx512", "avx2", "portable")
_LAST_LINES = 3


class NotGreen(Exception):
    """The kernel tests fail, or cannot say that all is well; the message is one line with the way out."""


@dataclass(frozen=True)
class Selection:
    """Tests of one backend.

    Attributes:
        backend: which one.
        files: in `FOLDER`.
        left_out: expressions of `pytest -k` for tests that are not run.
    """

    backend: str
    files: tuple[str, ...]
    left_out: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """As pytest takes them."""
        without = " or ".join(f"({expression})" for expression in self.left_out)
        chosen = [f"{FOLDER}/{name}" for name in self.files]
        return ["-m", "not slow", *(["-k", f"not ({without})"] if without else []), *chosen]

    @property
    def name(self) -> str:
        """What a green run is noted under."""
        return f"{self.backend}-{'some' if self.left_out else 'all'}"


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

    def to_dict(self) -> dict[str, Any]:
        """As JSON writes it."""
        return asdict(self)

    def __str__(self) -> str:
        when = (
            f"on {self.finished}, nothing changed since" if self.from_earlier_run else f"{self.seconds:.0f} s"
        )
        return f"kernel tests ({self.backend}): {self.passed} passed, {self.skipped} skipped, {when}"


@dataclass
class _Count:
    """Events of a run so far."""

    collected: int = 0
    passed: int = 0
    skipped: int = 0
    failed: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


def select(backend: str, isa: str | None, quick: bool) -> Selection:
    """The tests of a backend; a quick run leaves out what is not in use on this machine."""
    unused = [other for other in ISAS if isa is not None and other != isa]
    return Selection(backend, FILES[backend], (*NOT_IN_USE.get(backend, ()), *unused) if quick else ())


def require_green(
    backend: str,
    isa: str | None = None,
    *,
    quick: bool = False,
    progress: Callable[[str], object] = lambda text: None,
    root: Path = ROOT,
) -> Outcome:
    """Run the kernel tests of a backend, unless they passed before and nothing changed since.

    Args:
        backend: the one in use.
        isa: instruction set of its kernels, where it has one.
        quick: only what is in use.
        progress: told how far they are.
        root: the checkout whose tests they are.

    Raises:
        NotGreen: a test failed, none ran, or they cannot be run from here.
    """
    _check_can_run(root)
    enough = [select(backend, isa, quick), select(backend, isa, quick=False)]
    for selection in enough:
        noted = green.recall(selection.name, green.digest(root, backend, selection.arguments))
        if noted is not None:
            return Outcome(**{**noted, "from_earlier_run": True})
    selection = enough[0]
    before = green.digest(root, backend, selection.arguments)
    outcome = _run(selection, progress, root)
    if green.digest(root, backend, selection.arguments) == before:  # nobody edited meanwhile
        green.note(selection.name, before, outcome.to_dict())
    return outcome


def _check_can_run(root: Path) -> None:
    if not (root / FOLDER).is_dir():
        raise NotGreen(
            f"there is no {FOLDER} in {root}; run from a checkout of the project, which has the tests"
        )
    if importlib.util.find_spec("pytest") is None:
        raise NotGreen("pytest is not installed; in a checkout, `pip install -e '.[dev]'` brings it")
    import hf_paged_cache

    measured = Path(hf_paged_cache.__file__).resolve().parent
    if root == ROOT and measured.parent != root:
        raise NotGreen(f"the package is {measured}, and the tests are those of {root}; run from {root}")


def _run(selection: Selection, progress: Callable[[str], object], root: Path) -> Outcome:
    started_s = time.perf_counter()
    count = _Count()
    command = _command(selection.arguments)
    with subprocess.Popen(
        command, cwd=root, env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            for done in _follow(process, count):
                progress(f"kernel tests ({selection.backend}): {done} of {count.collected}")
        except BaseException:
            process.kill()
            raise
    _judge(selection, count, process.returncode, root)
    return Outcome(
        selection.backend,
        [f"{FOLDER}/{name}" for name in selection.files],
        list(selection.left_out),
        count.passed,
        count.skipped,
        round(time.perf_counter() - started_s, 1),
        datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _command(arguments: list[str]) -> list[str]:
    plugin = ["-p", "eval.bench.pytest_events", "--capture=sys", "-p", "no:cacheprovider"]
    return [sys.executable, "-m", "pytest", "-x", "-o", "addopts=", *plugin, *arguments]


def _environment() -> dict[str, str]:
    """The user's, without what would choose other tests or other plugins."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **inherited,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        # With tensors so small, threads that wait actively on a busy machine take ten times as long.
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def _follow(process: subprocess.Popen[str], count: _Count) -> Iterator[int]:
    """Count what the tests say; yields how many are done."""
    assert process.stderr is not None
    for line in process.stderr:
        try:
            ((event, value),) = json.loads(line).items()
        except (ValueError, AttributeError):  # not one of ours
            count.said = [*count.said, line.strip()][-_LAST_LINES:]
            continue
        if event == "collected":
            count.collected = value
        elif event == "failed":
            count.failed.append(value)
        else:
            setattr(count, event, getattr(count, event) + 1)
        yield count.passed + count.skipped


def _judge(selection: Selection, count: _Count, status: int, root: Path) -> None:
    if count.failed:
        again = shlex.join(["python", "-m", "pytest", count.failed[0]])
        raise NotGreen(f"{count.failed[0]} fails; see it with (in {root}): {again}")
    if status not in (0, 5):  # 5: no tests
        again = shlex.join(["python", "-m", "pytest", *selection.arguments])
        said = " / ".join(filter(None, count.said)) or "no message"
        raise NotGreen(f"pytest ended with status {status} ({said}); see it with (in {root}): {again}")
    if count.passed == 0:
        raise NotGreen(
            f"no kernel test of backend {selection.backend!r} ran ({count.skipped} skipped) of "
            f"{', '.join(selection.files)} in {root / FOLDER}; run from a full checkout of the project"
        )
