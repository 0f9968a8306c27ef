"""Paged attention is switched on for one model, reversibly, and a patched model is otherwise as before."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    EncoderDecoderCache,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from hf_paged_cache import PagedCache, PagedCacheError, disable, enable, paged_attention
from hf_paged_cache.attention.paged_attention import NAME_PREFIX
from hf_paged_cache.host.compat import _eager_functions
from tests.support.models import CASES, by_name, cache_kwarg, host_cache, paged_cache

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": 1,
}


def llama(**kwargs: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **kwargs)).eval()


def gemma() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Gemma2Config(**SIZES, query_pre_attn_scalar=16, sliding_window=16, attn_implementation="eager")
    return Gemma2ForCausalLM(config).eval()


def padded_ids() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(1, 97, (2, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    return ids, mask


def greedy(model: PreTrainedModel, **kwargs: Any) -> torch.Tensor:
    ids, mask = padded_ids()
    return model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, **kwargs)


MODELS = {"sdpa": llama, "eager": gemma}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return MODELS[request.param]()


def test_constructing_a_cache_activates_and_disable_restores(model: PreTrainedModel) -> None:
    before = model.config._attn_implementation
    PagedCache(model)
    assert model.config._attn_implementation == NAME_PREFIX + before
    PagedCache(model.config)
    assert model.config._attn_implementation == NAME_PREFIX + before
    disable(model)
    assert model.config._attn_implementation == before
    disable(model)
    assert model.config._attn_implementation == before


def test_importing_activates_nothing(model: PreTrainedModel) -> None:
    assert not model.config._attn_implementation.startswith(NAME_PREFIX)


def test_context_manager_restores_even_after_an_error(model: PreTrainedModel) -> None:
    before = model.config._attn_implementation

    def fail_inside() -> None:
        with paged_attention(model):
            assert model.config._attn_implementation == NAME_PREFIX + before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert model.config._attn_implementation == before


def test_context_manager_leaves_an_active_model_active(model: PreTrainedModel) -> None:
    enable(model)
    with paged_attention(model):
        pass
    assert model.config._attn_implementation.startswith(NAME_PREFIX)


def test_patched_model_computes_the_same_logits_with_other_caches(model: PreTrainedModel) -> None:
    ids, mask = padded_ids()

    def logits() -> list[torch.Tensor]:
        found = [model(ids, attention_mask=mask, use_cache=False).logits]
        for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=40)):
            first = model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
            longer = torch.cat([mask, mask.new_ones(2, 3)], dim=1)
            second = model(ids[:, :3], attention_mask=longer, past_key_values=cache, use_cache=True)
            found += [first.logits, second.logits]
        return found

    with torch.no_grad():
        want = logits()
        enable(model)
        got = logits()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_patched_model_generates_the_same_without_our_cache(model: PreTrainedModel) -> None:
    want = greedy(model)
    enable(model)
    assert torch.equal(greedy(model), want)
    assert torch.equal(greedy(model, num_beams=2), greedy(model, num_beams=2))


def test_patched_model_trains_as_before(model: PreTrainedModel) -> None:
    ids, mask = padded_ids()

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model.train()
        torch.manual_seed(3)
        model(ids, attention_mask=mask, labels=ids).loss.backward()
        model.eval()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    want = gradients()
    enable(model)
    got = gradients()
    assert len(got) == len(want) > 0
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_switching_the_implementation_afterwards_still_works(model: PreTrainedModel) -> None:
    want = greedy(model, past_key_values=PagedCache(model, block_size=16))
    for name in ("eager", "sdpa"):
        if name == "sdpa" and isinstance(model, Gemma2ForCausalLM):
            continue  # the host refuses soft-capping under sdpa
        cache = PagedCache(model, block_size=16)
        model.set_attn_implementation(name)
        assert torch.equal(greedy(model, past_key_values=cache), want)


def test_saved_config_and_reloaded_model_never_name_us(model: PreTrainedModel, tmp_path: Path) -> None:
    before = model.config.to_json_string(use_diff=False)
    enable(model)
    assert model.config.to_json_string(use_diff=False) == before
    model.save_pretrained(tmp_path)
    assert all(
        NAME_PREFIX not in json.dumps(json.loads(file.read_text())) for file in tmp_path.glob("*.json")
    )
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not again.config._attn_implementation.startswith(NAME_PREFIX)


def test_a_copy_of_a_patched_config_builds_a_working_model(model: PreTrainedModel) -> None:
    enable(model)
    twin = type(model)(copy.deepcopy(model.config)).eval()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(greedy(twin), greedy(model))
    disable(twin)
    assert not twin.config._attn_implementation.startswith(NAME_PREFIX)


def test_a_pickled_model_names_the_attention_it_had_and_a_copied_one_keeps_ours() -> None:
    """So it can be loaded where this package is not, or is not imported."""
    model = llama()
    before = pickle.dumps(model.config)
    enable(model)
    assert pickle.dumps(model.config) == before
    contents = pickle.dumps(model)
    assert b"hf_paged_cache" not in contents
    again = pickle.loads(contents)
    assert again.config._attn_implementation == "sdpa"
    assert torch.equal(greedy(again, past_key_values=PagedCache(again)), greedy(model))
    for copied in (copy.copy(model.config), copy.deepcopy(model.config)):
        assert copied._attn_implementation == model.config._attn_implementation == NAME_PREFIX + "sdpa"


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_hosts_continuous_batching_takes_a_model_that_a_cache_was_made_for(implementation: str) -> None:
    """Where the host itself refuses to run it, as without psutil on a CPU, it refuses as before."""
    found = []
    for is_paged in (False, True):
        model = llama(attn_implementation=implementation)
        if is_paged:
            cache = PagedCache(model, block_size=16)
        told = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
        room = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=64, use_async_batching=False)
        results = model.generate_batch(
            [[5, 6, 7, 8], [9, 10]], told, continuous_batching_config=room, warmup=False
        )
        found.append([tokens for result in results.values() if (tokens := result.generated_tokens)])
        assert model.config._attn_implementation == implementation
    assert found[0] == found[1]
    assert torch.equal(greedy(model, past_key_values=cache), greedy(model))


def test_models_with_attention_code_of_their_own_are_left_alone_and_still_served() -> None:
    torch.manual_seed(0)
    config = FalconConfig(
        vocab_size=97,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
        eos_token_id=None,
    )
    model = FalconForCausalLM(config).eval()
    before = model.config._attn_implementation
    want = greedy(model)
    assert torch.equal(greedy(model, past_key_values=PagedCache(model, max_tokens=1024)), want)
    assert model.config._attn_implementation == before
    assert not enable(model)


@pytest.mark.parametrize("name", ["llama", "gemma3", "bart"])
def test_flex_attention_gets_tensors_that_it_can_trace(name: str) -> None:
    """It runs without its compiler here, since that takes minutes; lazy tensors are an error then too."""
    model = by_name(name).build()
    model.set_attn_implementation("flex_attention")
    torch.compiler.set_stance("force_eager")
    try:
        want, got = (
            greedy(model, **{cache_kwarg(): cache})
            for cache in (host_cache(model), paged_cache(model, cross="dynamic"))
        )
    finally:
        torch.compiler.set_stance("default")
    assert torch.equal(got, want)


def test_a_decoder_with_its_own_copy_of_the_config_is_reached_through_the_model() -> None:
    config = T5Config(
        vocab_size=97,
        d_model=32,
        d_kv=16,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    model = T5ForConditionalGeneration(config).eval()
    assert enable(model)
    assert model.decoder.config._attn_implementation.startswith(NAME_PREFIX)
    disable(model)
    assert model.decoder.config._attn_implementation == model.config._attn_implementation == "sdpa"


EAGER: dict[str, dict[str, Any]] = {
    "GPTBigCodeConfig": {},
    "LlamaConfig": {},
    "NemotronConfig": {"num_key_value_heads": 4},
    "OPTConfig": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "PersimmonConfig": {},
    "StableLmConfig": {"num_key_value_heads": 4},
}


def eager(config: str) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    options = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    built = getattr(transformers, config)(**sizes, **options, **EAGER[config])
    return AutoModelForCausalLM.from_config(built, attn_implementation="eager").eval()


@pytest.mark.parametrize("is_assisted", [False, True], ids=["greedy", "assisted"])
@pytest.mark.parametrize("config", EAGER)
def test_attention_weights_are_returned_at_every_step(config: str, is_assisted: bool) -> None:
    found = []
    for cache_of in (lambda model: DynamicCache(config=model.config), paged):
        model = eager(config)
        asked = {"output_attentions": True, "return_dict_in_generate": True, "do_sample": False}
        helped = {"assistant_model": eager(config)} if is_assisted else {}
        ids = padded_ids()[0][:1]
        found.append(
            model.generate(ids, past_key_values=cache_of(model), max_new_tokens=6, **asked, **helped)
        )
    assert torch.equal(found[1].sequences, found[0].sequences)
    for got, want in zip(found[1].attentions, found[0].attentions, strict=True):
        assert len(got) == len(want) == 2
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ask", ["config", "hook"])
def test_attention_weights_reach_whoever_looks_at_them(ask: str) -> None:
    model = eager("LlamaConfig")
    ids, seen = padded_ids()[0], []
    if ask == "hook":
        for layer in model.model.layers:
            layer.self_attn.register_forward_hook(lambda module, args, out: seen.append(out[1]))
    else:
        model.config.output_attentions = True
    cache = paged(model)
    with torch.no_grad():
        for step in (ids, ids[:, :1]):
            out = model(step, past_key_values=cache)
    shown = seen[2:] if ask == "hook" else out.attentions
    assert [tuple(weights.shape) for weights in shown] == [(2, 4, 1, 21)] * 2


def test_attention_weights_are_still_returned_by_an_eager_model() -> None:
    model = llama(attn_implementation="eager")
    ids, mask = padded_ids()

    def weights(cache: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=cache)
            longer = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
            out = model(ids[:, :1], attention_mask=longer, past_key_values=cache, output_attentions=True)
        return list(out.attentions)

    want = weights(DynamicCache(config=model.config))
    got = weights(PagedCache(model, block_size=16))
    assert [a.shape for a in got] == [(2, 4, 1, 21)] * 2
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("backend", ["cpp", "torch", "reference"])
def test_pools_stay_out_of_the_graph(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_PAGED_CACHE_BACKEND", backend)
    model = llama()
    ids, _ = padded_ids()
    cache = PagedCache(model, block_size=16)
    for _ in range(2):
        model(ids, past_key_values=cache)
    assert not cache._state.groups[0].pools[0].keys.requires_grad


@pytest.mark.parametrize("trained", ["k_proj", "v_proj"])
def test_gradients_reach_a_projection_that_is_trained_alone(trained: str) -> None:
    ids, _ = padded_ids()

    def gradient(cache_of: Any) -> torch.Tensor:
        model = llama().requires_grad_(False)
        weight = getattr(model.model.layers[1].self_attn, trained).weight.requires_grad_()
        cache = cache_of(model)
        with torch.no_grad():
            model(ids, past_key_values=cache)
        model(ids[:, :2], past_key_values=cache).logits.square().sum().backward()
        return weight.grad

    want = gradient(lambda model: DynamicCache(config=model.config))
    got = gradient(lambda model: PagedCache(model, block_size=16))
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-6)


LOST = pytest.raises(PagedCacheError, match=r"earlier forward stored under grad mode.*torch\.no_grad\(\)")


def paged(model: PreTrainedModel) -> PagedCache:
    return PagedCache(model, block_size=16)


def soft_prompt(model: PreTrainedModel, tokens: int = 20) -> torch.Tensor:
    ids = padded_ids()[0][:, :tokens]
    return model.get_input_embeddings()(ids).detach().requires_grad_()


@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("case", ["llama", "llama-eager", "mistral", "falcon-alibi"])
@pytest.mark.parametrize(
    "way", ["paged", "disabled", "int8", "forked", "copied", "converted", "there and back"]
)
def test_gradients_of_cached_tokens_are_refused_where_they_would_be_lost(
    case: str, way: str, is_frozen: bool
) -> None:
    model = by_name(case).build().requires_grad_(not is_frozen)
    cache: Any = PagedCache(model, block_size=16, kv_cache_dtype="int8" if way == "int8" else "auto")
    if way == "disabled":
        disable(model)
    if way == "converted":
        stock = DynamicCache(config=model.config)
        model(inputs_embeds=soft_prompt(model), past_key_values=stock)
        cache = PagedCache.from_cache(stock, model, block_size=16)
    else:
        model(inputs_embeds=soft_prompt(model), past_key_values=cache)
    if way in ("forked", "copied"):
        cache = cache.fork() if way == "forked" else copy.deepcopy(cache)
    if way == "there and back":
        cache = cache.to_dynamic_cache()
    loss = model(padded_ids()[0][:, :3], past_key_values=cache).logits.square().sum()
    with LOST:
        loss.backward()


@pytest.mark.parametrize(("constants", "is_lost"), [(0, True), (9, True), (14, True), (20, False)])
def test_dropped_tokens_take_their_gradients_with_them_and_no_others(constants: int, is_lost: bool) -> None:
    model, (ids, _) = by_name("falcon-alibi").build(), padded_ids()
    cache = paged(model)
    with torch.no_grad():
        for tokens in filter(None, (constants, 20 - constants if not is_lost else 0)):
            model(ids[:, :tokens], past_key_values=cache)
    if is_lost:
        model(inputs_embeds=soft_prompt(model, 20 - constants), past_key_values=cache)
    cache.prune(8, 12)
    assert cache._state.rows.gradients_from == ({0: 0, 9: 8, 14: 10}[constants] if is_lost else None)
    loss = model(ids[:, :3], past_key_values=cache).logits.square().sum()
    with LOST if is_lost else nullcontext():
        loss.backward()


def test_gradients_of_what_a_layer_shows_are_refused_too() -> None:
    model = llama()
    cache = paged(model)
    model(inputs_embeds=soft_prompt(model), past_key_values=cache)
    with LOST:
        cache.layers[0].values.square().sum().backward()
    with torch.no_grad():
        assert not cache.layers[0].values.requires_grad


def test_gradients_of_a_cached_encoder_are_refused() -> None:
    model = by_name("t5").build()
    cache = EncoderDecoderCache(paged(model), paged(model))
    text = soft_prompt(model)
    encoded = model.encoder(inputs_embeds=text)
    for _ in range(2):
        out = model(decoder_input_ids=padded_ids()[0][:, 7:8], encoder_outputs=encoded, past_key_values=cache)
    with LOST:
        out.logits.square().sum().backward()


def test_nobody_is_disturbed_whose_gradients_are_right() -> None:
    model = llama()
    ids, _ = padded_ids()
    cache, stock = paged(model), DynamicCache(config=model.config)
    # The loop of notebooks, which nobody put under no_grad and nobody calls backward in.
    for step in (ids, ids[:, :1], ids[:, 1:2]):
        want = model(step, past_key_values=stock).logits
        torch.testing.assert_close(model(step, past_key_values=cache).logits, want, rtol=1e-4, atol=1e-5)
    # Tokens that were constants, whatever came after them and is gone.
    for how in ("reset", "copy", "crop"):
        if how == "reset":
            cache.reset()
        with torch.no_grad():
            cache = PagedCache.from_cache(cache, model) if how == "copy" else cache
            model(ids, past_key_values=cache)
        for _ in range(2):
            prompt = soft_prompt(model, 2)
            model(inputs_embeds=prompt, past_key_values=cache).logits.square().sum().backward()
            assert float(prompt.grad.abs().sum()) > 0
            cache.crop(-2)


def test_an_eager_function_of_a_models_own_is_found_out_layer_by_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = llama(attn_implementation="eager")
    module = sys.modules[type(model).__module__]
    usual = module.eager_attention_forward

    def own(attention: Any, *args: Any, scaling: float, **kwargs: Any) -> Any:
        return usual(attention, *args, scaling=scaling / (1 + attention.layer_idx), **kwargs)

    monkeypatch.setattr(module, "eager_attention_forward", own)
    _eager_functions.clear()
    want = greedy(model)
    assert torch.equal(greedy(model, past_key_values=PagedCache(model, block_size=16)), want)
    _eager_functions.clear()


@pytest.mark.parametrize("grad", [False, True])
def test_dropout_over_history_in_training_is_that_of_the_hosts_attention(grad: bool) -> None:
    model = llama(attention_dropout=0.5).train()
    ids, _ = padded_ids()
    found = []
    for cache in (DynamicCache(config=model.config), PagedCache(model, block_size=16)):
        torch.manual_seed(0)
        with torch.set_grad_enabled(grad):
            model(ids, past_key_values=cache)
            found.append(model(ids[:, :1], past_key_values=cache).logits)
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("is_paged", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("name", [case.name for case in CASES if not case.is_encoder_decoder])
def test_gradients_are_those_of_the_hosts_own_cache(name: str, is_paged: bool) -> None:
    model, ids = by_name(name).build().requires_grad_(), padded_ids()[0]
    found = []
    for cache in (host_cache(model), PagedCache(model, block_size=16)):
        if not is_paged:
            disable(model)
        with torch.no_grad():
            model(ids, past_key_values=cache)
        model.zero_grad()
        model(ids[:, :3], past_key_values=cache).logits.square().sum().backward()
        found.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for key, want in found[0].items():
        torch.testing.assert_close(found[1][key], want, rtol=1e-3, atol=1e-4 * float(want.abs().max() + 1e-6))


def test_something_that_is_no_model_is_refused() -> None:
    with pytest.raises(PagedCacheError, match="got str"):
        enable("gpt2")
