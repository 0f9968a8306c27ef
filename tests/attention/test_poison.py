"""What lies in memory that holds no token moves no result, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_paged_cache import PagedCache
from hf_paged_cache.config import LAYER_DTYPES
from hf_paged_cache.kernels import dispatch
from tests.attention.test_parity import MODES, _generate
from tests.support.models import by_name, shared_model
from tests.support.poison import poison, poisoned
from tests.support.quantized import BLOCK, cache_of, states, update_all

GENERATIONS = [
    ("llama", "greedy"),
    ("llama", "beams"),
    ("llama", "assistant"),
    ("llama", "chunks-of-7-padded"),
    ("llama-eager", "two-turns-padded"),
    ("gemma3", "greedy"),
    ("gemma3", "chunks-of-20-padded"),
    ("mistral", "beams"),
    ("gpt-oss", "two-turns-padded"),
]
IN_TORCH = [("llama", "greedy"), ("llama", "chunks-of-7-padded"), ("gemma3", "greedy")]
"""One of each kind is enough for the slower backend."""


@pytest.fixture(params=["cpp", "torch"])
def backend(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, request.param)
    name: str = request.param
    return name


def generated(case: str, mode: str, name: str, *, with_poison: bool, **options: Any) -> Any:
    """Tokens and all logits of a generation."""
    model = shared_model(case)
    cache = cache_of(model, name, key_error_guard="off", **options)
    with poisoned(model, cache if with_poison else None) as logits:
        tokens = _generate(by_name(case), next(m for m in MODES if m.name == mode), cache)
    cache.check_integrity()
    return tokens, logits


def assert_poison_moves_nothing(case: str, mode: str, name: str, **options: Any) -> None:
    tokens, logits = generated(case, mode, name, with_poison=False, **options)
    got_tokens, got_logits = generated(case, mode, name, with_poison=True, **options)
    assert len(logits) == len(got_logits) > 1
    for want, got in zip(logits, got_logits, strict=True):
        assert got.isfinite().all()
        assert torch.equal(want, got)
    for want, got in zip(tokens, got_tokens, strict=True):
        assert torch.equal(want, got)


@pytest.mark.parametrize("name", LAYER_DTYPES)
@pytest.mark.parametrize(
    ("kernels", "case", "mode"),
    [("cpp", *generation) for generation in GENERATIONS]
    + [("torch", *generation) for generation in IN_TORCH],
)
def test_poison_moves_no_logit(
    kernels: str, case: str, mode: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, kernels)
    assert_poison_moves_nothing(case, mode, name)


@pytest.mark.parametrize("name", ["int8", "int4", "int8_block"])
@pytest.mark.parametrize("case", ["llama", "gemma3"])
def test_poison_moves_no_logit_with_longer_sinks_and_residual(case: str, name: str) -> None:
    options = {"sink_tokens": 2 * BLOCK, "residual_length": 2 * BLOCK, "layer_dtypes": {0: "auto", 1: "k8v4"}}
    assert_poison_moves_nothing(case, "greedy", name, **options)


# --- without a model ----------------------------------------------------------------------------------------


def through_many_moves(cache: PagedCache, between: Callable[[PagedCache], None]) -> list[torch.Tensor]:
    """All that can be read from a cache while tokens come and go."""
    read: list[torch.Tensor] = []
    seed = 0

    def feed(tokens: int, rows: int) -> None:
        nonlocal seed
        seed += 1
        keys, values = states(tokens, rows, seed=seed)
        for layer_idx in range(len(cache.layers)):
            between(cache)
            read.extend(view.clone() for view in cache.update(keys, values, layer_idx))
        look()

    def look() -> None:
        between(cache)
        for layer in cache.layers:
            read.extend((layer.keys.clone(), layer.values.clone()))

    cache.activate_past_recording()
    feed(5 * BLOCK + 3, 2)
    cache.crop(-(BLOCK + 7))  # into a block that is bytes
    look()
    feed(1, 2)
    feed(2 * BLOCK, 2)
    cache.batch_repeat_interleave(2)
    feed(3, 4)
    cache.reorder_cache(torch.tensor([3, 3, 0, 1]))
    look()
    feed(BLOCK, 4)
    cache.crop(-2 * BLOCK)
    cache.batch_select_indices(torch.tensor([1, 3]))
    feed(1, 2)
    fork = cache.fork()
    cache.crop(-5)
    look()
    feed(4, 2)
    between(fork)
    read.extend(layer.keys.clone() for layer in fork.layers)
    cache.crop(-cache.get_seq_length())
    feed(2 * BLOCK + 1, 1)
    return read


@pytest.mark.parametrize("name", LAYER_DTYPES)
@pytest.mark.parametrize("case", ["llama", "mistral", "gemma3"])
def test_poison_is_never_read(case: str, name: str, backend: str) -> None:
    runs = []
    for between in (lambda _: None, poison):
        cache = cache_of(shared_model(case), name, key_error_guard="off")
        runs.append(through_many_moves(cache, between))
        assert cache.stats().backend == backend
    for want, got in zip(*runs, strict=True):
        assert got.isfinite().all()
        assert torch.equal(want, got)


# --- whether the tests above can fail -----------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYER_DTYPES)
@pytest.mark.parametrize("case", ["llama", "mistral"])
def test_one_poisoned_token_shows(case: str, name: str, backend: str) -> None:
    cache = cache_of(shared_model(case), name)
    update_all(cache, *states(3 * BLOCK + 5, 2))
    poison(cache, too_many=1)
    for layer in cache.layers:
        for side in (layer.keys, layer.values):
            assert not side[:, :, -1].isfinite().any()
            assert side[:, :, :-1].isfinite().all()
