"""Every way of generating, over every format: the tokens of a dense simulation of what is stored.

Models are float64 here, so that no code of any format is a matter of rounding: a value that lies within
float32 rounding of the edge between two codes makes all that follows differ. Float32 and the compiled kernels
are held to the same simulation at the end, by logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hf_paged_cache import PagedCache, disable
from hf_paged_cache.formats import FORMATS, kv_format
from tests.attention.test_parity import MODES, Mode, _generate
from tests.support.models import CASES, VOCAB, by_name, cache_kwarg, shared_model
from tests.support.simulated import simulated_cache

BLOCK_SIZE = 16
GROUP_SIZE = 8
EDGES = {"int4": (1, 1), "int4_group": (1, 1), "int8_block": (0, 1)}
"""Blocks that a format keeps as they came, at the beginning and at the end of a row."""
MEDIAN_ERROR = {"int8": 5e-4, "k8v4": 5e-4, "int4": 5e-4}
"""Of logits, where a CPU multiplies bytes: what cutting queries and weights to 16 bits does to a model."""


def caches(model: Any, name: str, *, padding: Sequence[int] = (0,), **options: Any) -> tuple[PagedCache, Any]:
    layer_format = kv_format(name, group_size=GROUP_SIZE)
    assert layer_format is not None
    sinks, residual = EDGES.get(name, (0, 0))
    simulated = simulated_cache(
        model,
        layer_format,
        block_size=BLOCK_SIZE,
        sink_blocks=sinks,
        residual_blocks=residual,
        padding=padding,
    )
    paged = PagedCache(
        model,
        kv_cache_dtype=name,
        block_size=BLOCK_SIZE,
        group_size=GROUP_SIZE,
        key_error_guard="off",
        **options,
    )
    return paged, simulated


def both(case: str, name: str, mode: Mode) -> tuple[Any, Any, PagedCache, Any]:
    """What the paged cache and the simulation generate."""
    model = shared_model(case, dtype=torch.float64)
    padding = (mode.inputs()["attention_mask"] == 0).sum(1).tolist()
    _, simulated = caches(model, name, padding=padding)
    disable(model)
    expected = _generate(by_name(case), mode, simulated, model)
    paged, _ = caches(model, name)
    return _generate(by_name(case), mode, paged, model), expected, paged, simulated


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("name", FORMATS)
def test_tokens_are_those_of_the_simulation(name: str, mode: Mode) -> None:
    got, expected, paged, simulated = both("llama", name, mode)
    for want, have in zip(expected, got, strict=True):
        assert have.tolist() == want.tolist()
    paged.check_integrity()
    assert paged.get_seq_length() == simulated.get_seq_length()


def logits(model: Any, cache: Any, ids: torch.Tensor, chunks: tuple[int, ...]) -> torch.Tensor:
    """Of tokens that are fed in chunks."""
    found, first = [], 0
    for count in chunks:
        with torch.no_grad():
            found.append(model(ids[:, first : first + count], **{cache_kwarg(): cache}).logits)
        first += count
    return torch.cat(found, 1)


def assert_logits_are_those_of_the_simulation(case: str, name: str, chunks: tuple[int, ...]) -> None:
    model = shared_model(case)
    ids = torch.randint(3, VOCAB, (2, sum(chunks)), generator=torch.Generator().manual_seed(0))
    _, simulated = caches(model, name)
    disable(model)
    want = logits(model, simulated, ids, chunks)
    paged, _ = caches(model, name)
    got = logits(model, paged, ids, chunks)
    paged.check_integrity()
    errors = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert errors[:, : chunks[0]].max() == 0, "a first prompt is computed from no byte"
    assert errors.median() < MEDIAN_ERROR.get(name, 5e-6)
    # A code that falls on the other side of an edge changes all that follows.
    assert errors.max() < 0.1


@pytest.mark.parametrize("chunks", [(100, *[1] * 30), (37, *[9] * 5), (20, 40, *[1] * 40)], ids=len)
@pytest.mark.parametrize("name", FORMATS)
def test_float32_logits_are_those_of_the_simulation(name: str, chunks: tuple[int, ...]) -> None:
    assert_logits_are_those_of_the_simulation("llama", name, chunks)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "case",
    # Falcon's attention asks for dense K and V, in which a query sees its own as they are.
    [case.name for case in CASES if not case.is_encoder_decoder and "falcon" not in case.name],
)
def test_every_family(case: str, name: str) -> None:
    assert_logits_are_those_of_the_simulation(case, name, (50, 9, 9, *[1] * 12))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_simulation_says_something_else_than_full_precision(name: str) -> None:
    """Otherwise the tests above would not see a format that is never used."""
    model = shared_model("llama", dtype=torch.float64)
    ids = torch.randint(3, 90, (1, 150), generator=torch.Generator().manual_seed(0))
    _, simulated = caches(model, name)
    disable(model)
    with torch.no_grad():
        model(ids[:, :149], **{cache_kwarg(): simulated})
        quantized = model(ids[:, 149:], **{cache_kwarg(): simulated}).logits
        exact_logits = model(ids).logits[:, -1:]
    error = (quantized - exact_logits).norm() / exact_logits.norm()
    assert 1e-4 < error < 0.5
