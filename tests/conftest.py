from __future__ import annotations

import builtins
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton


_CPU = pytest.StashKey[float]()

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores already, with the processes that tests start.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu", action="store_true", help="show the CPU seconds of each file and of the longest tests"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that crosses lists of parameters, `make test` runs a diagonal: every value of each list once.

    The other combinations are marked as `full`, unless the test is marked as `whole`. Slow tests come first:
    no core waits for one in the end.
    """
    tests: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not any(map(item.get_closest_marker, ("slow", "full", "whole"))):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        ids = [tuple(case.callspec._idlist) for case in cases]  # one for each list
        lists = [list(dict.fromkeys(column)) for column in zip(*ids, strict=True)]
        # Each round through a list begins one later than in the list before, so that all pairs meet in time.
        diagonal = {
            tuple(values[(n + i * (n // len(values))) % len(values)] for i, values in enumerate(lists))
            for n in range(max(map(len, lists), default=0))
        }
        for case, found in zip(cases, ids, strict=True):
            if found not in diagonal:
                case.add_marker("full")
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    """CPU seconds since the phase before, of this process and of those that it has waited for."""
    report = yield
    report.cpu, item.config.stash[_CPU] = (now := sum(os.times()[:4])) - item.config.stash.get(_CPU, now), now
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not terminalreporter.config.getoption("cpu"):
        return
    reports = [r for rs in terminalreporter.stats.values() for r in rs if hasattr(r, "cpu")]
    for title, key, count in (("file", lambda r: r.fspath, None), ("test", lambda r: r.nodeid, 40)):
        spent: Counter[str] = Counter()
        for report in reports:
            spent[key(report)] += report.cpu
        terminalreporter.section(f"CPU seconds by {title}: {sum(spent.values()):.0f}")
        for name, seconds in spent.most_common(count):
            terminalreporter.line(f"{seconds:8.2f} {name}")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test draws from the same state, alone or in a full run."""
    torch.manual_seed(0)


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it is not installed, whether it was imported before or not."""
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
