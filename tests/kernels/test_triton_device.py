"""On which devices the Triton kernels run, what is said where they do not, and when they are compiled."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_paged_cache.errors import BackendUnavailable
from hf_paged_cache.kernels import dispatch, triton
from hf_paged_cache.kernels.torch import torch_kernels
from tests.kernels.cases import Case, build

pytest.importorskip("triton")

from hf_paged_cache.kernels.triton import launch, probe

pytestmark = pytest.mark.usefixtures("one_thread")

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _nothing_known() -> Iterator[None]:
    triton.unusable_reason.cache_clear()
    yield
    triton.unusable_reason.cache_clear()


def use_device(monkeypatch: pytest.MonkeyPatch, *, hip: str | None = None, **properties: Any) -> None:
    """A device of that kind, on which a first kernel would run."""
    found = SimpleNamespace(**{"name": "Some GPU", "major": 9, "minor": 0} | properties)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(probe, "failure", lambda device: None)


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (
            {"major": 7, "minor": 5, "name": "Tesla T4"},
            r"capability 8\.0 or above; cuda:0 \(Tesla T4\) has 7\.5",
        ),
        ({"major": 8, "minor": 0}, None),
        ({"major": 12, "minor": 0}, None),
        ({"hip": "6.4", "gcnArchName": "gfx942:sramecc+:xnack-", "major": 9, "minor": 4}, None),
        (
            {"hip": "6.4", "gcnArchName": "gfx1100", "major": 11, "minor": 0},
            "made for gfx90a.*cuda:0 is gfx1100",
        ),
    ],
)
def test_devices_that_are_too_small_are_known_without_a_try(
    device: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_device(monkeypatch, **device)
    if reason is None:
        assert triton.unusable_reason(GPU) is None
    else:
        monkeypatch.setattr(probe, "failure", lambda device: pytest.fail("tried"))
        with pytest.raises(AssertionError, match=reason):
            assert triton.unusable_reason(GPU) is None, triton.unusable_reason(GPU)


def test_a_first_attention_gives_the_references_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert probe.failure(here) is None
    attend = launch.attend
    monkeypatch.setattr(launch, "attend", lambda *a, **k: (attend(*a, **k)[0] * 1.02, None))
    assert "off by 2" in str(probe.failure(here))
    monkeypatch.setattr(launch, "attend", lambda *a, **k: (attend(*a, **k)[0] * torch.nan, None))
    assert "off by nan" in str(probe.failure(here))


def test_a_try_that_fails_is_made_once_and_leaves_torch_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = []

    def fails(device: torch.device) -> None:
        tries.append(device)
        raise RuntimeError("Failed to find C compiler. Please specify via CC.\nmore")

    use_device(monkeypatch)
    monkeypatch.setattr(probe, "failure", fails)
    backend = SimpleNamespace(
        unavailable_reason=lambda: None,
        unsupported_reason=lambda blocks: None,
        unusable_reason=lambda device: triton.unusable_reason(GPU),
    )
    entries = {
        name: SimpleNamespace(serves=lambda device, *, is_forced: True, load=lambda m=module: m)
        for name, module in {"triton": backend, "torch": torch_kernels}.items()
    }
    monkeypatch.setattr(dispatch, "_BACKENDS", entries)
    monkeypatch.setattr(dispatch, "_chosen", {})
    monkeypatch.setattr(dispatch, "_warned", set())
    blocks = build(Case("b", end=3)).blocks
    pool = torch.arange(2.0)[:, None].clone()
    with caplog.at_level(logging.WARNING, logger="hf_paged_cache"):
        dispatch.write(blocks, torch.zeros(2, 2, 1, 64), torch.zeros(2, 2, 1, 64), 0)
        dispatch.copy_blocks(pool, [0], [1])
        assert dispatch.backend_name(build(Case("other", head_dim=96)).blocks) == "torch"
    assert pool.flatten().tolist() == [0, 0]
    assert tries == [GPU]
    (said,) = caplog.messages
    assert "failed on cuda:0: Failed to find C compiler. Please specify via CC. Triton needs a C" in said
    assert [each.standing for each in dispatch.explain(blocks)] == [
        dispatch.Standing.REFUSED,
        dispatch.Standing.RUNS,
    ]
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "triton")
    with pytest.raises(BackendUnavailable, match="Failed to find C compiler"):
        dispatch.backend_name(build(Case("forced")).blocks)


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_try_that_tells_nothing_of_the_device_is_made_again(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(device: torch.device) -> None:
        raise error

    use_device(monkeypatch)
    monkeypatch.setattr(probe, "failure", fails)
    with pytest.raises(error):
        triton.unusable_reason(GPU)
    monkeypatch.setattr(probe, "failure", lambda device: None)
    assert triton.unusable_reason(GPU) is None


@pytest.mark.parametrize(
    ("kv_cache_dtype", "prompt", "new"),
    [pytest.param("auto", 470, 60, marks=pytest.mark.full), ("int4", 21, 80)],
)
def test_a_generation_compiles_nothing_after_its_first_decode_step(
    kv_cache_dtype: str, prompt: int, new: int
) -> None:
    # Left padding, lengths of all residues, rows that begin to be split, blocks that fill and are sealed.
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiles", kv_cache_dtype, str(prompt), str(new)],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "0"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {"1", "2"}
    kernels = {"write_kernel", "attend_kernel", "merge_kernel"}
    if kv_cache_dtype == "int4":
        kernels.add("encode_kernel")
    assert {name for names in found.values() for name in names} == kernels
