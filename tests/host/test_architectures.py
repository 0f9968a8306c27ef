"""Models whose layers keep more than K and V of every token, or none, or write them in ways of their own."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, EncoderDecoderCache, MllamaForCausalLM
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, LinearAttentionCacheLayerMixin

from hf_paged_cache import (
    CacheMismatchError,
    PagedCache,
    PagedCacheError,
    PoolExhausted,
    UnsupportedLayerError,
)
from hf_paged_cache.cache.layer import PagedLayer
from hf_paged_cache.forward.recurrent_state import HostStates
from tests.support.models import VOCAB, _redraw, cache_kwarg

_ATTENTION: dict[str, Any] = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 256,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 32}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "index_topk": 8, "index_head_dim": 16, "index_n_heads": 4, "n_routed_experts": 4,
    "moe_intermediate_size": 32, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "num_key_value_heads": 4, "mlp_layer_types": ["dense", "sparse"],
}  # fmt: skip

# Up to transformers 5.17 every family has a name of its own for it.
_INDEXED = (
    "indexed_attention" if "indexed_attention" in DYNAMIC_LAYER_TYPE_MAPPING else "qwen_sparse_attention"
)

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("MambaConfig", {"state_size": 8, "time_step_rank": 4}),
    "mamba2": (
        "Mamba2Config",
        {"num_heads": 4, "head_dim": 16, "expand": 2, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    ),
    "falcon-h1": (
        "FalconH1Config",
        _ATTENTION
        | {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
           "mamba_chunk_size": 8},
    ),
    "zamba2": (
        "Zamba2Config",
        _ATTENTION
        | {
            "layers_block_type": ["linear_attention", "hybrid"], "num_key_value_heads": 4,
            "num_mem_blocks": 1, "n_mamba_heads": 4, "mamba_headdim": 16, "mamba_d_state": 8, "chunk_size": 8,
            "mamba_ngroups": 1,
        },
    ),
    "zaya": (
        "ZayaConfig",
        _ATTENTION
        | _EXPERTS
        | {"head_dim": 16, "sliding_window": 8, "router_hidden_size": 16, "num_experts_per_tok": 1,
           "layer_types": ["hybrid", "hybrid_sliding"]},
    ),
    "inkling": (
        "InklingTextConfig",
        _ATTENTION
        | {
            "head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16,
            "sliding_window_size": 8, "layer_types": ["hybrid_sliding", "hybrid"], "d_rel": 8,
            "mlp_layer_types": ["dense", "sparse"], "moe_intermediate_size": 32, "n_routed_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "deepseek-v3.2": ("DeepseekV32Config", _ATTENTION | _LATENT),
    "qwen4-exp": (
        "Qwen4ExpTextConfig",
        _ATTENTION
        | _EXPERTS
        | {
            "layer_types": ["linear_attention", _INDEXED], "head_dim": 16,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "shared_expert_intermediate_size": 32, "num_experts_per_tok": 2,
            "hc_lowrank": 16, "ple_layer_ids": [], "ple_embed_dim": 32, "indexer_n_heads": 4,
            "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 2,
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        _ATTENTION
        | {
            "num_hidden_layers": 4, "num_kv_shared_layers": 2, "head_dim": 16, "global_head_dim": 32,
            "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2,
            "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB,
        },
    ),
    "dory": (
        "DoryConfig",
        _ATTENTION
        | {
            "num_hidden_layers": 3, "head_dim": 16, "sliding_window": 8, "n_input_layers": 1,
            "n_recurrent_layers": 1, "n_output_layers": 1, "n_recurrent_loops": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mllama": ("MllamaTextConfig", _ATTENTION | {"cross_attention_layers": [1]}),
    "jamba": (
        "JambaConfig",
        _ATTENTION
        | _EXPERTS
        | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
           "use_mamba_kernels": False},
    ),
    "recurrent-gemma": (
        "RecurrentGemmaConfig",
        _ATTENTION
        | {"head_dim": 16, "lru_width": 64, "attention_window_size": 8,
           "block_types": ["recurrent", "attention"]},
    ),
    "nemotron-h": (
        "NemotronHConfig",
        _ATTENTION
        | {
            "layers_block_type": ["linear_attention", "full_attention", "moe"], "num_hidden_layers": 3,
            "head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1,
            "chunk_size": 8, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
            "n_routed_experts": 4, "num_experts_per_tok": 2,
        },
    ),
}  # fmt: skip

NO_CHUNKS = ("mamba", "jamba", "recurrent-gemma")
NEEDS_RESET = ("recurrent-gemma",)
TELLS_RECURRENT_LAYERS = hasattr(transformers.RecurrentGemmaConfig(), "layer_types")
"""Up to transformers 5.17 only its forward knows them."""
NAMES = [
    name
    for name, (config, _) in CONFIGS.items()
    if hasattr(transformers, config) and (TELLS_RECURRENT_LAYERS or name != "recurrent-gemma")
]


@cache
def model_of(name: str) -> Any:
    config_name, options = CONFIGS[name]
    shared = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "tie_word_embeddings": False}
    config = getattr(transformers, config_name)(
        **shared | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None} | options
    )
    model = MllamaForCausalLM(config) if name == "mllama" else AutoModelForCausalLM.from_config(config)
    kept = {key: value.clone() for key, value in model.state_dict().items() if _is_dynamics(key)}
    _redraw(model, 7, 0.0, 1.5)
    model.load_state_dict(kept, strict=False)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.eval()


def _is_dynamics(name: str) -> bool:
    """Weights of recurrences and convolutions, which are stable as they are initialised only."""
    return any(part in name for part in ("A_log", "dt_", ".D", "conv", "rg_lru", "recurrent_param", "router"))


def cache_name(model: Any) -> str:
    names = inspect.signature(model.forward).parameters
    return "cache_params" if "cache_params" in names and cache_kwarg() not in names else cache_kwarg()


def step(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, use_cache=True, **{cache_name(model): cache}).logits
    return logits


def generated(model: Any, ids: torch.Tensor, cache: Any, **options: Any) -> torch.Tensor:
    tokens: torch.Tensor = model.generate(
        ids, max_new_tokens=6, do_sample=False, **{cache_name(model): cache}, **options
    )
    return tokens


def prompt(tokens: int = 20, batch: int = 2) -> torch.Tensor:
    return torch.randint(1, VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(tokens))


def paged(model: Any) -> PagedCache:
    return PagedCache(model, block_size=16)


def stock(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config)


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.allclose(got, want, atol=2e-4 * max(1.0, float(want.abs().max())))


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_the_stock_cache(name: str) -> None:
    model = model_of(name)
    ids, mask = prompt(), torch.ones(2, 20, dtype=torch.long)
    cache = paged(model)
    got = generated(model, ids, cache, attention_mask=mask)
    assert torch.equal(got, generated(model, ids, stock(model), attention_mask=mask))
    cache.check_integrity()


@pytest.mark.parametrize("name", NAMES)
def test_padded_rows_are_those_of_the_stock_cache(name: str) -> None:
    model = model_of(name)
    ids, mask = prompt(), torch.ones(2, 20, dtype=torch.long)
    ids[1, :7], mask[1, :7] = 0, 0
    got = generated(model, ids, paged(model), attention_mask=mask)
    assert torch.equal(got, generated(model, ids, stock(model), attention_mask=mask))


@pytest.mark.parametrize("name", NAMES)
def test_beams_are_those_of_the_stock_cache(name: str) -> None:
    model = model_of(name)
    ids, mask = prompt(), torch.ones(2, 20, dtype=torch.long)
    got = generated(model, ids, paged(model), attention_mask=mask, num_beams=3)
    assert torch.equal(got, generated(model, ids, stock(model), attention_mask=mask, num_beams=3))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NO_CHUNKS])
def test_a_second_turn_sees_the_first(name: str) -> None:
    model, ids = model_of(name), prompt(30)
    pieces = ids[:, :19], ids[:, 19:20], ids[:, 20:26], ids[:, 26:27]
    cache, other = paged(model), stock(model)
    for piece in pieces:
        assert close(step(model, piece, cache), step(model, piece, other))


@pytest.mark.parametrize("name", [name for name in NAMES if name in NO_CHUNKS])
def test_a_turn_that_the_model_gets_wrong_is_refused(name: str) -> None:
    model, ids = model_of(name), prompt(30)
    cache, other = paged(model), stock(model)
    step(model, ids[:, :20], cache)
    step(model, ids[:, :20], other)
    with pytest.raises(CacheMismatchError, match=r"6 new tokens came.*go wrong.*`cache\.reset\(\)`"):
        step(model, ids[:, 20:26], cache)
    if name in NEEDS_RESET:
        return  # the state in the model may have moved on with the refused turn
    assert close(step(model, ids[:, 20:21], cache), step(model, ids[:, 20:21], other))


@pytest.mark.parametrize("name", NAMES)
def test_a_reset_leaves_nothing_behind(name: str) -> None:
    model, ids = model_of(name), prompt(25, batch=3)
    cache = paged(model)
    step(model, prompt(20), cache)
    cache.reset()
    # One cache after the other: some models keep a state in themselves.
    got, want = ([step(model, piece, x) for piece in ids.split(24, dim=1)] for x in (cache, stock(model)))
    assert all(map(close, got, want))


class Interrupted(Exception):
    pass


ACCESSES = (
    "update", "update_conv_state", "update_recurrent_state", "update_indexer", "get_conv_state",
    "get_recurrent_state", "has_previous_state",
)  # fmt: skip


def leaf_calls(model: Any, on_call: Any) -> list[Any]:
    """Have a function called before every module that does the work of a forward."""
    leaves = [module for module in model.modules() if not list(module.children())]
    return [leaf.register_forward_pre_hook(lambda *_: on_call()) for leaf in leaves]


def calls_before_the_last_access(model: Any, ids: torch.Tensor, cache: Any) -> int:
    """Modules that have begun when a forward comes to the cache for the last time."""
    twin, calls, last = copy.deepcopy(cache), 0, 0

    def count() -> None:
        nonlocal calls
        calls += 1

    def watched(method: Any) -> Any:
        def access(*args: Any, **kwargs: Any) -> Any:
            nonlocal last
            last = calls
            return method(*args, **kwargs)

        return access

    for name in ACCESSES:
        setattr(twin, name, watched(getattr(twin, name)))
    handles = leaf_calls(model, count)
    step(model, ids, twin)
    for handle in handles:
        handle.remove()
    return last


def interrupt(model: Any, ids: torch.Tensor, cache: Any, share: float) -> None:
    """A forward that fails after a share of its work, before it comes to the cache for the last time."""
    left = max(1, int(share * calls_before_the_last_access(model, ids, cache)))

    def fail_in_time() -> None:
        nonlocal left
        left -= 1
        if not left:
            raise Interrupted

    handles = leaf_calls(model, fail_in_time)
    try:
        with pytest.raises(Interrupted):
            step(model, ids, cache)
    finally:
        for handle in handles:
            handle.remove()


def retried(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    try:
        return step(model, ids, cache)
    except CacheMismatchError as error:
        if "taken back now, so call the model again" not in str(error):
            raise
        return step(model, ids, cache)


@pytest.mark.parametrize("share", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("done", [0, 20, 21])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in NEEDS_RESET])
def test_an_interrupted_forward_is_taken_back(name: str, done: int, share: float) -> None:
    model, ids = model_of(name), prompt(24)
    cuts = [0, 20, 21, 22]
    pieces = {start: ids[:, start:end] for start, end in zip(cuts, [*cuts[1:], 23], strict=True)}
    cache, other = paged(model), stock(model)
    for start, piece in pieces.items():
        if start == done:
            interrupt(model, piece, cache, share)
            assert close(retried(model, piece, cache), step(model, piece, other))
        else:
            assert close(step(model, piece, cache), step(model, piece, other))
    cache.check_integrity()


@pytest.mark.parametrize("name", ["mamba2", "falcon-h1"])
def test_a_change_that_fails_inside_a_forward_leaves_that_one_to_be_taken_back(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is known of the forward in progress, of its text and of the states before it comes back too."""
    model, ids = model_of(name), prompt(23)
    cache, undisturbed = paged(model), paged(model)
    for each in (cache, undisturbed):
        step(model, ids[:, :20], each)
    clear = HostStates.clear

    def clear_and_fail(hosts: HostStates) -> None:
        clear(hosts)
        raise ZeroDivisionError

    (norm,) = (part for child, part in model.base_model.named_children() if "norm" in child)
    hook = norm.register_forward_pre_hook(lambda *_: cache.reset())
    with monkeypatch.context() as patch:
        patch.setattr(HostStates, "clear", clear_and_fail)
        with pytest.raises(ZeroDivisionError):
            step(model, ids[:, 3:6], cache)
    hook.remove()
    if name == "mamba2":
        with pytest.raises(CacheMismatchError, match="begins as the 20 that the cache was fed"):
            generated(model, ids, cache)
    got, want = (step(model, ids[:, 20:], each) for each in (cache, undisturbed))
    assert torch.equal(got, want)


