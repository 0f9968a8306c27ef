from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from eval.core import measure
from eval.core.measure import HighWaterPeak, SampledPeak, StepTimer, peak_memory
from eval.core.models import LoadedModel

MIB = 2**20
SLACK = 4 * MIB

resettable = pytest.mark.skipif(
    not measure._high_water_can_be_reset(), reason="the kernel's high-water mark cannot be reset here"
)


def _touch(mebibytes: int) -> torch.Tensor:
    return torch.ones(mebibytes * MIB, dtype=torch.uint8)


@resettable
def test_high_water_sees_an_allocation_that_was_freed_again() -> None:
    with HighWaterPeak() as peak:
        _touch(64)
    assert 64 * MIB - SLACK <= peak.rise_bytes <= 64 * MIB + SLACK


@resettable
def test_high_water_forgets_the_peak_before_it() -> None:
    _touch(128)
    with HighWaterPeak() as peak:
        _touch(16)
    assert 16 * MIB - SLACK <= peak.rise_bytes <= 16 * MIB + SLACK


@resettable
def test_high_water_does_not_count_memory_that_nobody_touched() -> None:
    with HighWaterPeak() as peak:
        kept = torch.empty(256 * MIB, dtype=torch.uint8)
    assert kept.numel() == 256 * MIB
    assert peak.rise_bytes <= SLACK


def test_the_sampling_thread_sees_an_allocation_while_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = threading.Event()
    resident_bytes = measure._resident_bytes

    def look() -> int:
        seen = resident_bytes()
        if threading.current_thread() is not threading.main_thread():
            looked.set()
        return seen

    monkeypatch.setattr(measure, "_resident_bytes", look)
    with SampledPeak() as peak:
        kept = _touch(64)
        # Twice: the first look may have begun before the memory was touched.
        for _ in range(2):
            looked.clear()
            assert looked.wait(timeout=10)
        del kept
    assert 64 * MIB - SLACK <= peak.rise_bytes <= 64 * MIB + SLACK
    assert peak.peak_bytes > peak.rise_bytes


def test_a_cpu_gets_one_of_the_resident_memory_gauges() -> None:
    gauge = peak_memory(torch.device("cpu"))
    assert isinstance(gauge, HighWaterPeak | SampledPeak)
    assert "resident memory" in gauge.method


def test_the_timer_splits_forwards_into_one_prefill_and_the_steps(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A clock that is read at: prefill start and end, then the ends of two steps.
    stamps = iter([10.0, 10.5, 10.6, 10.9])
    monkeypatch.setattr(StepTimer, "_now_s", lambda self: next(stamps))
    ids = torch.tensor([[5, 6, 7]])
    with StepTimer(loaded.model, loaded.device) as timer:
        for _ in range(3):
            loaded.model(ids)
    assert timer.prefill_ms == pytest.approx(500)
    assert timer.step_ms == pytest.approx([100, 300])


def test_the_timer_removes_its_hooks_even_when_the_forward_fails(loaded: LoadedModel) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"), StepTimer(loaded.model, loaded.device):
        fail()
    assert not loaded.model._forward_hooks
    assert not loaded.model._forward_pre_hooks


def test_a_timer_that_saw_no_forward_says_so(loaded: LoadedModel) -> None:
    with StepTimer(loaded.model, loaded.device) as timer:
        pass
    with pytest.raises(AssertionError, match="saw no finished forward"):
        _ = timer.prefill_ms
