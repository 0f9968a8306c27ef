from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from eval.core.isolation import NO_TIME, Call, Outcome, Workers
from tests.eval.core.isolated_calls import act, variable


def run(*names: str, limit_s: float = 30.0, within_s: float = 30.0, **options: Any) -> dict[str, Outcome]:
    calls = [Call((name,), limit_s) for name in names]
    found = Workers(act, **options).run(calls, time.time() + within_s)
    return {outcome.call.arguments[0]: outcome for outcome in found}


def problems(outcomes: dict[str, Outcome]) -> dict[str, str | None]:
    return {name: outcome.problem for name, outcome in outcomes.items()}


def test_one_process_makes_one_call_after_another_until_it_is_of_no_more_use() -> None:
    found = run("a", "raise", "b", "last", "c")
    assert problems(found) == {
        **dict.fromkeys("abc"),
        "raise": "RuntimeError: illegal memory access",
        "last": None,
    }
    assert found["a"].value == found["b"].value == found["last"].value != found["c"].value
    assert "Traceback" in found["raise"].log
    assert os.getpid() not in [outcome.value for outcome in found.values()]


def test_calls_after_one_that_kills_its_process_are_made_in_another() -> None:
    found = run("a", "die", "b")
    assert problems(found) == {"a": None, "die": "its process died with exit code 9", "b": None}
    assert (found["die"].exit_code, found["die"].log) == (9, "the device said no\n")
    assert found["a"].value != found["b"].value


def test_a_call_that_hangs_is_killed_and_the_next_one_is_made() -> None:
    found = run("hang", "a", limit_s=0.3)
    assert found["hang"].problem == "no answer within 0.3 s"
    assert not found["hang"].is_skipped


def test_what_is_not_done_at_the_deadline_is_skipped() -> None:
    found = run("a", "hang", "b", within_s=1.5)
    assert problems(found) == {"a": None, "hang": f"{NO_TIME}: stopped while it ran", "b": NO_TIME}
    assert found["hang"].is_skipped
    assert found["b"].is_skipped


def test_a_call_that_needs_more_time_than_is_left_is_not_begun() -> None:
    calls = [Call(("long",), needs_s=100.0), Call(("short",))]
    found = {outcome.call.arguments[0]: outcome for outcome in Workers(act).run(calls, time.time() + 50)}
    assert problems(found) == {"long": NO_TIME, "short": None}


def test_processes_that_die_again_and_again_are_given_up() -> None:
    found = run("die/1", "die/2", "die/3", max_deaths=2)
    assert found["die/3"].problem == "2 processes died before it"
    assert [outcome.is_skipped for outcome in found.values()] == [False, False, True]


def test_processes_that_do_not_start_are_not_started_for_ever() -> None:
    workers = Workers(act, environment={"PYTHONHOME": "/nowhere"})
    first, second = workers.run([Call(("a",)), Call(("b",))])
    assert str(first.problem).startswith("its process died with exit code")
    assert (second.problem, second.is_skipped) == ("the process does not start", True)


def test_each_call_may_have_a_process_of_its_own_from_a_server() -> None:
    found = run(*"abc", one_call_each=True, jobs=2, preload=["tests.eval.core.isolated_calls"])
    assert len({outcome.value for outcome in found.values()}) == 3


def test_calls_are_shared_among_the_jobs() -> None:
    found = run(*(f"x/{n}" for n in range(5)), jobs=2)
    assert problems(found) == dict.fromkeys(found)
    assert len({outcome.value for outcome in found.values()}) <= 2


def test_a_call_tells_what_it_is_at() -> None:
    events: list[Any] = []
    run("tell", on_event=events.append)
    assert events == ["tell"]


def test_variables_are_there_when_the_process_starts_and_only_there() -> None:
    assert Workers(variable, environment={"HF_PAGED_CACHE_X": "1"}).one("HF_PAGED_CACHE_X").value == "1"
    assert "HF_PAGED_CACHE_X" not in os.environ


def test_leaving_off_kills_what_runs() -> None:
    outcomes = Workers(act, jobs=2).run([Call(("a",)), Call(("hang",))])
    started_s = time.monotonic()
    next(outcomes)
    outcomes.close()
    assert time.monotonic() - started_s < 20


def test_a_worker_ends_with_the_process_that_has_started_it() -> None:
    code = (
        "from eval.core.isolation import Workers\nfrom tests.eval.core.isolated_calls import act\n"
        "Workers(act, on_event=lambda pid: print(pid, flush=True)).one('tell_and_hang')"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    for _ in range(100):
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return
        if (
            Path(f"/proc/{worker}/stat").read_text().split()[2] == "Z"
        ):  # ended, and nobody asks for its status
            return
        time.sleep(0.1)
    raise AssertionError("the worker still runs")
