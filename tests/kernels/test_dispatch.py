from __future__ import annotations

import copy
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_paged_cache.errors import BackendUnavailable
from hf_paged_cache.kernels import dispatch, reference
from hf_paged_cache.kernels.call import LayerBlocks
from hf_paged_cache.kernels.torch import torch_kernels
from tests.kernels.cases import Case, assert_answers, build

VARIABLE = "HF_PAGED_CACHE_BACKEND"


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def fresh_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """No backend forced, nothing chosen, nothing said."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(dispatch, "_chosen", {})
    monkeypatch.setattr(dispatch, "_warned", set())


@pytest.fixture
def blocks() -> LayerBlocks:
    return build(Case("b")).blocks


def _use_backends(monkeypatch: pytest.MonkeyPatch, **modules: object) -> None:
    """Replace the registry by these, fastest first."""
    entries = {
        name: SimpleNamespace(serves=lambda device, *, is_forced: True, load=lambda m=module: m)
        for name, module in modules.items()
    }
    monkeypatch.setattr(dispatch, "_BACKENDS", entries)


def _explained(blocks: LayerBlocks) -> list[tuple[str, str]]:
    return [(each.name, each.reason) for each in dispatch.explain(blocks)]


def _fast(*, unavailable: str | None = None, unsupported: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        unavailable_reason=lambda: unavailable,
        unsupported_reason=lambda blocks: unsupported,
        decode=lambda blocks, a, *, return_lse=False: ("fast", None),
        write=lambda blocks, keys, values, start: None,
        copy_blocks=lambda pool, src, dst: None,
        isa=lambda: "avx1024",
        scratch_bytes=lambda: 4096,
    )


def test_first_backend_that_can_run_is_taken(monkeypatch: pytest.MonkeyPatch, blocks: LayerBlocks) -> None:
    _use_backends(monkeypatch, fast=_fast(), torch=torch_kernels)
    assert dispatch.backend_name(blocks) == "fast"
    assert dispatch.decode(blocks, build(Case("b")).attention)[0] == "fast"
    assert _explained(blocks) == [("fast", "will run (avx1024)"), ("torch", "a faster one runs")]


@pytest.mark.parametrize("refusal", ["unavailable", "unsupported"])
def test_refused_backend_is_replaced_and_said_once(
    refusal: str, monkeypatch: pytest.MonkeyPatch, blocks: LayerBlocks, caplog: pytest.LogCaptureFixture
) -> None:
    _use_backends(monkeypatch, fast=_fast(**{refusal: "No compiler was found."}), torch=torch_kernels)
    with caplog.at_level(logging.WARNING, logger="hf_paged_cache"):
        assert dispatch.backend_name(blocks) == "torch"
        assert dispatch.backend_name(build(Case("other", head_dim=96)).blocks) == "torch"
    assert [record.getMessage() for record in caplog.records] == [
        "Backend 'fast' does not run: No compiler was found. Using the slower backend 'torch'."
    ]
    assert _explained(blocks) == [("fast", "No compiler was found."), ("torch", "will run")]


def test_blocks_that_a_backend_does_not_support_do_not_decide_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    picky = _fast()
    picky.unsupported_reason = lambda blocks: "Doubles." if blocks.keys.dtype == torch.float64 else None
    _use_backends(monkeypatch, fast=picky, torch=torch_kernels)
    assert dispatch.backend_name(build(Case("b"), torch.float64).blocks) == "torch"
    assert dispatch.backend_name(build(Case("b"), torch.float32).blocks) == "fast"


@pytest.mark.parametrize("name", ["cpp", "torch", "reference"])
def test_environment_forces_a_backend_for_layers_that_are_bound_after_it(
    name: str, monkeypatch: pytest.MonkeyPatch, blocks: LayerBlocks, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch._BACKENDS["cpp"].load(), "unavailable_reason", lambda: None)
    assert dispatch.backend_name(blocks) == "cpp"
    monkeypatch.setenv(VARIABLE, name)
    assert dispatch.backend_name(blocks) == "cpp"
    later = build(Case("b")).blocks
    assert dispatch.backend_name(later) == name
    assert dispatch.backend_name(copy.deepcopy(blocks)) == name  # whose memory is new
    running = [each.name for each in dispatch.explain(blocks) if each.standing is dispatch.Standing.RUNS]
    assert running == [name]
    monkeypatch.delenv(VARIABLE)
    assert dispatch.backend_name(later) == name
    assert dispatch.backend_name(build(Case("b")).blocks) == "cpp"
    assert not caplog.records


def test_a_bound_layer_does_not_look_at_the_environment(
    monkeypatch: pytest.MonkeyPatch, blocks: LayerBlocks
) -> None:
    dispatch.backend_name(blocks)
    monkeypatch.setattr(dispatch, "os", None)
    dispatch.decode(blocks, build(Case("b")).attention)
    dispatch.gather(blocks, 0, 1)


def test_empty_environment_forces_nothing(monkeypatch: pytest.MonkeyPatch, blocks: LayerBlocks) -> None:
    _use_backends(monkeypatch, torch=torch_kernels)
    monkeypatch.setenv(VARIABLE, " ")
    assert dispatch.backend_name(blocks) == "torch"


def test_unknown_name_is_refused_with_the_valid_ones(
    monkeypatch: pytest.MonkeyPatch, blocks: LayerBlocks
) -> None:
    monkeypatch.setenv(VARIABLE, "cuda")
    for call in (
        lambda: dispatch.backend_name(blocks),
        lambda: dispatch.explain(blocks),
        lambda: dispatch.gather(blocks, 0, 1),
        lambda: dispatch.copy_blocks(torch.zeros(2, 1), [0], [1]),
    ):
        with pytest.raises(ValueError, match=r"must be one of cpp, triton, torch, reference, .* got 'cuda'"):
            call()


def test_forced_backend_that_cannot_run_raises_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, blocks: LayerBlocks
) -> None:
    _use_backends(monkeypatch, fast=_fast(unavailable="No compiler was found."), torch=torch_kernels)
    monkeypatch.setenv(VARIABLE, "fast")
    for call in (
        lambda: dispatch.decode(blocks, build(Case("b")).attention),
        lambda: dispatch.copy_blocks(torch.zeros(2, 1), [0], [1]),
    ):
        with pytest.raises(BackendUnavailable, match=f"{VARIABLE}=fast.*No compiler was found"):
            call()
    assert _explained(blocks) == [
        ("fast", "No compiler was found."),
        ("torch", f"not asked for: {VARIABLE}=fast"),
    ]


def test_backend_of_another_device_is_not_even_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = LayerBlocks(
        torch.empty(2, 1, 64, 8, device="meta"),
        torch.empty(2, 1, 64, 8, device="meta"),
        torch.empty(1, 1, dtype=torch.int32, device="meta"),
    )
    monkeypatch.setattr(dispatch, "_BACKENDS", dict(dispatch._BACKENDS))
    entry = dispatch._BACKENDS["cpp"]
    dispatch._BACKENDS["cpp"] = type(entry)("a.module.that.is.not", entry.devices)
    assert _explained(blocks)[:3] == [
        ("cpp", "It runs on cpu; the blocks are on meta."),
        ("triton", "It runs on cuda; the blocks are on meta."),
        ("torch", "will run"),
    ]
    assert dispatch.backend_name(blocks) == "torch"


def test_import_neither_loads_nor_compiles_the_cpp_kernel() -> None:
    code = "import sys, hf_paged_cache.kernels.dispatch; print('hf_paged_cache.kernels.cpp' in sys.modules)"
    root = Path(dispatch.__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


@pytest.mark.parametrize("name", ["torch", "reference"])
def test_every_function_reaches_the_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, name)
    case = Case("b", end=70, group=2)
    problem, empty = build(case), build(case).blocks
    dispatch.write(empty, problem.keys, problem.values, 0)
    assert_answers(problem, *dispatch.decode(empty, problem.attention, return_lse=True))
    keys, values = dispatch.gather(empty, 0, 70)
    assert torch.equal(keys, problem.keys)
    assert torch.equal(values, problem.values)
    pool = torch.arange(3.0)[:, None].clone()
    dispatch.copy_blocks(pool, [0, 2], [1, 0])
    assert pool[:, 0].tolist() == [2, 0, 2]


def test_scratch_is_that_of_the_backends_in_use(monkeypatch: pytest.MonkeyPatch, blocks: LayerBlocks) -> None:
    _use_backends(monkeypatch, fast=_fast(), reference=reference)
    assert dispatch.scratch_bytes() == 0
    dispatch.backend_name(blocks)
    dispatch.backend_name(build(Case("other", head_dim=96)).blocks)
    assert dispatch.scratch_bytes() == 4096
