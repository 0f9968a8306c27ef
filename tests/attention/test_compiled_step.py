"""`PagedCache(..., compile=True)`: traced decode steps give the tokens of `DynamicCache`."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache

from hf_paged_cache.host import compat
from hf_paged_cache.store import static_group
from tests.support.compiling import (
    DEVICE,
    PROMPT_TOKENS,
    ROWS,
    compile_config,
    compile_here,
    generate,
    graphs_stay,
    model_of,
    prompt,
    static_cache,
)
from tests.support.models import by_name, cache_kwarg, host_cache, paged_cache
from tests.support.tails import few

pytest.importorskip("triton")

from hf_paged_cache.kernels.call import LayerBlocks
from hf_paged_cache.kernels.triton import launch


@pytest.fixture(scope="module", autouse=True)
def _graphs_stay() -> Iterator[None]:
    with graphs_stay():
        yield


@pytest.fixture(autouse=True)
def _compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_here(monkeypatch)


@pytest.mark.parametrize(
    ("name", "block_sizes"),
    [
        ("gemma2", {16, 64}),
        *(
            pytest.param(name, {16}, marks=pytest.mark.full)
            for name in ("llama", "mistral", "qwen3", "gpt-oss")
        ),
    ],
)
def test_compiled_generation_gives_the_tokens_of_dynamic_cache(name: str, block_sizes: set[int]) -> None:
    model, inputs = model_of(name), prompt()
    want = generate(model, DynamicCache(config=model.config), inputs)
    cache = static_cache(model, block_size=max(block_sizes))
    assert cache.is_compileable
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert torch.equal(generate(model, cache, inputs, compile_config=compile_config()), want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1, "nothing was compiled"
    assert not torch._dynamo.utils.counters["graph_break"]
    assert cache.get_seq_length() == want.shape[1] - 1
    assert {group.block_size for group in cache._state.groups} == block_sizes
    assert {group.capacity_tokens for group in cache._state.layer_groups.static} == {64}
    cache.check_integrity()


@pytest.mark.full
def test_rows_with_blocks_of_two_sizes_hold_what_was_asked_for() -> None:
    """33 tokens in each of two rows are 3 blocks of 16, and 2 of 32."""
    model = model_of("gemma2")
    cache, ids = static_cache(model, capacity=33, block_size=32), torch.randint(3, 90, (2, 33), device=DEVICE)
    with torch.no_grad():
        want, got = (
            model(ids, **{cache_kwarg(): c}).logits for c in (DynamicCache(config=model.config), cache)
        )
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert cache._state.layer_groups.row_capacity_tokens == 48
    cache.check_integrity()


@pytest.mark.parametrize("name", few(["mistral", "gemma2"], {"mistral"}))
def test_one_graph_serves_every_step_and_the_next_prompts_too(name: str) -> None:
    model, inputs = model_of(name), prompt()
    cache = static_cache(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    generate(model, cache, inputs, compile_config=compile_config())
    cache.reset()
    inputs = prompt()
    got = generate(model, cache, inputs, compile_config=compile_config())
    assert torch.equal(got, generate(model, DynamicCache(config=model.config), inputs))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_second_turn_over_compiled_steps_gives_the_tokens_of_dynamic_cache() -> None:
    model, inputs = model_of("mistral"), prompt()
    cache = static_cache(model)
    said = generate(model, cache, inputs, compile_config=compile_config())
    ids = torch.cat([said, torch.randint(3, 90, (ROWS, 7), device=DEVICE)], dim=1)
    mask = torch.ones_like(ids)
    mask[:, :PROMPT_TOKENS] = inputs["attention_mask"]
    inputs = {"input_ids": ids, "attention_mask": mask}
    want = generate(model, DynamicCache(config=model.config), inputs, max_new_tokens=3)
    got = generate(model, cache, inputs, max_new_tokens=3, compile_config=compile_config())
    assert torch.equal(got, want)


@pytest.mark.full
def test_compiled_beams_give_the_tokens_of_dynamic_cache() -> None:
    model, inputs = model_of("llama"), prompt()
    options = {"num_beams": 3, "max_new_tokens": 4}
    want = generate(model, DynamicCache(config=model.config), inputs, **options)
    cache = static_cache(model, rows=3 * ROWS)
    got = generate(model, cache, inputs, **options, compile_config=compile_config())
    assert torch.equal(got, want)
    cache.check_integrity()


def test_prompt_lookup_rolls_static_rows_back() -> None:
    model = model_of("llama")
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7]], device=DEVICE)}
    options = {"prompt_lookup_num_tokens": 4, "max_new_tokens": 10}
    want = generate(model, DynamicCache(config=model.config), inputs, **options)
    cache = static_cache(model, rows=1)
    assert torch.equal(generate(model, cache, inputs, **options), want)
    cache.check_integrity()


@pytest.mark.slow
def test_inductor_writes_to_the_pools_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = model_of("llama"), prompt()
    want = generate(model, DynamicCache(config=model.config), inputs)
    cache, written = static_cache(model), set()
    write = launch.write

    def recorded(blocks: LayerBlocks, *args: Any, **options: Any) -> None:
        written.update(pool.untyped_storage().data_ptr() for pool in (blocks.keys, blocks.values))
        write(blocks, *args, **options)

    monkeypatch.setattr(launch, "write", recorded)
    config = compile_config()
    config.backend = "inductor"
    assert torch.equal(generate(model, cache, inputs, compile_config=config), want)
    (pool,) = cache._state.groups[0].pools
    assert written == {pool.keys.untyped_storage().data_ptr(), pool.values.untyped_storage().data_ptr()}


@pytest.mark.parametrize("name", few(["llama", "gemma2", "gpt-oss"], {"llama"}))
def test_graph_holds_write_and_attend_for_each_layer_and_no_dense_history(name: str) -> None:
    model = model_of(name)
    called: list[str] = []

    def record(graph: torch.fx.GraphModule, _: Any) -> Any:
        called.extend(str(node.target) for node in graph.graph.nodes if "hf_paged_cache" in str(node.target))
        return graph.forward

    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_compiler

    cache = static_cache(model)
    step = torch.compile(model, backend=aot_autograd(fw_compiler=make_boxed_compiler(record)), fullgraph=True)
    with torch.no_grad():
        model(prompt()["input_ids"], **{cache_kwarg(): cache})
        step(torch.tensor([[3]] * ROWS, device=DEVICE), **{cache_kwarg(): cache})
    attends = [name for name in called if "attend" in name]
    assert len(attends) == model.config.num_hidden_layers
    assert not [name for name in called if "gather" in name]


@pytest.mark.full
def test_eager_function_of_a_models_own_is_compiled_over_dense_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = by_name("llama-eager").build().to(DEVICE)
    module = sys.modules[type(model).__module__]
    usual = module.eager_attention_forward

    def own(attention: Any, *args: Any, scaling: float, **kwargs: Any) -> Any:
        return usual(attention, *args, scaling=scaling / (1 + attention.layer_idx), **kwargs)

    monkeypatch.setattr(module, "eager_attention_forward", own)
    monkeypatch.setattr(compat, "_eager_functions", {})
    inputs = prompt(tokens=28)
    want = generate(model, DynamicCache(config=model.config), inputs)
    cache = static_cache(model, capacity=32)
    assert torch.equal(generate(model, cache, inputs, compile_config=compile_config()), want)
    group = cache._state.groups[0]
    assert isinstance(group, static_group.StaticGroup)
    assert group.vetted == {0}  # the others divide their scores
    step = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for _ in range(2):  # one more than there is room for
            logits = step(torch.tensor([[3]] * ROWS, device=DEVICE), **{cache_kwarg(): cache}).logits
    assert logits.isnan().all()


def test_compiled_steps_count_on_the_device_and_the_host_learns_it_when_asked() -> None:
    model = model_of("llama")
    cache, counter = static_cache(model), CompileCounterWithBackend("aot_eager")
    step = torch.compile(model, backend=counter, fullgraph=True)
    inputs, dynamic = prompt()["input_ids"], DynamicCache(config=model.config)
    with torch.no_grad():
        for forward, store in ((model, cache), (model, dynamic)):
            forward(inputs, **{cache_kwarg(): store})
        for _ in range(4):
            token = torch.randint(3, 90, (ROWS, 1), device=DEVICE)
            got = step(token, **{cache_kwarg(): cache}).logits
            want = model(token, **{cache_kwarg(): dynamic}).logits
            torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
    assert counter.frame_count == 1
    assert cache._state.rows.end == PROMPT_TOKENS
    assert cache.get_seq_length() == cache.stats().tokens == cache._state.rows.end == PROMPT_TOKENS + 4
    for layer, stored in zip(cache.layers, dynamic.layers, strict=True):
        torch.testing.assert_close(layer.keys.clone(), stored.keys, atol=2e-5, rtol=1e-4)


@pytest.mark.full
def test_other_batch_after_a_reset_shares_the_pool_anew() -> None:
    model = model_of("llama")
    cache = static_cache(model)
    for rows in (1, 3):
        inputs = prompt(rows=rows)
        want = generate(model, DynamicCache(config=model.config), inputs, max_new_tokens=3)
        assert torch.equal(
            generate(model, cache, inputs, max_new_tokens=3, compile_config=compile_config()), want
        )
        cache.check_integrity()
        cache.reset()


@pytest.mark.full
def test_deep_copy_of_static_rows_goes_its_own_way() -> None:
    model = model_of("llama")
    cache, step = static_cache(model), torch.compile(model, backend="aot_eager", fullgraph=True)
    token = torch.tensor([[3]] * ROWS, device=DEVICE)
    with torch.no_grad():
        model(prompt()["input_ids"], **{cache_kwarg(): cache})
        twin = copy.deepcopy(cache)
        want = step(token, **{cache_kwarg(): cache}).logits
        assert (cache.get_seq_length(), twin.get_seq_length()) == (PROMPT_TOKENS + 1, PROMPT_TOKENS)
        assert torch.equal(step(token, **{cache_kwarg(): twin}).logits, want)


@pytest.mark.full
def test_crop_and_reorder_of_static_rows_are_those_of_dynamic_cache() -> None:
    model = model_of("mistral")
    ids = torch.randint(3, 90, (3, 30), device=DEVICE)
    caches = static_cache(model, rows=3), DynamicCache(config=model.config)
    logits = []
    for cache in caches:
        with torch.no_grad():
            model(ids, **{cache_kwarg(): cache})
            cache.reorder_cache(torch.tensor([2, 2, 0], device=DEVICE))
            logits.append(model(ids[:, :2], **{cache_kwarg(): cache}).logits)
    torch.testing.assert_close(*logits, atol=2e-5, rtol=1e-4)
    cache = caches[0]
    cache.crop(-12 if _crops_with_minus() else 20)
    assert cache.get_seq_length() == 20
    cache.check_integrity()


def test_prompt_of_one_token_opens_other_rows_after_a_reset() -> None:
    model = model_of("llama")
    cache = static_cache(model)
    generate(model, cache, prompt(), max_new_tokens=2)
    cache.reset()
    inputs = {
        "input_ids": torch.tensor([[5]], device=DEVICE),
        "attention_mask": torch.ones(1, 1, device=DEVICE),
    }
    want = generate(model, DynamicCache(config=model.config), inputs)
    assert torch.equal(generate(model, cache, inputs, compile_config=compile_config()), want)


@pytest.mark.parametrize("name", few(["llama", "mistral", "gemma2"], {"mistral"}))
def test_generation_with_the_triton_kernels_and_no_compiler_gives_the_tokens_of_the_default_cache(
    name: str,
) -> None:
    model, inputs = model_of(name), prompt()
    want = generate(model, host_cache(model), inputs)
    cache = paged_cache(model)
    assert torch.equal(generate(model, cache, inputs), want)
    assert cache.stats().backend == "triton"


def _crops_with_minus() -> bool:
    return not compat._CROP_KEEPS_WHEN_POSITIVE