def test_a_model_with_its_state_in_itself_asks_for_a_reset() -> None:
    if not TELLS_RECURRENT_LAYERS:
        with pytest.raises(UnsupportedLayerError, match="'recurrent_gemma' under transformers"):
            paged(model_of("recurrent-gemma"))
        return
    model, ids = model_of("recurrent-gemma"), prompt(24)
    cache = paged(model)
    step(model, ids[:, :20], cache)
    interrupt(model, ids[:, 20:21], cache, 1.0)
    with pytest.raises(CacheMismatchError, match=r"nobody can take that back; call `cache\.reset\(\)`"):
        step(model, ids[:, 20:21], cache)
    cache.reset()
    assert close(step(model, ids, cache), step(model, ids, stock(model)))


def test_exhaustion_in_a_hybrid_takes_its_states_back() -> None:
    model, ids = model_of("falcon-h1"), prompt(60)
    cache, other = PagedCache(model, block_size=16, max_tokens=80), stock(model)
    step(model, ids[:, :20], cache)
    step(model, ids[:, :20], other)
    with pytest.raises(PoolExhausted):
        step(model, ids[:, 20:], cache)
    assert close(step(model, ids[:, 20:21], cache), step(model, ids[:, 20:21], other))


@pytest.mark.parametrize("name", ["mamba2", "falcon-h1", "deepseek-v3.2", "nemotron-h", "mllama"])
@pytest.mark.parametrize("change", ["select", "repeat", "reorder", "copy"])
def test_rows_move_with_their_states(name: str, change: str) -> None:
    if name not in NAMES:
        pytest.skip("this version of transformers does not know the model")
    model, ids = model_of(name), prompt(23, batch=3)
    cache = paged(model)
    step(model, ids[:, :20], cache)
    rows = {"select": [2, 0], "repeat": [0, 0, 1, 1, 2, 2], "reorder": [1, 1, 0], "copy": [0, 1, 2]}[change]
    if change == "select":
        cache.batch_select_indices(torch.tensor([2, 0]))
    elif change == "repeat":
        cache.batch_repeat_interleave(2)
    elif change == "reorder":
        cache.reorder_cache(torch.tensor([1, 1, 0]))
    else:
        twin = copy.deepcopy(cache)
        step(model, ids[:, 5:6], cache)
        cache = twin
    assert cache.batch_size == len(rows)
    other = stock(model)
    step(model, ids[rows, :20], other)
    for token in (20, 21):
        got = step(model, ids[rows, token : token + 1], cache)
        assert close(got, step(model, ids[rows, token : token + 1], other))


