from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from eval.core.hardware import TOY, Device
from eval.core.isolation import NO_TIME, Call, Outcome
from eval.core.timing import Contender, interleave
from eval.gpu import cases, cli, kernels, plan
from eval.gpu.plan import Item, Record, Settings
from eval.gpu.worker import run_item
from tests.eval.gpu.gpu_items import crash, fine
from tests.kernels import cases as tables

ROOT = Path(__file__).resolve().parents[3]
LIGHT = ("datasets", "pandas", "matplotlib", "pytest")
"""Packages that a bare GPU machine may lack."""

# --- the run as a whole -------------------------------------------------------------------------------------


def _check(tmp_path: Path, by_letter: dict[str, Any]) -> tuple[int, dict[str, Any], list[list[str]]]:
    """The exit code, the file, and what it held when each phase began, of a run that consists of these items.

    They run in this process, but for `None`, which kills the process that it would be run in, and a text,
    which is why it is skipped.
    """
    path = tmp_path / "out.json"
    held: list[list[str]] = []

    def items_of(letter: str, settings: Settings) -> list[Item]:
        if isinstance(by_letter[letter], Exception):
            raise by_letter[letter]
        return [Item(key, function) for key, function in by_letter[letter].items()]

    def run(settings: Settings, calls: Sequence[Call], deadline: float, jobs: int) -> Generator[Outcome]:
        document = json.loads(path.read_text())
        held.append([letter for letter, section in document["sections"].items() if section["records"]])
        for call in calls:
            _, letter, key = call.arguments
            function = by_letter[letter][key]
            if function is None:
                yield Outcome(call, problem="its process died with exit code 9", exit_code=9, log="no device")
            elif isinstance(function, str):
                yield Outcome(call, problem=function, is_skipped=True)
            else:
                yield Outcome(call, run_item(Item(key, function), Device()))

    settings = Settings(dry_run=True, backend="torch", sections=tuple(by_letter), budget_s=60.0)
    code = cli.check(settings, path, items_of=items_of, run=run)
    return code, json.loads(path.read_text()), held


def test_all_right_is_exit_code_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, document, _ = _check(tmp_path, {"c": {"decode/1x2": fine}})
    assert (code, document["finished"], document["exit_code"]) == (0, True, 0)
    assert document["environment"]["versions"]["torch"]
    assert "ALL RIGHT; 1 of 1 items ok" in capsys.readouterr().out


def test_a_section_that_crashes_does_not_keep_others_from_running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_letter = {
        "a": ImportError("no cases"),
        "b": {"x": fine},
        "c": {"y": crash},
        "d": {"eager/1x2": fine},
    }
    code, document, _ = _check(tmp_path, by_letter)
    assert code == document["exit_code"] == 1
    found = document["sections"]
    assert "ImportError: no cases" in found["a"]["crash"]
    assert [found[letter]["records"][0]["status"] for letter in "bcd"] == ["ok", "crashed", "ok"]
    assert "illegal memory access" in found["c"]["records"][0]["crash"]
    out = capsys.readouterr().out
    assert "section a crashed: ImportError: no cases" in out
    assert "CRASHED c:y: RuntimeError: illegal memory access" in out
    assert "2 FAILED" in out


def test_the_file_is_written_after_each_section(tmp_path: Path) -> None:
    _, document, held = _check(
        tmp_path, {"b": {"x": fine}, "c": {"decode/1x2": fine}, "d": {"eager/1x2": fine}}
    )
    assert held == [[], ["b"], ["b", "c"]]
    assert list(document["sections"]) == ["b", "c", "d"]
    assert all(section["seconds"] is not None for section in document["sections"].values())


def test_an_item_that_takes_its_process_down_has_crashed_and_one_without_time_is_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document, _ = _check(tmp_path, {"c": {"decode/1x2": None, "decode/1x4": NO_TIME, "x": fine}})
    assert code == 1
    crashed, skipped, _ = document["sections"]["c"]["records"]
    assert crashed["crash"] == "no device\nits process died with exit code 9"
    assert (skipped["status"], skipped["skipped"]) == ("skipped", NO_TIME)
    assert "1 FAILED; 1 of 3 items ok; 1 skipped" in capsys.readouterr().out


