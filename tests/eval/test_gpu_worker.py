from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from eval.gpu.device import Device

from eval.gpu import sections, supervisor
from eval.gpu.budget import RESERVE_S, Budget
from eval.gpu.items import NO_TIME, Item, Record, Skip
from eval.gpu.settings import Settings
from eval.gpu.supervisor import Supervisor, shares_of
from eval.gpu.worker import Job, run_item, work
from tests.eval.gpu_items import crash, fine

# --- the time -----------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_phase_leaves_its_unused_time_to_those_after_it() -> None:
    clock = Clock()
    budget = Budget(100.0 + RESERVE_S, {"a": 1.0, "b": 1.0, "c": 2.0}, clock)
    assert budget.deadline("a") == 1000.0 + 25.0
    clock.now_s += 10.0
    assert budget.deadline("b") == clock.now_s + 90.0 / 3
    clock.now_s += 30.0
    assert budget.deadline("c") == 1000.0 + 100.0


def test_no_time_is_left_after_the_end() -> None:
    clock = Clock()
    budget = Budget(60.0, {"a": 1.0}, clock)
    clock.now_s += 61.0
    assert budget.remaining_s() == 0.0
    assert budget.deadline("a") == clock.now_s


def test_a_budget_that_the_report_alone_takes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"budget_s must be above 8 s.*got 8"):
        Budget(8.0, {"a": 1.0})


def test_every_phase_has_a_share_of_the_time() -> None:
    phases = {section.phase for section in sections.SECTIONS.values()}
    assert set(sections.PHASE_WEIGHTS) == phases == set(sections.DRY_RUN_PHASE_WEIGHTS)


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


def test_a_record_survives_json() -> None:
    record = Record("key", values={"n": 1}, optional=True, seconds=2.0)
    record.bound("error", 2.0, 1.0)
    assert Record.from_dict(json.loads(json.dumps(record.to_dict()))) == record


# --- a worker -----------------------------------------------------------------------------------------------


class LostDevice(Device):
    def is_lost(self) -> bool:
        return True


def _work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, items: list[Item], device: Device, deadline: float
) -> tuple[int, list[dict[str, Any]]]:
    monkeypatch.setattr(sections, "items_of", lambda letter, settings: items)
    monkeypatch.setattr("eval.gpu.device.open_device", lambda settings: device)
    monkeypatch.setenv("HF_PAGED_CACHE_BACKEND", "")
    keys = tuple(item.key for item in items)
    job = Job(Settings(backend="torch"), "a", keys, deadline, tmp_path / "results")
    status = work(Job.from_json(job.to_json()))
    return status, [json.loads(line) for line in job.results.read_text().splitlines()]


def test_a_worker_goes_on_after_a_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    items = [Item("bad", crash), Item("good", fine)]
    status, lines = _work(monkeypatch, tmp_path, items, Device(), time.time() + 60)
    assert status == 0
    assert [line.get("begun") or line["done"]["status"] for line in lines] == ["bad", "crashed", "good", "ok"]


