"""`PagedCache(..., compile=True)`: what it cannot do, and says."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_paged_cache import PagedCache, disable, enable
from hf_paged_cache.errors import BackendUnavailable, CacheMismatchError, PagedCacheError, PoolExhausted
from hf_paged_cache.host import compat
from hf_paged_cache.store import static_group
from tests.support.compiling import (
    DEVICE,
    PROMPT_TOKENS,
    ROWS,
    chunk_config,
    compile_config,
    compile_here,
    generate,
    graphs_stay,
    model_of,
    prompt,
    static_cache,
)
from tests.support.models import BLOCK_SIZE, by_name, cache_kwarg

pytest.importorskip("triton")


@pytest.fixture(scope="module", autouse=True)
def _graphs_stay() -> Iterator[None]:
    with graphs_stay():
        yield


@pytest.fixture(autouse=True)
def _compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_here(monkeypatch)


def test_rows_that_run_over_in_a_compiled_step_give_nan_and_an_error_when_the_host_looks() -> None:
    model = model_of("llama")
    cache = static_cache(model, capacity=32)
    step = torch.compile(model, backend="aot_eager", fullgraph=True)
    token = torch.tensor([[3]] * ROWS, device=DEVICE)
    with torch.no_grad():
        model(torch.randint(3, 90, (ROWS, 31), device=DEVICE), **{cache_kwarg(): cache})
        assert step(token, **{cache_kwarg(): cache}).logits.isfinite().all()
        assert step(token, **{cache_kwarg(): cache}).logits.isnan().all()
    with pytest.raises(PoolExhausted, match="fed 33 tokens per row, and a row holds 32"):
        cache.get_seq_length()
    with pytest.raises(PoolExhausted):
        cache.stats()
    cache.reset()
    assert cache.get_seq_length() == 0
    cache.check_integrity()


def test_generation_past_the_rows_capacity_is_refused_before_the_step() -> None:
    model = model_of("llama")
    cache = static_cache(model, capacity=32)
    with pytest.raises(PoolExhausted, match=r"33 tokens in each of 2 rows.*max_tokens=66"):
        generate(model, cache, prompt(tokens=29), max_new_tokens=30, compile_config=compile_config())
    assert cache.get_seq_length() == 32
    cache.check_integrity()


def test_prompt_longer_than_a_row_is_refused_and_the_cache_stays_usable() -> None:
    model = model_of("llama")
    cache = static_cache(model, capacity=16)
    with pytest.raises(PoolExhausted, match="20 tokens in each of 2 rows"):
        generate(model, cache, prompt())
    inputs = prompt(tokens=8)
    want = generate(model, DynamicCache(config=model.config), inputs, max_new_tokens=5)
    assert torch.equal(generate(model, cache, inputs, max_new_tokens=5), want)


def test_number_of_static_rows_cannot_change() -> None:
    model, text = model_of("llama"), prompt()["input_ids"]
    cache, stock = static_cache(model), DynamicCache(config=model.config)
    with torch.no_grad():
        for each in (cache, stock):
            model(text, **{cache_kwarg(): each})
        with pytest.raises(PagedCacheError, match=r"number of rows is fixed: there are 2, and 4"):
            cache.batch_repeat_interleave(2)
        assert cache.batch_size == 2
        got, want = (model(text[:, :2], **{cache_kwarg(): each}).logits for each in (cache, stock))
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


@pytest.mark.full  # what is refused in a graph breaks it into many
def test_another_number_of_rows_in_a_compiled_step_is_refused() -> None:
    model = model_of("llama")
    cache = static_cache(model)
    step = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        model(prompt()["input_ids"], **{cache_kwarg(): cache})
        with pytest.raises(CacheMismatchError, match="the cache holds 2 rows with 2 kv heads"):
            step(torch.tensor([[3]], device=DEVICE), **{cache_kwarg(): cache})


@pytest.mark.full  # what is refused in a graph breaks it into many
def test_compiled_first_forward_after_a_reset_is_refused() -> None:
    model = model_of("llama")
    cache, step = static_cache(model), torch.compile(model, backend="aot_eager")
    token = torch.tensor([[3]] * ROWS, device=DEVICE)
    with torch.no_grad():
        model(prompt()["input_ids"], **{cache_kwarg(): cache})
        step(token, **{cache_kwarg(): cache})
        cache.reset()
        with pytest.raises(CacheMismatchError, match="opens its rows and cannot be compiled"):
            step(token, **{cache_kwarg(): cache})
    assert cache.get_seq_length() == 0


@pytest.mark.full  # what is refused in a graph breaks it into many
def test_prompt_in_chunks_is_refused_because_generate_compiles_the_first_too() -> None:
    model = model_of("llama")
    for cache in (static_cache(model), static_cache(model)):
        with pytest.raises(CacheMismatchError, match="prefill_chunk_size"):
            generate(model, cache, prompt(), prefill_chunk_size=8, compile_config=chunk_config())
    inputs = prompt()
    want = generate(model, DynamicCache(config=model.config), inputs)
    assert torch.equal(generate(model, cache, inputs, compile_config=compile_config()), want)


@pytest.mark.full  # what is refused in a graph breaks it into many
def test_gradients_through_a_compiled_step_are_refused() -> None:
    model = model_of("llama")
    cache, step = static_cache(model), torch.compile(model, backend="aot_eager")
    model(prompt()["input_ids"], **{cache_kwarg(): cache})
    with pytest.raises(CacheMismatchError, match="has no backward"):
        step(torch.tensor([[3]] * ROWS, device=DEVICE), **{cache_kwarg(): cache})
    assert cache.get_seq_length() == PROMPT_TOKENS


@pytest.mark.full
def test_prompt_of_one_token_is_no_proof_that_an_eager_function_is_the_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = by_name("llama-eager").build().to(DEVICE)
    module = sys.modules[type(model).__module__]
    usual = module.eager_attention_forward
    monkeypatch.setattr(
        module,
        "eager_attention_forward",
        lambda *args, scaling, **kwargs: usual(*args, scaling=3 * scaling, **kwargs),
    )
    monkeypatch.setattr(compat, "_eager_functions", {})
    inputs = {"input_ids": torch.tensor([[5]] * ROWS, device=DEVICE)}
    want = generate(model, DynamicCache(config=model.config), inputs)
    assert torch.equal(generate(model, static_cache(model), inputs, compile_config=compile_config()), want)


@pytest.mark.full  # what is refused in a graph breaks it into many
def test_compiled_step_after_an_interrupted_forward_is_refused_until_that_is_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = by_name("llama").build().to(DEVICE)
    cache, step = static_cache(model), torch.compile(model, backend="aot_eager")
    token = torch.tensor([[3]] * ROWS, device=DEVICE)
    ids = prompt()["input_ids"]
    with torch.no_grad():
        model(ids, **{cache_kwarg(): cache})
        with monkeypatch.context() as patch:
            patch.setattr(model.model.layers[1], "forward", lambda *args, **kwargs: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(token, **{cache_kwarg(): cache})
        with pytest.raises(CacheMismatchError, match="interrupted"):
            step(token, **{cache_kwarg(): cache})
        assert cache.get_seq_length() == ids.shape[1]  # whoever looks takes it back
        got = step(token, **{cache_kwarg(): cache}).logits
        want = model(torch.cat([ids, token], dim=1), use_cache=False).logits[:, -1:]
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


@pytest.mark.full
def test_first_forward_that_was_interrupted_is_taken_back_also_before_the_first_full_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = by_name("gemma2").build().to(DEVICE)  # its first layer has a window
    cache, inputs = static_cache(model), prompt()
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(model.model.layers[0].mlp, "forward", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(inputs["input_ids"], **{cache_kwarg(): cache})
    assert cache.get_seq_length() == cache.stats().tokens == 0  # whoever looks takes it back
    want = generate(model, DynamicCache(config=model.config), inputs)
    assert torch.equal(generate(model, cache, inputs, compile_config=compile_config()), want)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"num_key_value_heads": 4}, "2 kv heads, head_dim 16", marks=pytest.mark.full),
        pytest.param({"dtype": torch.bfloat16}, "torch.float32; got K", marks=pytest.mark.full),
        ({}, "were not computed by this model"),
    ],
    ids=["heads", "dtype", "weights"],
)
def test_compiled_step_of_another_model_is_refused(changes: dict[str, Any], message: str) -> None:
    model = model_of("llama")
    cache = static_cache(model)
    config = copy.deepcopy(model.config)
    config.num_key_value_heads = changes.get("num_key_value_heads", config.num_key_value_heads)
    config._attn_implementation_internal = "sdpa"
    other = type(model)(config).to(DEVICE, changes.get("dtype", torch.float32)).eval()
    enable(other)
    with torch.no_grad():
        model(prompt()["input_ids"], **{cache_kwarg(): cache})
        with pytest.raises(CacheMismatchError, match=message):
            torch.compile(other, backend="aot_eager")(
                torch.tensor([[3]] * ROWS, device=DEVICE), **{cache_kwarg(): cache}
            )


def test_rows_keep_their_share_of_the_pool_when_less_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    cache = PagedCache(model, block_size=BLOCK_SIZE, compile=True)
    with torch.no_grad():
        model(prompt()["input_ids"], **{cache_kwarg(): cache})
        capacity = cache.get_max_length()
        cache.reset()
        monkeypatch.setattr("hf_paged_cache.store.capacity.free_memory_bytes", lambda device: 1 << 16)
        model(prompt()["input_ids"], **{cache_kwarg(): cache})
    assert cache.get_max_length() == capacity == model.config.max_position_embeddings


@pytest.mark.full
def test_model_that_paged_attention_was_taken_from_still_decodes() -> None:
    model = by_name("llama").build().to(DEVICE)
    inputs = prompt()
    want = generate(model, DynamicCache(config=model.config), inputs)
    cache = static_cache(model)
    with torch.no_grad():
        model(inputs["input_ids"], **{cache_kwarg(): cache})
    cache.reset()
    disable(model)
    assert not cache.is_compileable
    assert torch.equal(generate(model, cache, inputs, compile_config=compile_config()), want)
    assert not PagedCache(by_name("falcon").build(), compile=True).is_compileable


def test_compile_without_the_triton_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_PAGED_CACHE_BACKEND", "torch")
    model = model_of("llama")
    with pytest.raises(BackendUnavailable, match=r"compile=True needs the Triton kernels.*layer 0"):
        generate(model, static_cache(model), prompt())


@pytest.mark.parametrize("compiled", [False, True])
def test_cache_is_compileable_only_if_asked_and_on_a_device_where_it_pays(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("llama")
    assert PagedCache(model, compile=compiled).is_compileable == compiled
    monkeypatch.setattr(static_group, "DEVICES", frozenset({"xpu"}))
    cache = PagedCache(model, compile=compiled)
    assert not cache.is_compileable
    inputs = prompt()
    want = generate(model, DynamicCache(config=model.config), inputs)
    assert torch.equal(generate(model, cache, inputs), want)
    assert not cache.is_compileable


def test_encoder_decoder_models_are_not_compiled() -> None:
    model = by_name("t5").build()
    assert not PagedCache(model, compile=True).is_compileable


def test_compile_must_be_a_bool() -> None:
    with pytest.raises(PagedCacheError, match="compile must be True or False, got 'yes'"):
        PagedCache(model_of("llama"), compile="yes")  # type: ignore[arg-type]