def test_a_run_that_is_broken_off_keeps_its_records_and_is_no_proof(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(record: Record, device: Device) -> None:
        raise KeyboardInterrupt

    code, document, _ = _check(tmp_path, {"c": {"decode/1x2": fine, "decode/1x4": interrupt}})
    assert (code, document["finished"]) == (1, False)
    assert [record["key"] for record in document["sections"]["c"]["records"]] == ["decode/1x2"]
    assert "BROKEN OFF" in capsys.readouterr().out


# --- the parts of section a, which decide what is right -----------------------------------------------------


def test_blocks_moved_to_the_end_of_a_pool_answer_the_same() -> None:
    problem = tables.build(tables.Case("null", nulls=((0, 1),), end=200, group=3))
    copied = cases.blocks_on(problem.blocks, torch.device("cpu"))
    assert copied.keys.stride() == problem.blocks.keys.stride()
    large = cases.at_the_end_of(copied, 40)
    assert large.keys.shape[0] == 40
    assert large.table.min() == -1
    record = Record("large")
    kernels.check_decode(record, Device(), problem, large)
    assert record.status == "ok", record.reason
    assert cases.whole_pool(large.keys[34:]).data_ptr() == large.keys[34:].data_ptr() - large.keys[0].nbytes


@pytest.mark.parametrize("x", [torch.arange(24.0).view(2, 3, 4)[:, 1:, ::2], torch.ones(3, 1).expand(3, 4)])
def test_a_moved_tensor_keeps_values_and_strides(x: torch.Tensor) -> None:
    copied = cases.moved(x, torch.device("cpu"))
    assert torch.equal(copied, x)
    assert copied.stride() == x.stride()
    assert copied.data_ptr() != x.data_ptr()


def test_memory_that_nobody_has_written_is_nan_while_poisoned() -> None:
    with Device().poisoned():
        assert torch.empty(1000).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("kernel", "key"),
    [
        ("decode", "decode/float32/65_tokens"),
        ("write", "write/float32/head_dim_64"),
        ("copy_blocks", "copy_blocks/float32/head_dim_64"),
        ("gather", "gather/float32/head_dim_64"),
    ],
)
def test_a_kernel_that_does_nothing_right_is_found_out(
    kernel: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_PAGED_CACHE_BACKEND", "torch")
    item = next(item for item in kernels.items(Settings(dry_run=True, seed=3)) if item.key == key)
    assert run_item(item, Device()).status == "ok"
    right = getattr(kernels.dispatch, kernel)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        if kernel in ("write", "copy_blocks"):
            return None
        if kernel == "gather":
            return tuple(x + 1 for x in right(*args, **kwargs))
        out = right(*args, **kwargs)
        return (out[0] * 1.01, out[1]) if isinstance(out, tuple) else out * 1.01

    monkeypatch.setattr(kernels.dispatch, kernel, wrong)
    assert run_item(item, Device()).status == "wrong"


def test_on_a_device_a_turn_takes_as_many_steps_as_can_be_timed_well() -> None:
    calls: list[str] = []
    timings = interleave(
        [Contender(name, lambda name=name: calls.append(name)) for name in "ab"],
        budget_s=0.0,
        min_rounds=3,
        steps=None,
        device=TOY,
    )
    assert {name: len(seconds) for name, seconds in timings.seconds.items()} == {"a": 3, "b": 3}
    changes = [name for index, name in enumerate(calls) if index == 0 or name != calls[index - 1]]
    assert changes == ["a", "b", "a", "b", "a", "b", "a", "b"]  # twice to see how long it takes; ab ba ab
    assert len(calls) == 4 + 2 * 3 * 200


# --- the command line ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sections", "a,x"], "--sections takes letters out of a, b, c, d, got 'a,x'"),
        (["--sections", ""], "--sections takes letters"),
        (["--budget-s", "5"], "--budget-s must be above 8"),
        (["--jobs", "0"], "--jobs must be a positive number of processes, got 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_request_that_makes_no_sense_is_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(cli.app, [])
    assert result.exit_code == 2
    assert "--dry-run" in result.stderr


def test_the_seed_is_the_clocks_unless_it_is_given() -> None:
    assert cli.settings_of(True, "a", None, 5, "torch", None).seed == 5
    drawn = [cli.settings_of(True, "a", None, None, "torch", None).seed for _ in range(2)]
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize("dry_run", [True, False])
def test_items_of_all_sections_have_keys_of_their_own(dry_run: bool) -> None:
    for letter in plan.SECTIONS:
        assert plan.items_of(letter, Settings(dry_run=dry_run))


def test_a_full_run_has_every_attention_case_in_every_dtype() -> None:
    keys = {item.key for item in plan.items_of("a", Settings())}
    for case in tables.CASES:
        for dtype in ("float32", "bfloat16", "float16"):
            assert f"decode/{dtype}/{case.name}" in keys


def test_cases_of_the_dry_run_exist() -> None:
    names = {case.name for case in tables.CASES}
    assert set(kernels.DRY_RUN_CASES) <= names


@pytest.mark.full  # a process that imports torch
def test_it_loads_nothing_that_a_bare_gpu_machine_may_lack() -> None:
    code = (
        "import sys, eval.gpu_check, eval.gpu.cli, eval.gpu.worker\n"
        "from eval.gpu import plan\nfrom eval.gpu.plan import Settings\n"
        "[plan.items_of(letter, Settings()) for letter in plan.SECTIONS]\n"
        f"print([name for name in {LIGHT!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


# --- dry runs -----------------------------------------------------------------------------------------------


def _dry_run(tmp_path: Path, command: list[str], *arguments: str) -> tuple[dict[str, Any], str]:
    environment = {key: value for key, value in os.environ.items() if key != "HF_PAGED_CACHE_BACKEND"}
    done = subprocess.run(
        [sys.executable, *command, "--dry-run", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment | {"OUT": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((tmp_path / "gpu_check.json").read_text()), done.stdout


@pytest.mark.full  # in a process of its own; what it does is seen below, and by other tests of `check`
def test_a_dry_run_of_attention_finds_the_torch_backend_right(tmp_path: Path) -> None:
    command = ["eval/gpu_check.py"]
    document, out = _dry_run(tmp_path, command, "--backend", "torch", "--sections", "c", "--seed", "3")
    assert document["finished"]
    assert {record["status"] for record in document["sections"]["c"]["records"]} <= {"ok", "skipped"}
    assert document["sections"]["c"]["counts"]["ok"] >= 2
    (result,) = document["results"]
    assert [(row["case"], row["kernel"]) for row in result["rows"][:3]] == [
        ("1x70", "blocks"),
        ("1x70", "masked"),
        ("1x70", "sdpa"),
    ]
    assert "seed 3" in out.splitlines()[0]
    assert "ALL RIGHT" in out


@pytest.mark.full  # some of them run above
def test_the_items_of_a_dry_run_find_the_torch_kernels_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_PAGED_CACHE_BACKEND", "torch")
    records = [run_item(item, TOY) for item in plan.items_of("a", Settings(dry_run=True, seed=3))]
    assert {record.key: record.reason for record in records if record.status != "ok"} == {}
    decoded = next(record for record in records if record.key == "decode/float32/gqa_5")
    assert decoded.values["backend"] == "torch"
    assert 0 < decoded.values["rms_ratio"] < 2e-6


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_dry_run_of_everything_finds_the_triton_backend_right(tmp_path: Path) -> None:
    document, _ = _dry_run(tmp_path, ["-m", "eval.gpu_check"], "--budget-s", "600")
    statuses = {
        f"{letter}:{record['key']}": record["status"]
        for letter, section in document["sections"].items()
        for record in section["records"]
    }
    assert set(statuses.values()) <= {"ok", "skipped", "unavailable"}
    assert statuses["a:large_pool/bfloat16/decode_write_gather_copy"] == "ok"
    assert statuses["b:compiled/float32/llama/greedy_ragged"] == "ok"
    assert statuses["d:paged_compiled/1x16"] == "ok"
