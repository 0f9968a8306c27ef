"""A plan says the bytes that the real cache then has, for every kind of layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from eval.zoo import registry, tiny
from hf_paged_cache import MemoryFootprint, PagedCache, plan_memory
from tests.support.models import by_name, cache_kwarg, shared_model

BLOCK = 16
KINDS = {
    "cpmant": "puts tokens of its own into rows",
    "deepseek_v3": "latent attention, K and V of unlike dims",
    "falcon_h1": "attention and states in one layer",
    "gemma2": "windows in every second layer",
    "gemma3n_text": "layers that read the K and V of others",
    "gemma4_text": "layers of two head dims",
    "glm_moe_dsa": "an indexer",
    "llama": "grouped heads",
    "mamba": "states only",
    "mimo_v2_flash": "V narrower than K",
    "mistral": "windows only",
    "mpt": "as many heads of K as of queries",
    "qwen3_next": "recurrent layers between attention",
    "zaya": "states, attention and windows",
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def real(model: Any, batch: int, context: int, **settings: Any) -> MemoryFootprint:
    cache = PagedCache(model, key_error_guard="off", **settings)
    with torch.no_grad():
        model(torch.randint(10, 60, (batch, context)), **{cache_kwarg(): cache}, use_cache=True)
    return cache.memory_footprint()


@pytest.mark.parametrize("name", KINDS, ids=lambda name: f"{name}: {KINDS[name]}")
def test_pools_and_states_of_a_type_are_as_planned_from_its_config(name: str) -> None:
    entry = registry.entries().get(name)
    if entry is None:
        pytest.skip(f"the installed transformers has no {name}")
    model = tiny.build(entry)
    plan = plan_memory(model.config, context=70, batch=3, dtype="float32", block_size=BLOCK, group_size=8)
    for name_of_format in ("auto", "int8", "int4"):
        has = real(
            model, 3, 70,
            kv_cache_dtype=name_of_format, block_size=BLOCK, group_size=8, max_tokens=plan.max_tokens,
        )  # fmt: skip
        planned = plan.of(name_of_format)
        assert (planned.pool_bytes, planned.state_bytes) == (has.pool_bytes, has.host_bytes)


@pytest.mark.parametrize(
    "kv_cache_dtype", ["auto", "int8", "fp8", "k8v4", "int4", "int8_block", "int4_group"]
)
@pytest.mark.parametrize(("batch", "context"), [(1, 1), (1, 64), (2, 65), (5, 40)])
def test_pools_are_as_planned_for_any_rows_and_tokens(kv_cache_dtype: str, batch: int, context: int) -> None:
    model = shared_model("gemma3")
    settings = {"kv_cache_dtype": kv_cache_dtype, "block_size": BLOCK, "group_size": 8}
    plan = plan_memory(model, context=context, batch=batch, **settings)
    has = real(model, batch, context, max_tokens=batch * context, **settings)
    assert plan.pool_bytes == has.pool_bytes
    assert plan.max_tokens == batch * context


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_dtype": "int4", "layer_dtypes": {0: "int8", 2: "auto"}},
        {"kv_cache_dtype": "int4", "residual_length": 48, "sink_tokens": 32},
        {"kv_cache_dtype": "int8", "residual_length": 32},
        {"kv_cache_dtype": "int4_group", "group_size": {0: 8, 1: 4, 2: 16}},
        {"kv_cache_dtype": "adaptive"},
        {"block_size": 128},
    ],
    ids=str,
)
@pytest.mark.parametrize("context", [100, 600])
def test_pools_are_as_planned_for_any_settings(settings: dict[str, Any], context: int) -> None:
    model = shared_model("llama")
    settings = {"block_size": BLOCK, "group_size": 8} | settings
    warns = pytest.warns(UserWarning, match="max_position_embeddings") if context > 256 else nullcontext()
    with warns:
        plan = plan_memory(model, context=context, batch=2, **settings)
    assert plan.pool_bytes == real(model, 2, context, max_tokens=2 * context, **settings).pool_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pools_are_as_planned_in_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    model = by_name("llama").build(dtype=dtype)
    plan = plan_memory(model, context=40, batch=2, block_size=BLOCK)
    assert plan.dtype == str(dtype).removeprefix("torch.")
    assert plan.pool_bytes == real(model, 2, 40, block_size=BLOCK, max_tokens=80).pool_bytes
    assert plan.weight_bytes == sum(p.nbytes for p in model.parameters())


@pytest.mark.filterwarnings("ignore:a context of")
def test_a_cache_of_the_largest_context_fits_and_one_more_token_does_not() -> None:
    config = shared_model("llama").config
    memory = 1_000_000
    arguments: dict[str, Any] = {"weights": 0, "memory": memory, "block_size": BLOCK, "group_size": 8}
    at = plan_memory(config, context=16, batch=2, **arguments)
    for one in at.formats:
        assert one.max_context is not None
        assert one.max_batch is not None
        for context, batch, fits in (
            (one.max_context, 2, True),
            (one.max_context + 1, 2, False),
            (16, one.max_batch, True),
            (16, one.max_batch + 1, False),
        ):
            other = plan_memory(config, context=context, batch=batch, **arguments)
            assert other.of(one.kv_cache_dtype).fits is fits
            assert (other.of(one.kv_cache_dtype).cache_bytes <= memory) is fits


def test_planning_leaves_config_and_model_alone() -> None:
    model = by_name("llama").build()
    before = model.config.to_json_string(use_diff=False), model.config._attn_implementation
    weights = [p.clone() for p in model.parameters()]
    plan_memory(model.config, context=40)
    plan_memory(model, context=40)
    assert (model.config.to_json_string(use_diff=False), model.config._attn_implementation) == before
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