@pytest.mark.parametrize("rows", [[3], [0, -4], []])
def test_wrong_rows_of_a_cache_without_blocks_are_refused(rows: list[int]) -> None:
    model = model_of("mamba2")
    cache = paged(model)
    step(model, prompt(batch=3), cache)
    with pytest.raises(PagedCacheError, match="non-empty selection of 0…2"):
        cache.reorder_cache(torch.tensor(rows, dtype=torch.long))
    assert cache.batch_size == 3


def test_a_cache_without_blocks_describes_itself() -> None:
    model = model_of("mamba2")
    cache = paged(model)
    assert (cache.batch_size, cache.stats().num_blocks, cache.memory_footprint().total_bytes >= 0) == (
        -1,
        0,
        True,
    )
    step(model, prompt(), cache)
    assert (cache.stats().batch, cache.stats().used_blocks) == (2, 0)
    assert cache.memory_footprint().host_bytes > 0
    assert "2 layers, 2 rows" in repr(cache)
    cache.check_integrity()
    cache.reset()
    assert (cache.batch_size, cache.memory_footprint().host_bytes) == (-1, 0)


@pytest.mark.parametrize(
    ("name", "is_hybrid"), [("falcon-h1", True), ("zaya", True), ("inkling", True), ("deepseek-v3.2", False)]
)
def test_layers_of_several_kinds_keep_their_k_and_v_in_blocks(name: str, is_hybrid: bool) -> None:
    if name not in NAMES:
        pytest.skip("this version of transformers does not know the model")
    model = model_of(name)
    cache = paged(model)
    step(model, prompt(), cache)
    assert all(isinstance(layer, PagedLayer) for layer in cache.layers)
    assert all(isinstance(layer, LinearAttentionCacheLayerMixin) is is_hybrid for layer in cache.layers)
    assert not any(cache.is_linear)
    assert cache.stats().used_blocks > 0
    assert cache.memory_footprint().host_bytes > 0


