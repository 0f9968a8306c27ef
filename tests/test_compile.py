"""`PagedCache(..., compile=True)`: decode steps that `torch.compile` traces.

Compiled steps call the Triton kernels, so without a GPU these tests run in Triton's interpreter and tell the
cache that the CPU is a device where compiling pays."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import CompileConfig, DynamicCache

from hf_paged_cache import PagedCache, compat, disable, enable, static
from hf_paged_cache.errors import BackendUnavailable, CacheMismatchError, PagedCacheError, PoolExhausted
from tests.models import BLOCK_SIZE, by_name, cache_kwarg, host_cache, paged_cache, shared_model

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, CAPACITY = 2, 64
PROMPT_TOKENS = 20


@pytest.fixture(autouse=True)
def _compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "DEVICES", frozenset({DEVICE}))
    monkeypatch.setenv("HF_PAGED_CACHE_BACKEND", "triton")
    torch._dynamo.reset()


def model_of(name: str) -> Any:
    return shared_model(name).to(DEVICE)


def static_cache(model: Any, *, rows: int = ROWS, capacity: int = CAPACITY) -> PagedCache:
    return PagedCache(model, block_size=BLOCK_SIZE, max_tokens=rows * capacity, compile=True)


def compile_config() -> CompileConfig:
    config = CompileConfig(backend="aot_eager", mode=None, fullgraph=True)
    config._compile_all_devices = True
    return config


def chunk_config() -> CompileConfig:
    config = compile_config()
    config.fullgraph = False  # as it is by default; otherwise the compiler's own error comes first
    return config


def prompt(rows: int = ROWS, tokens: int = PROMPT_TOKENS) -> dict[str, Any]:
    """Left-padded prompts of different lengths."""
    ids = torch.randint(3, 90, (rows, tokens), device=DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: Any, cache: Any, inputs: dict[str, Any], **options: Any) -> torch.Tensor:
    settings = {"max_new_tokens": 8, "do_sample": False} | options
    tokens: torch.Tensor = model.generate(**inputs, **settings, **{cache_kwarg(): cache})
    return tokens


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma2", "gpt-oss"])
def test_compiled_generation_gives_the_tokens_of_dynamic_cache(name: str) -> None:
    model, inputs = model_of(name), prompt()
    want = generate(model, DynamicCache(config=model.config), inputs)
    cache = static_cache(model)
    assert cache.is_compileable
    torch._dynamo.utils.counters.clear()
    assert torch.equal(generate(model, cache, inputs, compile_config=compile_config()), want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1, "nothing was compiled"
    assert not torch._dynamo.utils.counters["graph_break"]
    assert cache.get_seq_length() == want.shape[1] - 1
    cache.check_integrity()


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_one_graph_serves_every_step_and_the_next_prompts_too(name: str) -> None:
    model, inputs = model_of(name), prompt()
    cache = static_cache(model)
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
    want = generate(model, DynamicCache(config=model.config), inputs, max_new_tokens=6)
    got = generate(model, cache, inputs, max_new_tokens=6, compile_config=compile_config())
    assert torch.equal(got, want)


def test_compiled_beams_give_the_tokens_of_dynamic_cache() -> None:
    model, inputs = model_of("llama"), prompt()
    options = {"num_beams": 3, "max_new_tokens": 5}
    want = generate(model, DynamicCache(config=model.config), inputs, **options)
    cache = static_cache(model, rows=3 * ROWS)
    got = generate(model, cache, inputs, **options, compile_config=compile_config())
    assert torch.equal(got, want)
    cache.check_integrity()


def test_prompt_lookup_rolls_static_rows_back() -> None:
    model = model_of("llama")
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7]], device=DEVICE)}
    options = {"prompt_lookup_num_tokens": 4, "max_new_tokens": 16}
    want = generate(model, DynamicCache(config=model.config), inputs, **options)
    cache = static_cache(model, rows=1)
    assert torch.equal(generate(model, cache, inputs, **options), want)
    cache.check_integrity()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss"])
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
    inputs = prompt()
    want = generate(model, DynamicCache(config=model.config), inputs)
    cache = static_cache(model, capacity=32)
    assert torch.equal(generate(model, cache, inputs, compile_config=compile_config()), want)
    group = cache._state.groups[0]
    assert isinstance(group, static.StaticGroup)
    assert group.vetted == {0}  # the others divide their scores
    step = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for _ in range(6):
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
    assert cache._state.step_end == PROMPT_TOKENS
    assert cache.get_seq_length() == cache.stats().tokens == cache._state.step_end == PROMPT_TOKENS + 4
    for layer, stored in zip(cache.layers, dynamic.layers, strict=True):
        torch.testing.assert_close(layer.keys.clone(), stored.keys, atol=2e-5, rtol=1e-4)


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
        generate(model, cache, prompt(), max_new_tokens=30, compile_config=compile_config())
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


def test_other_batch_after_a_reset_shares_the_pool_anew() -> None:
    model = model_of("mistral")
    cache = static_cache(model)
    for rows in (2, 4, 1):
        inputs = prompt(rows=rows)
        want = generate(model, DynamicCache(config=model.config), inputs, max_new_tokens=6)
        assert torch.equal(
            generate(model, cache, inputs, max_new_tokens=6, compile_config=compile_config()), want
        )
        cache.check_integrity()
        cache.reset()


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


def test_crop_and_reorder_of_static_rows_are_those_of_dynamic_cache() -> None:
    model = model_of("mistral")
    ids = torch.randint(3, 90, (3, 30), device=DEVICE)
    caches = static_cache(model, rows=3), DynamicCache(config=model.config)
    logits = []
    for cache in caches:
        if isinstance(cache, DynamicCache) and not isinstance(cache, PagedCache):
            for layer in cache.layers:
                if hasattr(layer, "activate_past_recording"):
                    layer.activate_past_recording()
        with torch.no_grad():
            model(ids, **{cache_kwarg(): cache})
            cache.reorder_cache(torch.tensor([2, 2, 0], device=DEVICE))
            logits.append(model(ids[:, :2], **{cache_kwarg(): cache}).logits)
    torch.testing.assert_close(*logits, atol=2e-5, rtol=1e-4)
    cache = caches[0]
    cache.crop(-12 if _crops_with_minus() else 20)
    assert cache.get_seq_length() == 20
    cache.check_integrity()


def test_number_of_static_rows_cannot_change() -> None:
    model = model_of("llama")
    cache = static_cache(model)
    with torch.no_grad():
        model(prompt()["input_ids"], **{cache_kwarg(): cache})
    with pytest.raises(PagedCacheError, match=r"number of rows is fixed: there are 2, and 4"):
        cache.batch_repeat_interleave(2)
    assert cache.batch_size == 2


def test_another_number_of_rows_in_a_compiled_step_is_refused() -> None:
    model = model_of("llama")
    cache = static_cache(model)
    step = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        model(prompt()["input_ids"], **{cache_kwarg(): cache})
        with pytest.raises(CacheMismatchError, match="the cache holds 2 rows with 2 kv heads"):
            step(torch.tensor([[3]], device=DEVICE), **{cache_kwarg(): cache})


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


def test_prompt_in_chunks_is_refused_because_generate_compiles_the_first_too() -> None:
    model = model_of("llama")
    for cache in (static_cache(model), static_cache(model)):
        with pytest.raises(CacheMismatchError, match="prefill_chunk_size"):
            generate(model, cache, prompt(), prefill_chunk_size=8, compile_config=chunk_config())
    inputs = prompt()
    want = generate(model, DynamicCache(config=model.config), inputs)
    assert torch.equal(generate(model, cache, inputs, compile_config=compile_config()), want)


def test_gradients_through_a_compiled_step_are_refused() -> None:
    model = model_of("llama")
    cache, step = static_cache(model), torch.compile(model, backend="aot_eager")
    model(prompt()["input_ids"], **{cache_kwarg(): cache})
    with pytest.raises(CacheMismatchError, match="has no backward"):
        step(torch.tensor([[3]] * ROWS, device=DEVICE), **{cache_kwarg(): cache})
    assert cache.get_seq_length() == PROMPT_TOKENS


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
        with pytest.raises(CacheMismatchError, match="interrupted: it is taken back now"):
            model(token, **{cache_kwarg(): cache})
        got = step(token, **{cache_kwarg(): cache}).logits
        want = model(torch.cat([ids, token], dim=1), use_cache=False).logits[:, -1:]
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 4}, "2 kv heads, head_dim 16"),
        ({"dtype": torch.bfloat16}, "torch.float32; got K"),
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


def test_prompt_of_one_token_opens_other_rows_after_a_reset() -> None:
    model = model_of("llama")
    cache = static_cache(model)
    generate(model, cache, prompt())
    cache.reset()
    inputs = {
        "input_ids": torch.tensor([[5]], device=DEVICE),
        "attention_mask": torch.ones(1, 1, device=DEVICE),
    }
    want = generate(model, DynamicCache(config=model.config), inputs)
    assert torch.equal(generate(model, cache, inputs, compile_config=compile_config()), want)


def test_rows_keep_their_share_of_the_pool_when_less_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    cache = PagedCache(model, block_size=BLOCK_SIZE, compile=True)
    with torch.no_grad():
        model(prompt()["input_ids"], **{cache_kwarg(): cache})
        capacity = cache.get_max_length()
        cache.reset()
        monkeypatch.setattr("hf_paged_cache.capacity.free_memory_bytes", lambda device: 1 << 16)
        model(prompt()["input_ids"], **{cache_kwarg(): cache})
    assert cache.get_max_length() == capacity == model.config.max_position_embeddings


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
    monkeypatch.setattr(static, "DEVICES", frozenset({"xpu"}))
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


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
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
