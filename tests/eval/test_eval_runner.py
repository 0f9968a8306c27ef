from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.caches import CACHES, CacheEntry, CacheUnavailable, Demand, tensor_bytes
from eval.core import statistics
from eval.core.errors import UsageError
from eval.core.models import LoadedModel
from eval.run import runner, summary
from eval.run.journal import Journal, check_continues
from eval.run.processes import Processes
from eval.run.rows import Prediction, Row
from eval.run.runner import Runner
from eval.run.settings import Settings
from eval.tasks import TASKS
from eval.tasks.base import Answer, Outcome, Sample, Task, Unit
from eval.tasks.texts import _encode

DYNAMIC = CACHES["dynamic"]
OTHER = dataclasses.replace(DYNAMIC, name="other")
SAMPLES = [Sample(str(n), "word " * n, "mot " * n) for n in (1, 7, 3, 5, 2)]
TASK = TASKS["translation"]
TIMES = ("prefill_ms", "decode_ms", "tokens_per_s", "peak_bytes", "rise_bytes")

Done = tuple[list[Row], list[Prediction]]


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "RESAMPLES", 30)


@pytest.fixture
def units(loaded: LoadedModel) -> list[Unit]:
    """Five prompts in batches of 2, 2 and 1."""
    groups = [SAMPLES[:2], SAMPLES[2:4], SAMPLES[4:]]
    return [
        Unit(i, f"batch {i}", tuple(group), (_encode(loaded, [s.prompt for s in group]), 4))
        for i, group in enumerate(groups)
    ]


