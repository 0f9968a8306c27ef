"""Paged attention is switched on for one model, reversibly, and a patched model is otherwise as before."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
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
from hf_paged_cache.attention import NAME_PREFIX
from hf_paged_cache.compat import _eager_functions
from tests.models import CASES, by_name, host_cache

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


def test_gradients_of_the_new_tokens_flow_and_history_is_constant() -> None:
    model = llama()
    ids, _ = padded_ids()
    cache = PagedCache(model, block_size=16)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    model(ids[:, :2], past_key_values=cache).logits.sum().backward()
    assert model.model.layers[0].self_attn.k_proj.weight.grad.abs().sum() > 0
    assert cache.layers[0].keys.requires_grad is False


@pytest.mark.parametrize("backend", ["cpp", "torch", "reference"])
def test_pools_stay_out_of_the_graph(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_PAGED_CACHE_BACKEND", backend)
    model = llama()
    ids, _ = padded_ids()
    cache = PagedCache(model, block_size=16)
    for _ in range(2):
        model(ids, past_key_values=cache).logits.sum().backward()
    assert not cache._state.groups[0].pools[0].keys.requires_grad
    assert not cache.layers[0].keys.requires_grad


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
