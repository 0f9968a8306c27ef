"""A pytest plugin that tells another process how the tests go: JSON lines on stderr.

`{"collected": 12}` once, then `{"passed": id}`, `{"skipped": id}` or `{"failed": id}` for each test. Needs
`--capture=sys`, which leaves the process's own stderr alone.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    """Say how many tests will run."""
    _say("collected", len(session.items))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported is a test that failed."""
    if report.failed:
        _say("failed", report.nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """One event for each test; a failure before or after it counts too."""
    if report.failed:
        _say("failed", report.nodeid)
    elif report.skipped:
        _say("skipped", report.nodeid)
    elif report.when == "call":
        _say("passed", report.nodeid)


def _say(event: str, value: int | str) -> None:
    print(json.dumps({event: value}), file=sys.__stderr__, flush=True)
