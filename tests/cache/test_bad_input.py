"""Bad input gets an error that names what was expected and what came, and leaves the cache as it was."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from transformers import (
    DynamicCache,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    XLNetConfig,
)

from hf_paged_cache import (
    CacheMismatchError,
    PagedCache,
    PagedCacheError,
    PoolExhausted,
    UnsupportedLayerError,
)
from hf_paged_cache.store.device import memory
from tests.support.models import cache_kwarg

CONFIG = LlamaConfig(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    eos_token_id=None,
    bos_token_id=1,
)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval()


def kv(batch: int = 2, heads: int = 2, tokens: int = 5, dim: int = 16, **kwargs: Any) -> torch.Tensor:
    """Rows that differ, since rows of a prompt that are the same are stored once."""
    rows = torch.arange(1, batch + 1).view(-1, 1, 1, 1).to(**kwargs)
    return torch.ones(batch, heads, tokens, dim, **kwargs) * rows


def filled(tokens: int = 5, **kwargs: Any) -> PagedCache:
    cache = PagedCache(CONFIG, block_size=16, **kwargs)
    for layer in range(3):
        cache.update(kv(tokens=tokens), kv(tokens=tokens), layer)
    return cache


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"block_size": 48}, r"block_size must be a power of two from 16 to 256, got 48"),
        ({"block_size": 8}, r"block_size .* got 8"),
        ({"block_size": 512}, r"block_size .* got 512"),
        ({"block_size": 64.0}, r"block_size .* got 64\.0"),
        ({"block_size": True}, r"block_size .* got True"),
        ({"kv_cache_dtype": "int3"}, r"kv_cache_dtype must be one of auto, int8, .*, adaptive, got 'int3'"),
        ({"max_tokens": 0}, r"max_tokens must be a positive number of tokens, got 0"),
        ({"max_tokens": -64}, r"max_tokens .* got -64"),
        ({"max_tokens": 1.5}, r"max_tokens .* got 1\.5"),
        ({"gpu_memory_utilization": 0}, r"gpu_memory_utilization must be a share above 0 and up to 1, got 0"),
        ({"gpu_memory_utilization": 1.1}, r"gpu_memory_utilization .* got 1\.1"),
        ({"gpu_memory_utilization": "0.5"}, r"gpu_memory_utilization .* got '0\.5'"),
        ({"max_cache_len": 0}, r"max_cache_len must be a positive number of tokens, got 0"),
        ({"max_cache_len": 64, "max_tokens": 64}, r"max_tokens=64 is .* over all rows and max_cache_len=64"),
        ({"config": CONFIG}, r"config and config_or_model name the same thing"),
        (
            {"blocksize": 16},
            r"no argument 'blocksize' \(did you mean block_size or group_size\?\); it takes .*max_tokens",
        ),
        ({"layer_dtypes": {0: "fp8_e5m2"}}, r"layer_dtypes must be .* int8, fp8, .*got \{0: 'fp8_e5m2'\}"),
    ],
)
def test_settings_out_of_range_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PagedCache(CONFIG, **kwargs)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_tokens": 10**12}, r"max_tokens=10+ wants pools of .* GiB in all, room for \d+ tokens"),
        ({"max_cache_len": 10**12}, r"max_cache_len=10+ for 2 rows wants pools"),
    ],
)
@pytest.mark.parametrize("format_name", ["auto", "int4"])
def test_a_capacity_that_the_machine_can_never_hold_is_refused(
    format_name: Any, setting: dict[str, int], message: str
) -> None:
    with pytest.raises(PagedCacheError, match=message):
        filled(kv_cache_dtype=format_name, **setting)


@pytest.mark.parametrize("format_name", ["auto", "int8"])
def test_a_pool_that_the_system_has_no_memory_for_is_exhausted(
    format_name: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*shape: int, **options: Any) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    cache = PagedCache(CONFIG, max_tokens=64, kv_cache_dtype=format_name)
    with monkeypatch.context() as patch:
        patch.setattr(memory.torch, "empty", refuse)
        with pytest.raises(PoolExhausted, match=r"for \d blocks of 64 tokens .* a smaller `max_tokens`"):
            cache.update(kv(), kv(), 0)
    for layer in range(3):
        cache.update(kv(), kv(), layer)
    assert cache.get_seq_length() == 5


def test_exhaustion_reads_as_running_out_of_memory_and_travels_between_processes() -> None:
    error = PoolExhausted("3 blocks are needed", needed_blocks=3, free_blocks=1, block_size=16)
    assert error.args == ("The KV cache is out of memory. 3 blocks are needed",)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.args, vars(again)) == (PoolExhausted, error.args, vars(error))


def _on_meta(model: Any, run: Any) -> Any:
    with torch.device("meta"):
        empty = LlamaForCausalLM(CONFIG)
    return run(empty, torch.zeros(1, 4, dtype=torch.long, device="meta"))


def _faked(model: Any, run: Any) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return run(model, torch.zeros(1, 4, dtype=torch.long))


def _mapped(model: Any, run: Any) -> Any:
    return torch.func.vmap(lambda ids: run(model, ids).logits)(torch.ones(3, 1, 4, dtype=torch.long))


def _derived(model: Any, run: Any) -> Any:
    def loss(parameters: Any) -> torch.Tensor:
        ids = torch.ones(1, 4, dtype=torch.long)
        call = lambda *given: torch.func.functional_call(model, parameters, *given)  # noqa: E731
        total: torch.Tensor = run(call, ids).logits.sum()
        return total

    return torch.func.grad(loss)({name: value.detach() for name, value in model.named_parameters()})


@pytest.mark.parametrize("within", [_on_meta, _faked, _mapped, _derived])
def test_a_forward_without_data_is_refused_and_the_cache_stays(model: PreTrainedModel, within: Any) -> None:
    cache = PagedCache(model, block_size=16)

    def run(call: Any, ids: torch.Tensor) -> Any:
        options = {cache_kwarg(): cache}
        return call(ids, **options) if isinstance(call, torch.nn.Module) else call((ids,), options)

    with pytest.raises(CacheMismatchError, match=r"layer 0: K and V have no data"):
        within(model, run)
    with torch.no_grad():
        run(model, torch.ones(1, 4, dtype=torch.long))
    assert cache.get_seq_length() == 4


@pytest.mark.parametrize("wrong", [None, "gpt2", {"hidden_size": 64}, torch.nn.Linear(2, 2)])
def test_something_that_is_no_config_is_refused(wrong: object) -> None:
    with pytest.raises(PagedCacheError, match=r"a transformers config or a model .* got \w+; pass `model`"):
        PagedCache(wrong)


def test_models_with_a_cache_of_their_own_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedLayerError, match="'xlnet': it keeps its own `mems`"):
        PagedCache(XLNetConfig())


def test_unknown_layer_kinds_are_refused_by_name() -> None:
    config = LlamaConfig(num_hidden_layers=2)
    config.layer_types = ["full_attention", "spiral_attention"]
    with pytest.raises(UnsupportedLayerError, match=r"layer 1 .* 'spiral_attention'"):
        PagedCache(config)


BAD_UPDATES: dict[str, tuple[torch.Tensor, torch.Tensor, str]] = {
    "rank": (kv()[0], kv()[0], r"layer 0: K and V must be \[batch, kv_heads, tokens, head_dim\]"),
    "tokens differ": (kv(tokens=1), kv(tokens=2), r"agree in the first three; got K \(2, 2, 1, 16\)"),
    "batch": (
        kv(batch=3, tokens=1),
        kv(batch=3, tokens=1),
        r"holds 2 rows, got K \(3, .*batch_repeat_interleave",
    ),
    "heads": (kv(heads=3, tokens=1), kv(heads=3, tokens=1), r"stores 2 kv heads, head_dim 16"),
    "head_dim": (kv(dim=8, tokens=1), kv(dim=8, tokens=1), r"stores 2 kv heads, head_dim 16 \(K\)"),
    "dtype": (
        kv(tokens=1, dtype=torch.bfloat16),
        kv(tokens=1, dtype=torch.bfloat16),
        r"torch\.float32 on cpu; got K .* torch\.bfloat16",
    ),
    "dtypes differ": (kv(tokens=1, dtype=torch.bfloat16), kv(tokens=1), r"got K .* torch\.bfloat16"),
    "device": (kv(tokens=1, device="meta"), kv(tokens=1, device="meta"), r"on cpu; got K .* on meta"),
    "no tokens": (kv(tokens=0), kv(tokens=0), r"layer 0: no new tokens\. The cache already holds 5 tokens"),
}


@pytest.mark.parametrize("name", BAD_UPDATES)
def test_updates_that_do_not_fit_are_refused_and_change_nothing(name: str) -> None:
    keys, values, message = BAD_UPDATES[name]
    cache = filled()
    before = cache.stats(), cache.layers[0].keys.clone()
    with pytest.raises(CacheMismatchError, match=message):
        cache.update(keys, values, 0)
    assert cache.stats() == before[0]
    assert torch.equal(cache.layers[0].keys + 0, before[1])
    cache.check_integrity()
    for layer in range(3):
        cache.update(kv(tokens=1), kv(tokens=1), layer)
    assert cache.get_seq_length() == 6


def test_a_misfit_in_the_middle_of_a_forward_takes_the_forward_back() -> None:
    cache = filled()
    cache.update(kv(tokens=1), kv(tokens=1), 0)
    with pytest.raises(CacheMismatchError, match="layer 1"):
        cache.update(kv(tokens=1, heads=3), kv(tokens=1, heads=3), 1)
    assert [cache.get_seq_length(layer) for layer in range(3)] == [5, 5, 5]
    cache.check_integrity()


@pytest.mark.parametrize("tokens", [0, 5])
def test_an_update_without_tokens_is_refused_on_a_new_and_on_a_cropped_cache(tokens: int) -> None:
    cache = PagedCache(CONFIG)
    if tokens:
        cache = filled(tokens=tokens + 1)
        cache.crop(-1)
    with pytest.raises(CacheMismatchError, match=rf"no new tokens\. The cache already holds {tokens} tokens"):
        cache.update(kv(tokens=0), kv(tokens=0), 0)
    assert cache.get_seq_length() == tokens


def test_a_cache_for_another_number_of_layers_is_refused() -> None:
    with pytest.raises(CacheMismatchError, match="layer 3: this cache was made for a model with 3 layers"):
        filled().update(kv(), kv(), 3)


def test_a_cache_filled_by_other_weights_is_refused(model: PreTrainedModel) -> None:
    torch.manual_seed(1)
    other = LlamaForCausalLM(CONFIG).eval()
    ids = torch.arange(1, 10)[None]
    for filler, reader in ((model, other), (other, model)):
        cache = PagedCache(filler, block_size=16)
        filler(ids, past_key_values=cache)
        with pytest.raises(CacheMismatchError, match=r"the 9 cached tokens .* another model"):
            reader(ids[:, :1], past_key_values=cache)
        assert [cache.get_seq_length(layer) for layer in range(3)] == [9, 9, 9]
        cache.check_integrity()
        filler(ids[:, :1], past_key_values=cache)


def test_a_layer_that_lags_behind_is_refused() -> None:
    cache = PagedCache(CONFIG)
    for layer in (0, 2):
        cache.update(kv(), kv(), layer)
    cache.update(kv(tokens=1), kv(tokens=1), 0)
    with pytest.raises(CacheMismatchError, match="layer 1 holds 0 tokens per row, and the cache 5"):
        cache.update(kv(tokens=1), kv(tokens=1), 1)


def test_a_forward_after_an_interrupted_one_is_refused_once_and_the_interrupted_one_taken_back() -> None:
    cache = filled()
    cache.update(kv(tokens=2), kv(tokens=2), 0)
    with pytest.raises(
        CacheMismatchError, match=r"layer 0 is written again while layer 1 holds 5 .* interrupted"
    ):
        cache.update(kv(tokens=1), kv(tokens=1), 0)
    assert [cache.get_seq_length(layer) for layer in range(3)] == [5, 5, 5]
    for layer in range(3):
        cache.update(kv(tokens=1), kv(tokens=1), layer)
    cache.check_integrity()


@pytest.mark.parametrize("prompt", [3, 9, 11])
def test_a_prompt_shorter_than_the_cache_is_refused(model: PreTrainedModel, prompt: int) -> None:
    """The host would slice the prompt from the wrong end, and feed tokens again that are already cached."""
    cache = PagedCache(model, block_size=16)
    ids = torch.arange(1, 10)[None]
    out = model.generate(ids, past_key_values=cache, max_new_tokens=4)
    message = rf"the prompt has {prompt} tokens, but the cache already holds 12 per row"
    with pytest.raises(CacheMismatchError, match=message):
        model.generate(out[:, :prompt], past_key_values=cache, max_new_tokens=4)
    assert cache.get_seq_length() == 12
    more = torch.cat([out, ids[:, :3]], dim=1)
    assert torch.equal(
        model.generate(more, past_key_values=cache, max_new_tokens=4), model.generate(more, max_new_tokens=4)
    )


def test_a_first_forward_that_failed_is_taken_back(model: PreTrainedModel) -> None:
    cache = PagedCache(model, block_size=16)
    ids = torch.arange(1, 10)[None]

    def fail(*args: object) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model(ids, past_key_values=cache)
    handle.remove()
    assert cache.get_seq_length() == cache.stats().used_blocks == 0
    with torch.no_grad():
        assert torch.equal(model(ids, past_key_values=cache).logits, model(ids).logits)


def test_a_forward_without_new_tokens_is_refused(model: PreTrainedModel) -> None:
    cache = PagedCache(model, block_size=16)
    model(torch.arange(1, 10)[None], past_key_values=cache)
    with pytest.raises(CacheMismatchError, match=r"no new tokens\. The cache already holds 9 tokens per row"):
        model.model(inputs_embeds=torch.zeros(1, 0, 64), past_key_values=cache)


def test_a_mask_that_does_not_cover_the_history_is_refused(model: PreTrainedModel) -> None:
    cache = PagedCache(model, block_size=16)
    ids = torch.arange(1, 10)[None]
    model(ids, past_key_values=cache)
    with pytest.raises(
        CacheMismatchError, match=r"attention_mask covers 2 tokens.*holds 9 per row and 2 new"
    ):
        model(ids[:, :2], attention_mask=torch.ones(1, 2), past_key_values=cache)
    assert cache.get_seq_length() == 9


def test_another_batch_size_is_refused_with_the_way_out(model: PreTrainedModel) -> None:
    cache = PagedCache(model, block_size=16)
    ids = torch.arange(1, 10)[None].repeat(2, 1)
    model.generate(ids, past_key_values=cache, max_new_tokens=1)
    longer = torch.cat([ids, ids], dim=1)
    with pytest.raises(
        CacheMismatchError, match=r"has 6 rows, but the cache holds 2 rows.*batch_repeat_interleave"
    ):
        model.generate(longer, past_key_values=cache, max_new_tokens=4, num_beams=3)
    cache.check_integrity()


def test_a_bare_cache_for_an_encoder_decoder_is_refused() -> None:
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
    t5 = T5ForConditionalGeneration(config).eval()
    with pytest.raises(CacheMismatchError, match="EncoderDecoderCache"):
        t5.generate(
            torch.arange(1, 9)[None], past_key_values=PagedCache(t5, max_tokens=512), max_new_tokens=4
        )


def test_exhaustion_is_told_before_any_row_is_written_and_the_cache_goes_on() -> None:
    cache = filled(tokens=30, max_tokens=64)
    before = cache.stats(), [layer.keys.clone() for layer in cache.layers]
    with pytest.raises(
        PoolExhausted, match=r"5 new tokens for 2 rows need 2 blocks .* 1 of 5 are free"
    ) as caught:
        cache.update(kv(tokens=5), kv(tokens=5), 0)
    assert (caught.value.needed_blocks, caught.value.free_blocks, caught.value.block_size) == (2, 1, 16)
    assert cache.stats() == before[0]
    assert all(torch.equal(layer.keys + 0, keys) for layer, keys in zip(cache.layers, before[1], strict=True))
    for layer in range(3):
        cache.update(kv(tokens=2), kv(tokens=2), layer)
    assert cache.get_seq_length() == 32
    cache.check_integrity()


def test_repeated_rows_have_room_for_the_models_length_each() -> None:
    cache = PagedCache(CONFIG, block_size=16)
    for layer in range(3):
        cache.update(kv(batch=1, tokens=200), kv(batch=1, tokens=200), layer)
    assert cache.stats().num_blocks == 256 // 16
    cache.batch_repeat_interleave(4)
    marked = kv(batch=4, tokens=56) * torch.arange(4.0)[:, None, None, None]
    for layer in range(3):
        cache.update(marked, marked, layer)
    cache.check_integrity()
    assert torch.equal(cache.layers[2].keys[:, :, :200], kv(batch=1, tokens=200).repeat(4, 1, 1, 1))
    assert torch.equal(cache.layers[2].values[:, :, 200:], marked)


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_max_tokens_is_enough_however_the_tokens_are_spread(batch: int) -> None:
    cache = PagedCache(CONFIG, block_size=16, max_tokens=20 * batch)
    for layer in range(3):
        cache.update(kv(batch=batch, tokens=20), kv(batch=batch, tokens=20), layer)
    assert cache.get_seq_length() == 20


def hybrid() -> PreTrainedModel:
    """Convolution and attention layers in turn."""
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"] * 2,
        pad_token_id=0,
    )
    return Lfm2ForCausalLM(config).eval()


def test_exhaustion_in_a_hybrid_leaves_its_recurrent_states_alone() -> None:
    model, ids = hybrid(), torch.arange(1, 33)[None]
    wanted, cache = DynamicCache(config=model.config), PagedCache(model, block_size=16, max_tokens=32)
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
        model(ids[:, :20], past_key_values=wanted)
        with pytest.raises(PoolExhausted):
            model(ids[:, :20], past_key_values=cache)
        got, want = (model(ids[:, 20:21], past_key_values=c).logits for c in (cache, wanted))
    assert torch.allclose(got, want, atol=1e-5)


def test_a_crop_that_a_hybrid_cannot_do_changes_nothing() -> None:
    model, ids = hybrid(), torch.arange(1, 33)[None]
    cache = PagedCache(model, block_size=16)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    with pytest.raises(PagedCacheError, match="activate_past_recording"):
        cache.crop(-2)
    assert cache.get_seq_length() == 32


def test_exhaustion_at_the_first_prompt_leaves_an_empty_usable_cache() -> None:
    cache = PagedCache(CONFIG, block_size=16, max_tokens=64)
    with pytest.raises(PoolExhausted):
        cache.update(kv(tokens=100), kv(tokens=100), 0)
    cache.check_integrity()
    assert cache.get_seq_length() == 0
    cache.update(kv(batch=1, tokens=64), kv(batch=1, tokens=64), 0)
    assert cache.get_seq_length() == 64


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda cache: cache.batch_repeat_interleave(0),
            "repeats must be a positive number of copies per row, got 0",
        ),
        (lambda cache: cache.batch_select_indices(torch.tensor([True])), "one entry for each of the 2 rows"),
        (lambda cache: cache.batch_select_indices(torch.tensor([2])), r"selection of 0…1 .* got \[2\]"),
        (
            lambda cache: cache.batch_select_indices(torch.tensor([], dtype=torch.long)),
            r"non-empty selection",
        ),
        (lambda cache: cache.reorder_cache(torch.tensor([0, 5])), r"selection of 0…1 .* got \[0, 5\]"),
        (lambda cache: cache.reorder_cache(torch.tensor([True, False])), r"beam_idx must be one dimension"),
        (lambda cache: cache.reorder_cache(torch.tensor(1)), r"beam_idx must be one dimension"),
        (lambda cache: cache.batch_select_indices(torch.tensor([[True], [False]])), r"got shape \(2, 1\)"),
        (lambda cache: cache.batch_select_indices(torch.tensor([1.9, 0.0])), r"of torch.float32"),
        (lambda cache: cache.batch_select_indices(torch.tensor([1, 0], dtype=torch.uint8)), r"torch.uint8"),
        (lambda cache: cache.batch_select_indices(None), r"indices must be one dimension .* got None"),
        (
            lambda cache: cache.truncate_to(torch.ones(2, 4, dtype=torch.bool)),
            r"integer tensor .*bool",
        ),
        (lambda cache: cache.truncate_to(torch.ones(2, 0, dtype=torch.long)), r"input_ids has no tokens"),
        (lambda cache: cache.prune(1.0, 2), r"start must be a whole number, got 1.0"),
        (lambda cache: cache.crop(None), r"tokens_to_remove must be a whole number, got None"),
        (lambda cache: cache.crop(-1.0), r"tokens_to_remove must be a whole number, got -1.0"),
    ],
)
def test_wrong_rows_are_refused(call: Any, message: str) -> None:
    cache = filled()
    with pytest.raises(PagedCacheError, match=message):
        call(cache)
    cache.check_integrity()
    assert cache.batch_size == 2
