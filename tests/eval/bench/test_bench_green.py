"""The bench asks the kernel tests first: here those of a stand-in project, in the folder of this test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eval.bench import kernel_tests, registry
from eval.bench.cli import app
from eval.bench.context import Bench
from eval.bench.kernel_tests import NotGreen, Outcome, require_green

GREEN = "def test_sum():\n    assert 1 + 1 == 2\n\n\ndef test_product():\n    assert 2 * 2 == 4\n"
RED = "def test_sum():\n    assert 1 + 1 == 3\n"
SKIPPED = "import pytest\n\n\ndef test_sum():\n    pytest.skip('not here')\n"
FACTS = {"versions": {"torch": "2.13"}, "variables": {}}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test's own, and facts that do not take seconds to find."""
    monkeypatch.setenv("HF_PAGED_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_tests, "facts", lambda backend: dict(FACTS))
    return tmp_path / "cache"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A checkout whose `reference` tests pass."""
    root = tmp_path / "project"
    (root / "tests/kernels").mkdir(parents=True)
    (root / "hf_paged_cache").mkdir()
    (root / "hf_paged_cache/kernel.cpp").write_text("int answer = 42;\n")
    (root / "tests/kernels/test_reference.py").write_text(GREEN)
    (root / "tests/kernels/test_quantized.py").write_text(GREEN)
    return root


def ask(root: Path, **options: Any) -> Outcome:
    return require_green("reference", root=root, **options)


# --- red ----------------------------------------------------------------------------------------------------


def test_green_tests_are_counted_and_followed(project: Path) -> None:
    said: list[str] = []
    outcome = ask(project, progress=said.append)
    assert (outcome.passed, outcome.skipped, outcome.from_earlier_run) == (4, 0, False)
    assert outcome.files == ["tests/kernels/test_reference.py", "tests/kernels/test_quantized.py"]
    assert said[0] == "kernel tests (reference): 0 of 4"
    assert said[-1] == "kernel tests (reference): 4 of 4"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (RED, r"^tests/kernels/test_quantized\.py::test_sum fails; see it with \(in .*\): python -m pytest "),
        ("import no_such_module\n", r"^tests/kernels/test_quantized\.py fails; see it with"),
        ("def test_broken(:\n", r"^tests/kernels/test_quantized\.py fails; see it with"),
        (
            "import pytest\n\n\n@pytest.fixture\ndef gone():\n    yield\n    raise OSError\n\n\n"
            "def test_end(gone):\n    pass\n",
            r"^tests/kernels/test_quantized\.py::test_end fails",
        ),
        ("import os\n\n\ndef test_crash():\n    os._exit(7)\n", r"pytest ended with status 7"),
    ],
    ids=["assertion", "import", "syntax", "teardown", "crash"],
)
def test_red_tests_are_refused_by_name_and_noted_nowhere(
    project: Path, own_cache: Path, content: str, message: str
) -> None:
    (project / "tests/kernels/test_quantized.py").write_text(content)
    with pytest.raises(NotGreen, match=message) as caught:
        ask(project)
    assert "\n" not in str(caught.value)
    assert not own_cache.exists()


def test_no_test_that_ran_is_as_bad_as_a_red_one(project: Path, own_cache: Path) -> None:
    for name in ("test_reference.py", "test_quantized.py"):
        (project / "tests/kernels" / name).write_text(SKIPPED)
    with pytest.raises(NotGreen, match=r"no kernel test of backend 'reference' ran \(2 skipped\)"):
        ask(project)
    for name in ("test_reference.py", "test_quantized.py"):
        (project / "tests/kernels" / name).write_text("")
    with pytest.raises(NotGreen, match=r"no kernel test of backend 'reference' ran \(0 skipped\)"):
        ask(project)
    assert not own_cache.exists()


def test_a_file_of_tests_that_is_missing_is_not_passed_over(project: Path) -> None:
    (project / "tests/kernels/test_quantized.py").unlink()
    with pytest.raises(NotGreen, match=r"pytest ended with status 4 \(.*test_quantized\.py"):
        ask(project)


def test_without_the_folder_or_pytest_the_message_says_where_to_run(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotGreen, match=r"there is no tests/kernels in .*; run from a checkout"):
        ask(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NotGreen, match="pytest is not installed"):
        ask(project)


def test_tests_of_another_package_than_the_one_measured_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_paged_cache.__file__", "/elsewhere/hf_paged_cache/__init__.py")
    with pytest.raises(
        NotGreen, match=r"the package is /elsewhere/hf_paged_cache, and the tests are those of"
    ):
        require_green("reference")


def test_options_of_the_user_choose_no_other_tests(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k product")
    assert ask(project).passed == 4


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[kernel_tests.Selection]:
    """The runs of tests, all green, of which none takes place."""
    started: list[kernel_tests.Selection] = []

    def run(selection: kernel_tests.Selection, progress: Any, root: Path) -> Outcome:
        started.append(selection)
        progress("")
        return Outcome(selection.backend, [], list(selection.left_out), 4, 0, 1.0, f"run {len(started)}")

    monkeypatch.setattr(kernel_tests, "_run", run)
    return started


# --- what a green run saves ---------------------------------------------------------------------------------


def change(root: Path, name: str, content: str) -> None:
    (root / name).write_text(content)


def test_while_nothing_changes_the_tests_do_not_run_again(
    project: Path, runs: list[kernel_tests.Selection]
) -> None:
    ask(project)
    (project / "tests/kernels/__pycache__").mkdir()
    change(project, "tests/kernels/__pycache__/test_reference.pyc", "compiled")
    again = ask(project)
    assert len(runs) == 1
    assert (again.from_earlier_run, again.passed, again.finished) == (True, 4, "run 1")
    assert str(again).endswith("4 passed, 0 skipped, on run 1, nothing changed since")


@pytest.mark.parametrize(
    "name",
    [
        "hf_paged_cache/kernel.cpp",
        "hf_paged_cache/new.py",
        "tests/kernels/test_reference.py",
        "tests/conftest.py",
        "pyproject.toml",
        "eval/bench/kernel_tests.py",
    ],
)
def test_any_changed_source_runs_the_tests_again(
    project: Path, runs: list[kernel_tests.Selection], name: str
) -> None:
    ask(project)
    (project / name).parent.mkdir(parents=True, exist_ok=True)
    change(project, name, "# changed")
    assert not ask(project).from_earlier_run
    assert ask(project).from_earlier_run
    (project / name).unlink()
    assert not ask(project).from_earlier_run


@pytest.mark.parametrize(
    "facts", [{**FACTS, "versions": {"torch": "2.14"}}, {**FACTS, "variables": {"CXX": "clang++"}}]
)
def test_other_versions_or_variables_run_the_tests_again(
    project: Path, runs: list[kernel_tests.Selection], monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any]
) -> None:
    ask(project)
    monkeypatch.setattr(kernel_tests, "facts", lambda backend: facts)
    assert not ask(project).from_earlier_run


def test_a_red_run_after_a_green_one_stays_red(project: Path) -> None:
    ask(project)
    change(project, "tests/kernels/test_reference.py", RED)
    for _ in range(2):
        with pytest.raises(NotGreen, match="test_reference"):
            ask(project)
    change(project, "tests/kernels/test_reference.py", GREEN)  # what was noted was this, byte by byte
    assert ask(project).from_earlier_run


def test_sources_that_change_during_the_run_leave_no_note(
    project: Path, runs: list[kernel_tests.Selection], own_cache: Path
) -> None:
    ask(project, progress=lambda text: change(project, "hf_paged_cache/kernel.cpp", "int answer = 43;"))
    assert not own_cache.exists()


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"digest": 1, "outcome": 2}', "\xff"])
def test_a_damaged_note_is_no_note(
    project: Path, runs: list[kernel_tests.Selection], own_cache: Path, content: str
) -> None:
    ask(project)
    (file,) = own_cache.iterdir()
    file.write_bytes(content.encode("latin-1"))
    assert not ask(project).from_earlier_run


def test_where_nothing_can_be_written_the_tests_run_each_time(
    project: Path, runs: list[kernel_tests.Selection], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_PAGED_CACHE_DIR", str(tmp_path / "file"))
    ask(project)
    ask(project)
    assert len(runs) == 2


def test_a_full_run_serves_a_quick_one_and_not_the_other_way_round(
    project: Path, runs: list[kernel_tests.Selection]
) -> None:
    assert ask(project, quick=True).left_out == ["test_quantized and torch_kernels"]
    assert not ask(project).from_earlier_run
    change(project, "hf_paged_cache/kernel.cpp", "")
    ask(project)
    quick = ask(project, quick=True)
    assert (quick.from_earlier_run, quick.left_out) == (True, [])


# --- which tests --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", kernel_tests.FILES)
def test_every_backend_has_tests_that_are_there(backend: str) -> None:
    from hf_paged_cache.kernels import dispatch

    assert backend in dispatch._BACKENDS
    assert all(
        (kernel_tests.ROOT / kernel_tests.FOLDER / name).is_file() for name in kernel_tests.FILES[backend]
    )
    assert kernel_tests.FILES.keys() == dispatch._BACKENDS.keys()


def test_a_quick_run_leaves_out_instruction_sets_that_are_not_in_use() -> None:
    assert kernel_tests.select("cpp", "avx2", quick=True).left_out == ("avx512", "portable")
    assert kernel_tests.select("cpp", "avx2", quick=False).left_out == ()
    arguments = kernel_tests.select("cpp", "avx512", quick=True).arguments
    assert arguments[arguments.index("-k") + 1] == "not ((avx2) or (portable))"


def test_the_instruction_sets_are_those_that_kernels_are_compiled_for() -> None:
    from hf_paged_cache.kernels.cpp import build

    assert tuple(build._ISA_NEEDS) == kernel_tests.ISAS


def test_facts_name_versions_the_compiled_library_and_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("HF_PAGED_CACHE_CPU_ISA", "portable")
    monkeypatch.setattr(kernel_tests, "_library", lambda: "cpu-portable-0123.so")
    facts = kernel_tests.facts("cpp")
    assert facts["library"] == "cpu-portable-0123.so"
    assert facts["variables"]["HF_PAGED_CACHE_CPU_ISA"] == "portable"
    assert facts["versions"]["pytest"] == pytest.__version__
    assert kernel_tests.facts("torch")["library"] is None
    json.dumps(facts)


# --- the command line ---------------------------------------------------------------------------------------


def test_the_bench_prints_no_number_while_tests_are_red(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def red(*args: Any, **kwargs: Any) -> Outcome:
        raise NotGreen("tests/kernels/test_cpp.py::test_a fails; see it with (in /x): python -m pytest …")

    def measured(context: Any) -> Any:
        raise AssertionError("measured")

    monkeypatch.setattr(kernel_tests, "require_green", red)
    monkeypatch.setattr("eval.bench.cli._backend", lambda: ("cpp", None))
    monkeypatch.setitem(registry.BENCHES, "blocks", Bench("blocks", "", (), measured))
    earlier = tmp_path / "bench.json"
    earlier.write_text("earlier results")
    result = CliRunner().invoke(app, ["--only", "blocks", "--json", str(earlier)])
    assert result.exit_code == 1
    assert result.stderr == (
        "the kernels are not known to be right, so no speed is reported: "
        "tests/kernels/test_cpp.py::test_a fails; see it with (in /x): python -m pytest …\n"
    )
    assert earlier.read_text() == "earlier results"