def test_a_recurrent_state_is_not_cropped() -> None:
    model, ids = model_of("falcon-h1"), prompt(24)
    cache, other = paged(model), stock(model)
    step(model, ids[:, :20], cache)
    step(model, ids[:, :20], other)
    assert not cache.is_croppable
    cache.crop(0)
    with pytest.raises(PagedCacheError, match=r"cannot crop: layer 0, a recurrent state"):
        cache.crop(-2)
    assert cache.get_seq_length() == 20
    assert close(step(model, ids[:, 20:21], cache), step(model, ids[:, 20:21], other))
    cache.crop(-21)
    assert close(step(model, ids, cache), step(model, ids, stock(model)))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in NEEDS_RESET])
def test_a_forward_without_use_cache_leaves_what_lies_outside_blocks(name: str, rows: int) -> None:
    model, ids = model_of(name), prompt(24)[:1]
    cache, other = paged(model), stock(model)
    for held in (cache, other):
        step(model, ids[:, :20], held)
    for _ in range(2):
        with torch.no_grad():
            model(input_ids=ids[:, 3:4].repeat(rows, 1), use_cache=False, **{cache_name(model): cache})
        assert cache.batch_size == 1
    assert close(step(model, ids[:, 20:21], cache), step(model, ids[:, 20:21], other))
    cache.check_integrity()


