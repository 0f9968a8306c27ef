from __future__ import annotations

from typing import Any

import pytest

from eval.core.hardware import Device, Skip
from eval.core.isolation import Last
from eval.core.table import WrongAnswer
from eval.gpu import plan, worker
from eval.gpu.plan import Item, Record, Settings
from eval.gpu.worker import run_item, run_one
from tests.eval.gpu.gpu_items import crash, fine

# --- the time -----------------------------------------------------------------------------------------------


def test_a_phase_leaves_its_unused_time_to_those_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "PHASE_WEIGHTS", {plan.CORRECTNESS: 1.0, "attention": 1.0, "end to end": 2.0})
    settings, ends = Settings(), 1100.0
    assert plan.deadline(settings, plan.CORRECTNESS, ends, now=1000.0) == 1025.0
    assert plan.deadline(settings, "attention", ends, now=1010.0) == 1010.0 + 90.0 / 3
    assert plan.deadline(settings, "end to end", ends, now=1040.0) == ends
    assert plan.deadline(Settings(sections=("a",)), plan.CORRECTNESS, ends, now=1040.0) == ends


def test_no_time_is_left_after_the_end() -> None:
    assert plan.deadline(Settings(), plan.CORRECTNESS, ends=1000.0, now=1001.0) == 1001.0


def test_every_phase_has_a_share_of_the_time() -> None:
    phases = {section.phase for section in plan.SECTIONS.values()}
    assert set(plan.PHASE_WEIGHTS) == phases == set(plan.DRY_RUN_PHASE_WEIGHTS)


# --- one item -----------------------------------------------------------------------------------------------


def _run(function: Any, **fields: Any) -> Record:
    return run_item(Item("key", function, **fields), Device())


def test_an_item_without_checks_that_ends_is_ok() -> None:
    record = _run(lambda record, device: record.values.update(n=1))
    assert (record.status, record.values, record.is_failure) == ("ok", {"n": 1}, False)


def test_a_check_that_does_not_hold_is_wrong_and_says_why() -> None:
    record = _run(lambda record, device: record.bound("error", 2.0, 1.0))
    assert (record.status, record.reason, record.is_failure) == ("wrong", "error 2.00e+00, allowed 1", True)


def test_nan_keeps_no_bound() -> None:
    record = Record("key")
    assert not record.bound("error", float("nan"), 1.0)


def test_a_crash_keeps_what_was_found_before_it() -> None:
    def item(record: Record, device: Device) -> None:
        record.values["n"] = 1
        raise RuntimeError("illegal memory access")

    record = _run(item)
    assert (record.status, record.values, record.is_failure) == ("crashed", {"n": 1}, True)
    assert record.reason == "RuntimeError: illegal memory access"
    assert record.crash is not None
    assert "Traceback" in record.crash


def test_a_crash_of_somebody_elses_kernel_is_no_failure() -> None:
    record = _run(lambda record, device: 1 / 0, optional=True)
    assert (record.status, record.is_failure) == ("unavailable", False)


def test_a_failed_check_stays_a_failure_after_an_optional_crash() -> None:
    def item(record: Record, device: Device) -> None:
        record.check("answer", False)
        raise RuntimeError

    assert _run(item, optional=True).is_failure


def test_an_item_that_cannot_run_here_is_skipped_with_its_reason() -> None:
    def item(record: Record, device: Device) -> None:
        raise Skip("needs a GPU")

    record = _run(item)
    assert (record.status, record.reason, record.is_failure) == ("skipped", "needs a GPU", False)


def test_an_item_over_its_limit_is_stopped() -> None:
    def item(record: Record, device: Device) -> None:
        while True:
            pass

    record = _run(item, limit_s=0.05)
    assert (record.status, record.reason) == ("crashed", "TimeoutError: took longer than 0.05 s")


def test_a_wrong_answer_of_a_bench_is_wrong_and_no_crash() -> None:
    def item(record: Record, device: Device) -> None:
        raise WrongAnswer("RMS error ratio 1.0e+00, allowed 5e-03")

    record = _run(item)
    assert (record.status, record.rows) == ("wrong", [])
    assert "RMS error ratio" in record.reason


# --- in a process -------------------------------------------------------------------------------------------


class LostDevice(Device):
    def is_lost(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("function", "device", "is_last"),
    [(crash, Device(), False), (crash, LostDevice(), True), (fine, LostDevice(), False)],
)
def test_a_process_ends_with_the_item_that_makes_its_device_unusable(
    monkeypatch: pytest.MonkeyPatch, function: Any, device: Device, is_last: bool
) -> None:
    monkeypatch.setattr(worker, "_items", lambda letter, settings: {"x": Item("x", function)})
    monkeypatch.setattr(worker, "open_device", lambda dry_run: device)
    answer = run_one(Settings(), "a", "x")
    assert isinstance(answer, Last) == is_last
    record = answer.value if isinstance(answer, Last) else answer
    assert record.status == ("ok" if function is fine else "crashed")
