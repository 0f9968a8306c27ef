"""Caches of every format against dense tensors, through thousands of random operations."""

from __future__ import annotations

import logging
import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from hf_paged_cache.config import LAYER_DTYPES
from tests.cache.state_machine import CacheMachine
from tests.support.live_caches import COPIES

STEPS_PER_RUN = 50
SHORT_RUN = 10 * STEPS_PER_RUN
"""Steps in each format, and some more where a rule had no turn yet."""
STEPS = int(os.environ.get("HF_PAGED_CACHE_MACHINE_STEPS", "20000"))
"""Steps of the long run, over all formats. With ten times as many it takes some seven minutes."""

RULES = {
    *("update", "no room", "spoil", "crop", "crop_to_nothing", "reorder", "select", "repeat", "reset"),
    *("record_past", "rewind", "drop", "peek", *COPIES),
    *(f"abort: {ending}" for ending in ("forward", "again", "by hand")),
}


def run_machine(format_name: str, steps: int, seed_number: int = 0) -> Counter[str]:
    """How often each step was made, in about so many."""
    executed: Counter[str] = Counter()
    machine = type("CacheMachine", (CacheMachine,), {"format_name": format_name, "executed": executed})
    run_state_machine_as_test(
        seed(seed_number)(machine),
        settings=settings(
            max_examples=-(-steps // STEPS_PER_RUN),
            stateful_step_count=STEPS_PER_RUN,
            deadline=None,
            database=None,
            print_blob=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return executed


def assert_caches_hold_what_they_should(format_name: str, steps: int) -> None:
    """Run on until there were so many steps (a run may be shorter than it could), and all kinds of them."""
    executed: Counter[str] = Counter()
    first = 1000 * LAYER_DTYPES.index(format_name)
    for number in range(first, first + 10):
        executed += run_machine(format_name, max(steps - executed.total(), SHORT_RUN), number)
        if executed.total() >= steps and executed.keys() >= RULES:
            break
    assert executed.total() >= steps
    assert executed.keys() >= RULES


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "hf_paged_cache")  # the guard says what it moves


@pytest.mark.parametrize("format_name", LAYER_DTYPES)
def test_caches_hold_what_dense_tensors_hold(format_name: str) -> None:
    assert_caches_hold_what_they_should(format_name, SHORT_RUN)


@pytest.mark.full
@pytest.mark.parametrize("format_name", LAYER_DTYPES)
def test_caches_hold_what_dense_tensors_hold_in_a_long_run(format_name: str) -> None:
    assert_caches_hold_what_they_should(format_name, -(-STEPS // len(LAYER_DTYPES)))