@pytest.mark.parametrize("name", NEEDS_RESET)
def test_a_model_that_moved_its_own_state_in_a_look_asks_for_a_reset(name: str) -> None:
    if name not in NAMES:
        pytest.skip("this version of transformers does not tell its layers")
    model, ids = model_of(name), prompt(24)[:1]
    cache = paged(model)
    step(model, ids[:, :20], cache)
    with torch.no_grad():
        model(input_ids=ids[:, 3:4], use_cache=False, **{cache_name(model): cache})
    with pytest.raises(CacheMismatchError, match=r"call `cache\.reset\(\)`"):
        step(model, ids[:, 20:21], cache)


@pytest.mark.skipif("qwen4-exp" not in NAMES, reason="this version of transformers has no such model")
@pytest.mark.parametrize("copied", [lambda cache: cache, PagedCache.fork, copy.deepcopy])
def test_positions_of_an_indexer_follow_rows_and_failures(copied: Any) -> None:
    model, ids = model_of("qwen4-exp"), prompt(24)[:1]
    cache, other = paged(model), stock(model)
    step(model, ids[:, :20], cache)
    step(model, ids[:, :20].repeat(3, 1), other)
    cache = copied(cache)
    for start, end in ((20, 23), (23, 24)):
        told = {"position_ids": torch.arange(start, end).expand(3, -1), "use_cache": True}
        new = ids[:, start:end].repeat(3, 1)
        with torch.no_grad():
            handle = model.model.layers[0].register_forward_hook(lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(input_ids=new, **told, **{cache_kwarg(): cache})
            handle.remove()
            got, want = (model(input_ids=new, **told, **{cache_kwarg(): c}).logits for c in (cache, other))
        assert close(got, want)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_whole_prompt_is_not_fed_again_where_no_layer_counts_tokens(rows: int) -> None:
    model, ids = model_of("mamba2"), prompt(24)[:rows]
    cache = paged(model)
    said = generated(model, ids, cache)
    with pytest.raises(CacheMismatchError, match="Pass the new ids alone"):
        generated(model, torch.cat((said, ids[:, :3]), dim=1), cache)
    new = torch.cat((said[:, -1:], ids[:, :3]), dim=1)
    want = generated(model, torch.cat((said, ids[:, :3]), dim=1), stock(model))
    assert torch.equal(generated(model, new, cache)[:, 4:], want[:, said.shape[1] + 3 :])


def test_rows_that_fail_to_move_keep_their_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = model_of("mamba2"), prompt(23)
    cache, select = paged(model), HostStates.select
    step(model, ids[:, :20], cache)

    def select_and_fail(hosts: HostStates, rows: Sequence[int]) -> None:
        select(hosts, rows)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(HostStates, "select", select_and_fail)
        with pytest.raises(MemoryError):
            cache.batch_repeat_interleave(2)
    with pytest.raises(CacheMismatchError, match="begins as the 20 that the cache was fed"):
        generated(model, ids, cache)


def test_a_cache_without_blocks_says_that_it_does_not_know_its_text() -> None:
    model, ids = model_of("mamba2"), prompt(24)
    cache, other = paged(model), stock(model)
    step(model, ids[:, :20], cache)
    step(model, ids[:, :20], other)
    for call in (cache.truncate_to, cache.commit):
        with pytest.raises(PagedCacheError, match=r"no layer of this model keeps its tokens in blocks"):
            call(ids)
    assert close(step(model, ids[:, 20:21], cache), step(model, ids[:, 20:21], other))


@pytest.mark.parametrize("name", ["mamba2", "falcon-h1", "zamba2", "zaya", "nemotron-h"])
def test_beams_and_samples_go_on_from_the_states_of_one_row(name: str) -> None:
    if name not in NAMES:
        pytest.skip("this version of transformers does not know the model")
    model, ids = model_of(name), prompt(24)[:1]
    cache, other = paged(model), stock(model)
    step(model, ids[:, :20], cache)
    rows = ids.repeat(3, 1)
    step(model, rows[:, :20], other)
    for start, end in ((20, 23), (23, 24)):
        assert close(step(model, rows[:, start:end], cache), step(model, rows[:, start:end], other))


def test_a_refused_generation_gives_rows_and_states_back() -> None:
    model, ids = model_of("falcon-h1"), prompt(24)[:1]
    cache, other = paged(model), stock(model)
    step(model, ids[:, :20], cache)
    step(model, ids[:, :20], other)
    with pytest.raises(PagedCacheError, match="use_cache"):
        model.generate(ids.repeat(3, 1), use_cache=False, max_new_tokens=2, **{cache_kwarg(): cache})
    assert (cache.batch_size, cache.get_seq_length()) == (1, 20)
    assert close(step(model, ids[:, 20:21], cache), step(model, ids[:, 20:21], other))
    cache.check_integrity()


@pytest.mark.skipif("deepseek-v3.2" not in NAMES, reason="this version of transformers has no such model")
def test_indexers_are_cropped_with_the_rest() -> None:
    model, ids = model_of("deepseek-v3.2"), prompt(24)
    cache, other = paged(model), stock(model)
    step(model, ids, cache)
    step(model, ids, other)
    for each in (cache, other):
        each.crop(-4)
    assert cache.layers[0].indexer_keys.shape[1] == 20
    assert close(step(model, ids[:, 3:7], cache), step(model, ids[:, 3:7], other))


@pytest.mark.skipif("dory" not in NAMES, reason="this version of transformers has no such model")
def test_further_rounds_have_layers_of_their_own() -> None:
    cache = paged(model_of("dory"))
    step(model_of("dory"), prompt(), cache)
    assert len(cache.layers) == 5
    assert {layer.get_seq_length() for layer in cache.layers} == {20}


def test_layers_that_others_append_are_refused() -> None:
    cache = paged(model_of("mllama"))
    cache.layers.append(copy.deepcopy(cache.layers[0]))
    states = torch.zeros(1, 2, 3, 8)
    with pytest.raises(CacheMismatchError, match=r"Layers appended to `cache\.layers` cannot be used"):
        cache.update(states, states, 2)


def test_keys_of_an_image_stay_when_tokens_are_cropped() -> None:
    model = model_of("mllama")
    cache = paged(model)
    states = torch.randn(1, 2, 7, 8)
    cache.update(states, states, 1)
    step(model, prompt(20, batch=1), cache)
    cache.crop(-5)
    assert (cache.get_seq_length(), cache.get_seq_length(1)) == (15, 7)
    assert torch.equal(cache.layers[1].keys, states)


@cache
def musicgen() -> Any:
    config = transformers.MusicgenDecoderConfig(
        vocab_size=VOCAB, hidden_size=32, ffn_dim=32, num_hidden_layers=2, num_attention_heads=4,
        num_codebooks=2, pad_token_id=0, bos_token_id=1,
    )  # fmt: skip
    model = transformers.MusicgenForCausalLM(config)
    _redraw(model, 7, 0.0, 1.5)
    return model.eval()


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_decoder_with_cross_attention_in_its_own_layers(wrapped: bool) -> None:
    model, conditioning = musicgen(), torch.randn(2, 6, 32)

    def run(cache: Any) -> torch.Tensor:
        cache = EncoderDecoderCache(cache, DynamicCache()) if wrapped else cache
        ids = prompt(4, batch=4)
        with torch.no_grad():
            return torch.cat([
                model(
                    input_ids=ids[:, i : i + 1], encoder_hidden_states=conditioning, use_cache=True,
                    **{cache_kwarg(): cache},
                ).logits
                for i in range(4)
            ], dim=1)  # fmt: skip

    assert close(run(paged(model)), run(stock(model)))
