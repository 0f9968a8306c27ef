"""Caches of every format against dense tensors, through thousands of random operations."""

from __future__ import annotations

import logging
import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from hf_paged_cache.config import LAYER_DTYPES
from tests.state_machine import COPIES, CacheMachine

STEPS_PER_RUN = 50
STEPS = int(os.environ.get("HF_PAGED_CACHE_MACHINE_STEPS", "20000"))
"""Steps over all formats."""


def run_machine(form: str, steps: int) -> Counter[str]:
    """How often each rule was carried out in at least so many steps."""
    logging.getLogger("hf_paged_cache").setLevel(logging.ERROR)  # the guard says what it moves
    executed: Counter[str] = Counter()
    machine = type("CacheMachine", (CacheMachine,), {"form": form, "executed": executed})
    run_state_machine_as_test(
        seed(1000 * LAYER_DTYPES.index(form))(machine),
        settings=settings(
            max_examples=-(-steps // STEPS_PER_RUN) + 2,
            stateful_step_count=STEPS_PER_RUN,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return executed


@pytest.mark.parametrize("form", LAYER_DTYPES)
def test_caches_hold_what_dense_tensors_hold(form: str) -> None:
    steps = -(-STEPS // len(LAYER_DTYPES))
    executed = run_machine(form, steps)
    assert executed.total() - executed["stale view"] >= steps
    rules = {"update", "no room", "spoil", "crop", "crop_to_nothing", "reorder", "select", "repeat"}
    rules |= {"reset", "record_past", "drop", "rewind", *COPIES}
    rules |= {f"abort: {ending}" for ending in ("forward", "again", "by hand", "read only")}
    assert rules <= executed.keys()


@pytest.mark.slow
@pytest.mark.parametrize("form", LAYER_DTYPES)
def test_caches_hold_it_for_200_000_steps(form: str) -> None:
    steps = -(-200_000 // len(LAYER_DTYPES))
    executed = run_machine(form, steps)
    assert executed.total() - executed["stale view"] >= steps