@pytest.fixture
def warmed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the caches that were warmed up, which does nothing else here."""
    names: list[str] = []
    monkeypatch.setattr(runner, "warm_up", lambda loaded, entry: names.append(entry.name))
    return names


class Watched(Task):
    """A task that notes what is run, and may be told to do something else at a unit."""

    name = "translation"
    title = "watched"
    metrics = TASK.metrics
    agreement = TASK.agreement

    def __init__(self, at: Callable[[Unit, CacheEntry], None] = lambda unit, entry: None) -> None:
        self.runs: list[tuple[int, str]] = []
        self._at = at

    def units(self, loaded: LoadedModel, settings: Settings) -> list[Unit]:
        raise NotImplementedError

    def run(self, loaded: LoadedModel, unit: Unit, entry: CacheEntry, reference: Any) -> Outcome:
        self._at(unit, entry)
        self.runs.append((unit.index, entry.name))
        return TASK.run(loaded, unit, entry, reference)


def _run(
    loaded: LoadedModel, units: list[Unit], folder: Path, *entries: CacheEntry, task: Task = TASK, **more: Any
) -> Done:
    folder.mkdir(exist_ok=True)
    Runner(loaded, entries, Journal(folder), Processes(), **more).run(task, units)
    return _rows(units, folder, *entries)


def _rows(units: list[Unit], folder: Path, *entries: CacheEntry) -> Done:
    names = [entry.name for entry in entries]
    return summary.rows_of(TASK, len(units), names, Journal(folder).latest(), "float32")


def _row(done: Done, cache: str) -> Row:
    return next(row for row in done[0] if row.cache == cache)


def _untimed(done: Done) -> tuple[list[Row], list[Prediction]]:
    nothing: dict[str, Any] = dict.fromkeys(TIMES)
    return [dataclasses.replace(row, **nothing) for row in done[0]], done[1]


def _raising(name: str, error: Exception) -> CacheEntry:
    def create(model: Any, demand: Demand) -> Any:
        raise error

    return CacheEntry(name, name, create, tensor_bytes)


def _stopping_at(number: int, error: BaseException) -> Watched:
    """A task that raises at its run of this number."""

    def at(unit: Unit, entry: CacheEntry) -> None:
        if len(task.runs) == number:
            raise error

    task = Watched(at)
    return task


# rows


def test_a_row_holds_every_measurement(loaded: LoadedModel, units: list[Unit], tmp_path: Path) -> None:
    done = _run(loaded, units, tmp_path, DYNAMIC, CACHES["paged"])
    for row in done[0]:
        assert row.problem is None
        assert row.samples == len(SAMPLES)
        assert [metric.key for metric in row.metrics] == ["chrf", "bleu"]
        assert row.identical_percent == 100.0
        assert row.first_divergence_tokens is None
        assert row.agreement is not None
        assert row.agreement.value == pytest.approx(100.0)
        assert row.peak_bytes is not None
        assert row.rise_bytes is not None
        assert row.peak_bytes > row.rise_bytes >= 0
        assert row.prefill_ms is not None
        assert row.prefill_ms.count == 3
        assert row.decode_ms is not None
        assert row.decode_ms.count == 9  # 4 tokens: the first comes with the prefill
    dynamic, paged = done[0]
    assert dynamic.bits_per_value == 32.0
    assert dynamic.kv_bytes is not None
    assert paged.kv_bytes is not None
    assert paged.bits_per_value == 32.0 * paged.kv_bytes / dynamic.kv_bytes
    assert [metric.verdict for metric in paged.metrics] == ["same", "same"]
    assert [p.id for p in done[1]] == 2 * [sample.id for sample in SAMPLES]


def test_other_tokens_lower_the_share_that_is_identical() -> None:
    def outcome(*tokens: tuple[int, ...]) -> Outcome:
        return Outcome(tuple(Answer(str(i), "t", "r", row) for i, row in enumerate(tokens)))

    default = summary._answers([outcome((1, 2, 3), (4, 5)), outcome((6, 7, 8))])
    mine = summary._answers([outcome((1, 2, 9), (4, 5)), outcome((6,))])
    assert summary._same_tokens(mine, default) == {
        "identical_percent": pytest.approx(100 / 3),
        "first_divergence_tokens": 1.5,
    }


def test_without_the_default_cache_nothing_is_compared(
    loaded: LoadedModel, units: list[Unit], tmp_path: Path
) -> None:
    done = _run(loaded, units, tmp_path, OTHER)
    row = _row(done, "other")
    assert row.identical_percent is row.agreement is row.bits_per_value is None
    assert {metric.difference for metric in row.metrics} == {None}
    assert {prediction.identical for prediction in done[1]} == {None}


def test_tokens_per_second_are_those_of_full_batches(
    loaded: LoadedModel, units: list[Unit], tmp_path: Path
) -> None:
    _run(loaded, units, tmp_path, DYNAMIC)
    measures = [outcome.measures for outcome in Journal(tmp_path).latest().values()]
    changed = [
        dataclasses.replace(m, step_ms=((2.0, 4.0, 4.0) if m.rows == 2 else (1.0,) * 50))
        for m in measures
        if m is not None
    ]
    assert summary._cost(changed)["tokens_per_s"] == 1000 * 2 / 4.0


# contenders


def test_the_attention_is_put_back(loaded: LoadedModel, units: list[Unit], tmp_path: Path) -> None:
    before = loaded.model.config._attn_implementation
    _run(loaded, units, tmp_path, DYNAMIC, CACHES["paged"])
    assert loaded.model.config._attn_implementation == before


def test_the_default_cache_never_runs_with_patched_attention(
    loaded: LoadedModel, units: list[Unit], tmp_path: Path
) -> None:
    seen: list[tuple[str, str]] = []

    def watched(entry: CacheEntry) -> CacheEntry:
        def create(model: Any, demand: Demand) -> Any:
            cache = entry.create(model, demand)
            seen.append((entry.name, model.config._attn_implementation))
            return cache

        return dataclasses.replace(entry, create=create)

    _run(loaded, units, tmp_path, watched(CACHES["paged"]), watched(DYNAMIC))
    assert {implementation for name, implementation in seen if name == "dynamic"} == {"sdpa"}
    assert "sdpa" not in {implementation for name, implementation in seen if name == "paged"}


def test_contenders_take_turns_in_going_first(
    loaded: LoadedModel, units: list[Unit], tmp_path: Path, warmed: list[str]
) -> None:
    task = Watched()
    _run(loaded, units, tmp_path, DYNAMIC, OTHER, task=task)
    assert warmed == ["dynamic", "other"]
    assert [name for _, name in task.runs] == ["dynamic", "other", "other", "dynamic", "dynamic", "other"]
    assert [index for index, _ in task.runs] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("error", "problem", "failed"),
    [
        (CacheUnavailable("needs a GPU"), "needs a GPU", False),
        (CacheUnavailable(""), "", False),
        (KeyError("layer\n7"), "KeyError: 'layer\\n7'", True),
        (RuntimeError("two\nlines"), "RuntimeError: two lines", True),
    ],
)
def test_a_cache_that_cannot_run_becomes_a_row_and_the_others_go_on(
    loaded: LoadedModel, units: list[Unit], tmp_path: Path, error: Exception, problem: str, failed: bool
) -> None:
    done = _run(loaded, units, tmp_path, _raising("broken", error), DYNAMIC)
    broken = _row(done, "broken")
    assert (broken.problem, broken.failed, broken.metrics) == (problem, failed, ())
    assert _row(done, "dynamic").problem is None
    assert {prediction.cache for prediction in done[1]} == {"dynamic"}


def test_a_cache_that_fails_on_the_way_is_not_asked_again(
    loaded: LoadedModel, units: list[Unit], tmp_path: Path
) -> None:
    def at(unit: Unit, entry: CacheEntry) -> None:
        if unit.index == 1 and entry.name == "other":
            raise RuntimeError("no memory")

    task = Watched(at)
    done = _run(loaded, units, tmp_path, DYNAMIC, OTHER, task=task)
    assert task.runs == [(0, "dynamic"), (0, "other"), (1, "dynamic"), (2, "dynamic")]
    assert (_row(done, "other").problem, _row(done, "other").failed) == ("RuntimeError: no memory", True)


def test_a_reference_that_cannot_be_had_is_a_row_of_each_contender(
    loaded: LoadedModel, units: list[Unit], tmp_path: Path
) -> None:
    class Lost(Watched):
        def reference(self, loaded: LoadedModel, unit: Unit) -> Any:
            raise RuntimeError("no memory")

    done = _run(loaded, units, tmp_path, DYNAMIC, OTHER, task=Lost())
    assert [row.problem for row in done[0]] == ["RuntimeError: no memory"] * 2


def test_a_reference_is_made_once_for_a_unit(loaded: LoadedModel, units: list[Unit], tmp_path: Path) -> None:
    made: list[int] = []

    class Counting(Watched):
        def reference(self, loaded: LoadedModel, unit: Unit) -> Any:
            made.append(unit.index)

    _run(loaded, units, tmp_path, DYNAMIC, OTHER, task=Counting())
    assert made == [0, 1, 2]


@pytest.mark.parametrize("other", [OTHER, _raising("broken", CacheUnavailable("no"))], ids=["runs", "broken"])
def test_progress_adds_up_to_units_times_caches(
    other: CacheEntry, loaded: LoadedModel, units: list[Unit], tmp_path: Path
) -> None:
    steps: list[int] = []
    for _ in ("first", "again"):
        steps.clear()
        _run(loaded, units, tmp_path, DYNAMIC, other, advance=lambda label, done: steps.append(done))
        assert sum(steps) == 3 * 2


# interruptions


@pytest.mark.parametrize("number", [0, 3, 5])
def test_an_interrupted_run_goes_on_where_it_was_and_ends_as_if_it_had_not_been(
    number: int, loaded: LoadedModel, units: list[Unit], tmp_path: Path, warmed: list[str]
) -> None:
    entries = (DYNAMIC, dataclasses.replace(CACHES["paged-int8"], name="other"))
    whole = _run(loaded, units, tmp_path / "whole", *entries)
    first, second, third = _stopping_at(number, KeyboardInterrupt()), Watched(), Watched()
    with pytest.raises(KeyboardInterrupt):
        _run(loaded, units, tmp_path / "parts", *entries, task=first)
    resumed = _run(loaded, units, tmp_path / "parts", *entries, task=second)
    assert len(first.runs) == number
    assert sorted(first.runs + second.runs) == [(i, name) for i in range(3) for name in ("dynamic", "other")]
    assert _untimed(resumed) == _untimed(whole)
    warmed.clear()
    again = _run(loaded, units, tmp_path / "parts", *entries, task=third)
    assert (third.runs, warmed) == ([], [])
    assert again == resumed


def test_a_line_that_was_cut_off_is_run_again_and_spoils_no_other(
    loaded: LoadedModel, units: list[Unit], tmp_path: Path
) -> None:
    whole = _run(loaded, units, tmp_path, DYNAMIC)
    path = tmp_path / "journal.0.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:-40])
    task = Watched()
    assert _untimed(_run(loaded, units, tmp_path, DYNAMIC, task=task)) == _untimed(whole)
    assert task.runs == [(1, "dynamic"), (2, "dynamic")]
    assert len(Journal(tmp_path).done()) == 3


def test_a_contender_that_failed_is_tried_again(
    loaded: LoadedModel, units: list[Unit], tmp_path: Path
) -> None:
    done = _run(loaded, units, tmp_path, DYNAMIC, OTHER, task=_stopping_at(2, RuntimeError("once")))
    assert [row.problem for row in done[0]] == ["RuntimeError: once"] * 2
    task = Watched()
    done = _run(loaded, units, tmp_path, DYNAMIC, OTHER, task=task)
    assert [row.problem for row in done[0]] == [None, None]
    assert sorted(task.runs) == [(1, "dynamic"), (1, "other"), (2, "dynamic"), (2, "other")]


def test_a_contender_that_fails_at_warm_up_is_tried_again(
    loaded: LoadedModel, units: list[Unit], tmp_path: Path
) -> None:
    done = _run(loaded, units, tmp_path, DYNAMIC, _raising("other", RuntimeError("cold")))
    assert _row(done, "other").problem == "RuntimeError: cold"
    assert _row(_run(loaded, units, tmp_path, DYNAMIC, OTHER), "other").problem is None


# journal


def test_the_last_problem_counts_and_a_finished_unit_before_any(tmp_path: Path) -> None:
    key = "translation", 0, "paged"
    journal = Journal(tmp_path, 1)
    for problem in ("first", "second"):
        journal.add(key, Outcome(problem=problem, failed=True))
    assert journal.latest()[key].problem == "second"
    assert journal.done() == {}
    journal.add(key, Outcome((Answer("a", "ü\u2028x"),)))
    Journal(tmp_path, 2).add(key, Outcome(problem="third"))
    assert Journal(tmp_path).done() == {key: Outcome((Answer("a", "ü\u2028x"),))}


def test_a_unit_that_no_process_ran_is_a_row_that_says_so(
    loaded: LoadedModel, units: list[Unit], tmp_path: Path
) -> None:
    _run(loaded, units[:2], tmp_path, DYNAMIC)
    (row,), predictions = _rows(units, tmp_path, DYNAMIC)
    assert (row.problem, row.failed, predictions) == ("not all of its samples were run", True, [])


def test_a_folder_with_other_settings_is_refused_by_what_differs(tmp_path: Path) -> None:
    import yaml

    before = Settings(limit=2, caches=("dynamic",), output="a")
    check_continues(tmp_path, before)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(before.to_dict()), encoding="utf-8")
    check_continues(tmp_path, dataclasses.replace(before, output="b"))
    with pytest.raises(UsageError) as caught:
        check_continues(tmp_path, dataclasses.replace(before, limit=3, caches=("dynamic", "paged")))
    assert str(caught.value) == (
        f"{tmp_path} holds a run with other settings (caches was ['dynamic'] and is ['dynamic', 'paged']; "
        f"limit was 2 and is 3): go on with it by --resume {tmp_path}, or choose another --output"
    )


# processes


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_unit_belongs_to_one_process(count: int) -> None:
    owners = [[i for i in range(count) if Processes(i, count).share(unit)] for unit in range(12)]
    assert {len(each) for each in owners} == {1}
    assert len({each[0] for each in owners}) == count


@pytest.mark.parametrize(("is_timed", "expected"), [(False, [[0, 2], [1]]), (True, [[0, 1, 2], []])])
def test_processes_share_units_but_for_a_timed_task(
    is_timed: bool, expected: list[list[int]], loaded: LoadedModel, units: list[Unit], tmp_path: Path
) -> None:
    class Timed(Watched):
        pass

    Timed.is_timed = is_timed
    found = []
    for index in range(2):
        task, journal = Timed(), Journal(tmp_path, index)
        Runner(loaded, [DYNAMIC], journal, Processes(index, 2)).run(task, units)
        found.append([unit for unit, _ in task.runs])
    assert found == expected
    alone = _run(loaded, units, tmp_path / "alone", DYNAMIC)
    assert _untimed(_rows(units, tmp_path, DYNAMIC)) == _untimed(alone)


def test_a_run_goes_on_with_another_number_of_processes(
    loaded: LoadedModel, units: list[Unit], tmp_path: Path
) -> None:
    journal = Journal(tmp_path, 1)
    Runner(loaded, [DYNAMIC], journal, Processes(1, 2)).run(TASK, units)
    task = Watched()
    _run(loaded, units, tmp_path, DYNAMIC, task=task)
    assert task.runs == [(0, "dynamic"), (2, "dynamic")]


def test_alone_a_problem_is_raised_as_it_is() -> None:
    with pytest.raises(UsageError, match="no such thing"), Processes().together():
        raise UsageError("no such thing")
    with Processes().together():
        pass


def test_nothing_is_left_of_the_warning_filters(loaded: LoadedModel) -> None:
    import warnings

    before = list(warnings.filters)
    assert runner._attempt(lambda: Outcome(problem="x")).problem == "x"
    assert list(warnings.filters) == before


def test_a_full_disk_is_said_in_one_line_and_loses_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.add(("task", 0, "dynamic"), Outcome())
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no device that is always full")
    (tmp_path / "journal.1.jsonl").symlink_to(full)
    other = Journal(tmp_path, process=1)
    with pytest.raises(UsageError, match=r"No space left on device.*--resume") as refusal:
        other.add(("task", 1, "dynamic"), Outcome())
    assert "\n" not in str(refusal.value)
    (tmp_path / "journal.1.jsonl").unlink()
    assert set(Journal(tmp_path).done()) == {("task", 0, "dynamic")}