def test_a_worker_whose_device_is_lost_ends_after_noting_the_crash(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    items = [Item("bad", crash), Item("good", fine)]
    status, lines = _work(monkeypatch, tmp_path, items, LostDevice(), time.time() + 60)
    assert status == 3
    assert [line.get("begun") or line["done"]["status"] for line in lines] == ["bad", "crashed"]


def test_a_worker_begins_nothing_that_it_has_no_time_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    items = [Item("long", fine, needs_s=100.0), Item("short", fine)]
    _, lines = _work(monkeypatch, tmp_path, items, Device(), time.time() + 50)
    assert [line["done"]["skipped"] for line in lines if "done" in line] == [NO_TIME, None]


# --- the supervisor, with workers whose items do what their names say ---------------------------------------

FAKE_WORKER = """
import json, os, sys, time
job = json.load(open(sys.argv[1]))
with open(job["results"], "a") as lines:
    def say(entry):
        lines.write(json.dumps(entry) + "\\n")
        lines.flush()
    for key in job["keys"]:
        what = key.split("/")[0]
        if what == "unbegun":
            sys.exit(5)
        say({"begun": key})
        if what == "die":
            print("the device said no", flush=True)
            os._exit(9)
        if what == "hang":
            time.sleep(60)
        record = {"key": key, "values": {"pid": os.getpid()}, "checks": [], "skipped": None,
                  "crash": "RuntimeError: lost" if what == "lost" else None, "optional": False,
                  "seconds": 0.0, "status": "-"}
        say({"done": record})
        if what == "lost":
            sys.exit(3)
"""


def _supervise(
    tmp_path: Path,
    keys: list[str],
    *,
    shares: int = 1,
    limit_s: float = 30.0,
    within_s: float = 30.0,
    jobs: int = 1,
) -> dict[str, Record]:
    script = tmp_path / "fake_worker.py"
    script.write_text(FAKE_WORKER)
    records: dict[str, Record] = {}
    runner = Supervisor(
        Settings(), lambda letter, record: records.update({record.key: record}), (sys.executable, str(script))
    )
    items = [Item(key, fine, limit_s=limit_s) for key in keys]
    runner.run(shares_of("a", items, shares), time.time() + within_s, jobs)
    return records


def _statuses(records: dict[str, Record]) -> dict[str, str]:
    return {key: record.status for key, record in sorted(records.items())}


def test_shares_are_dealt_like_cards() -> None:
    items = [Item(str(n), fine) for n in range(5)]
    shares = shares_of("a", items, 2)
    assert [[item.key for item in share.items] for share in shares] == [["0", "2", "4"], ["1", "3"]]
    assert len(shares_of("a", items[:1], 4)) == 1


def test_items_after_one_that_takes_its_worker_down_run_in_another(tmp_path: Path) -> None:
    records = _supervise(tmp_path, ["ok/1", "die/2", "ok/3", "lost/4", "ok/5"])
    assert _statuses(records) == {
        "die/2": "crashed",
        "lost/4": "crashed",
        "ok/1": "ok",
        "ok/3": "ok",
        "ok/5": "ok",
    }
    assert len({records[key].values["pid"] for key in ("ok/1", "ok/3", "ok/5")}) == 3
    assert records["die/2"].crash is not None
    assert "the device said no" in records["die/2"].crash
    assert "status 9" in records["die/2"].reason


def test_an_item_that_hangs_is_killed_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "GRACE_S", 0.2)
    records = _supervise(tmp_path, ["hang/1", "ok/2"], limit_s=0.1)
    assert _statuses(records) == {"hang/1": "crashed", "ok/2": "ok"}


def test_what_is_not_done_at_the_deadline_is_skipped_and_said(tmp_path: Path) -> None:
    records = _supervise(tmp_path, ["ok/1", "hang/2", "ok/3"], within_s=3.0)
    assert _statuses(records) == {"hang/2": "skipped", "ok/1": "ok", "ok/3": "skipped"}
    assert records["hang/2"].reason == "no time: stopped while it ran"
    assert records["ok/3"].reason == "no time"


def test_workers_that_do_not_start_are_not_started_for_ever(tmp_path: Path) -> None:
    records = _supervise(tmp_path, ["unbegun/1", "ok/2"])
    assert _statuses(records) == {"ok/2": "skipped", "unbegun/1": "crashed"}


def test_workers_that_die_again_and_again_are_given_up(tmp_path: Path) -> None:
    records = _supervise(tmp_path, [f"die/{n}" for n in range(8)])
    statuses = list(_statuses(records).values())
    assert statuses == ["crashed"] * supervisor.MAX_STARTS + ["skipped"] * (8 - supervisor.MAX_STARTS)


def test_every_item_of_every_share_gets_a_record(tmp_path: Path) -> None:
    records = _supervise(tmp_path, [f"ok/{n}" for n in range(7)], shares=3, jobs=2)
    assert _statuses(records) == dict.fromkeys(sorted(f"ok/{n}" for n in range(7)), "ok")
    assert len({record.values["pid"] for record in records.values()}) == 3
