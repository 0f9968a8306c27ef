"""Numbers that are known, limits, what is refused, and how a plan shows itself."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, LlamaConfig, MistralConfig, T5Config

from hf_paged_cache import PagedCache, PagedCacheError, UnsupportedLayerError, plan_memory
from hf_paged_cache.tools.planner.amounts import as_bytes, shown
from tests.support.models import by_name, shared_model

GIB = 2**30


def llama(layers: int = 32, heads: int = 32, kv_heads: int = 32, **others: Any) -> LlamaConfig:
    sizes = {"hidden_size": 128 * heads, "intermediate_size": 11008, "vocab_size": 32000}
    return LlamaConfig(
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        **{"max_position_embeddings": 8192, "dtype": "float16"} | sizes | others,
    )


# --- what is known ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "per_token"),
    [
        pytest.param(llama(), 524_288, id="Llama-2-7B"),
        pytest.param(llama(kv_heads=8), 131_072, id="Llama-3-8B"),
        pytest.param(llama(layers=40, heads=40, kv_heads=8), 163_840, id="13B-class"),
    ],
)
def test_bytes_per_token_are_those_that_everybody_computes(config: LlamaConfig, per_token: int) -> None:
    plan = plan_memory(config, context=4096, batch=20)
    assert plan.bytes_per_token == per_token
    assert plan.chosen.growth_bytes_per_token == per_token
    assert plan.request_bytes == 4096 * per_token
    assert plan.batch_bytes == 20 * 4096 * per_token


def test_twenty_requests_of_llama_2_7b_take_43_gigabytes_and_the_pool_a_few_blocks_more() -> None:
    plan = plan_memory(llama(), context=4096, batch=20)
    assert plan.request_bytes == 2_147_483_648
    assert plan.batch_bytes == 42_949_672_960
    assert plan.pool_bytes == plan.batch_bytes + 19 * 64 * 524_288  # rows may be unlike in length
    assert plan.weight_bytes == 2 * 6_738_415_616


@pytest.mark.parametrize(
    ("config", "bound"),
    [
        # The window and its edge: 4096 / 64 + 1 blocks a row.
        pytest.param(MistralConfig(sliding_window=4096), 65 * 64 * 131_072, id="Mistral-7B-v0.1"),
        pytest.param(MistralConfig(sliding_window=1024), 17 * 64 * 131_072, id="a smaller window"),
    ],
)
def test_a_model_of_windows_is_bounded_by_them(config: MistralConfig, bound: int) -> None:
    plans = [plan_memory(config, context=n, memory="100GiB") for n in (1024, 32768, 131072)]
    assert plans[0].request_bytes == 1024 * 131_072
    assert [plan.request_bytes for plan in plans[1:]] == [bound, bound]
    assert plans[1].chosen.growth_bytes_per_token == 0
    assert plans[1].max_context is None
    assert " any " in str(plans[1])


def test_of_alternating_windows_only_the_full_layers_grow() -> None:
    config = Gemma2Config(max_position_embeddings=65536)
    short, long = (plan_memory(config, context=n).request_bytes for n in (32768, 65536))
    per_layer = 2 * 4 * 256 * 2
    assert plan_memory(config, context=64).bytes_per_token == 26 * per_layer
    assert plan_memory(config, context=64).chosen.growth_bytes_per_token == 13 * per_layer
    assert long - short == 32768 * 13 * per_layer


def test_weights_are_counted_once_where_embeddings_are_tied() -> None:
    tied, untied = (
        plan_memory(llama(tie_word_embeddings=is_tied), context=64).weight_bytes for is_tied in (True, False)
    )
    assert tied is not None
    assert untied == tied + 32000 * 4096 * 2


@pytest.mark.parametrize(
    ("weights", "expected"),
    [("float32", 4 * 6_738_415_616), (torch.bfloat16, 2 * 6_738_415_616), ("4GB", 4 * 10**9), (7, 7)],
)
def test_weights_can_be_told(weights: Any, expected: int) -> None:
    assert plan_memory(llama(), context=64, weights=weights).weight_bytes == expected


# --- what fits ----------------------------------------------------------------------------------------------


def test_what_fits_is_said_in_one_sentence() -> None:
    config = llama(kv_heads=8)
    arguments: dict[str, Any] = {"context": 8192, "weights": "12GiB", "memory": "24GiB"}
    fits = plan_memory(config, batch=4, **arguments)
    assert fits.verdict() == "auto fits: 7.98 GiB are left for activations and everything else."
    others = plan_memory(config, batch=20, **arguments)
    assert others.fits is False
    assert str(others.verdict()).endswith("What fits: int8, fp8, k8v4, int4, int8_block, int4_group.")
    nothing = plan_memory(config, batch=100, **arguments).verdict()
    assert nothing is not None
    assert nothing.startswith("Nothing fits. auto does not fit: 8,192 tokens x 100")
    assert "a batch of 40 in int4; a context of 2,830 in int4; a memory of 41.90 GiB" in nothing
    no_weights = plan_memory(config, batch=1, context=64, weights="25GiB", memory="24GiB").verdict()
    assert no_weights == "Nothing fits: the weights take 25.00 GiB of 24.00 GiB."


def test_without_a_memory_there_are_sizes_only() -> None:
    plan = plan_memory(llama(), context=64)
    assert (plan.fits, plan.max_context, plan.max_batch, plan.verdict()) == (None, None, None, None)
    assert "max context" not in str(plan)


# --- how it shows itself ------------------------------------------------------------------------------------


def test_a_plan_shows_the_same_numbers_everywhere(tmp_path: Any) -> None:
    plan = plan_memory(llama(), context=4096, batch=20, memory="80GiB", kv_cache_dtype="int8")
    text, page = str(plan), plan._repr_html_()
    for shown_number in ("266,240", "1.02 GiB", "20.31 GiB", "int8*", "device"):
        assert shown_number in text
        assert shown_number in page
    data = json.loads(plan.to_json(tmp_path / "plan.json"))
    assert data == json.loads((tmp_path / "plan.json").read_text())
    assert data["formats"][1]["batch_bytes"] == plan.batch_bytes
    assert data["memory_bytes"] == 80 * GIB
    assert [one["tier"] for one in data["formats"]] == ["device"] * 7


def test_a_format_that_cannot_store_the_heads_says_why_and_the_others_are_planned() -> None:
    plan = plan_memory(llama(hidden_size=32 * 80, head_dim=80), context=64)
    assert set(plan.refused) == {"int4_group"}
    assert "group_size must divide the head dim" in str(plan)
    with pytest.raises(KeyError, match="group_size"):
        plan.of("int4_group")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("24GiB", 24 * GIB), ("24 GB", 24 * 10**9), ("1.5kib", 1536), ("0.3GB", 300_000_000), ("7B", 7), (7, 7)],
)
def test_amounts_are_read_exactly(text: int | str, expected: int) -> None:
    assert as_bytes("memory", text) == expected


@pytest.mark.parametrize(
    ("count", "expected"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (GIB * 5 // 2, "2.50 GiB")]
)
def test_amounts_are_shown_in_units_of_1024(count: int, expected: str) -> None:
    assert shown(count) == expected


def test_the_length_that_a_cache_tells_is_a_number_of_tokens() -> None:
    config = llama(layers=1, heads=2, kv_heads=2)
    cache = PagedCache(config, max_tokens=64)
    cache.update(torch.zeros(1, 2, 10, 128), torch.zeros(1, 2, 10, 128), 0)
    assert type(cache.get_seq_length()) is not int
    plan = plan_memory(config, context=cache.get_seq_length())
    assert plan.request_bytes == plan_memory(config, context=10).request_bytes


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"context": 0}, "context must be a positive number of tokens, got 0"),
        ({"context": "4096"}, "context must be a positive number of tokens"),
        ({"batch": True}, "batch must be a positive number of rows, got True"),
        ({"kv_cache_dtype": "int2"}, "kv_cache_dtype must be one of auto, int8, .*got 'int2'"),
        ({"memory": "24 apples"}, "memory must be a number of bytes, or a string like '24GiB'"),
        ({"memory": "24G"}, "units are B, KB, MB, GB, TB, PB, KiB"),
        ({"memory": -1}, "memory must be a number of bytes"),
        ({"weights": "int4"}, "weights must be a number of bytes"),
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ({"dtype": torch.float64}, "dtype must be one of"),
        ({"block_size": 48}, "block_size must be a power of two"),
        ({"layer_dtypes": {99: "int8"}}, "layer_dtypes names layer 99"),
        ({"kv_cache_dtype": "int4_group", "group_size": 7}, "group_size must divide the head dim"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PagedCacheError, match=message):
        plan_memory(shared_model("llama").config, **{"context": 64, "group_size": 8} | arguments)


def test_models_that_cannot_be_planned_are_refused() -> None:
    with pytest.raises(PagedCacheError, match="config_or_model must be a transformers config"):
        plan_memory("meta-llama/Llama-2-7b-hf", context=64)
    with pytest.raises(UnsupportedLayerError, match="encoder-decoder"):
        plan_memory(T5Config(), context=64)
    with pytest.raises(PagedCacheError, match=r"weights are quantized.*weights='...GB'"):
        plan_memory(llama(quantization_config={"quant_method": "awq"}), context=64, memory="24GiB")
    told = plan_memory(
        llama(quantization_config={"quant_method": "awq"}), context=64, memory="24GiB", weights="4GB"
    )
    assert told.fits


def test_a_model_that_writes_nothing_is_refused_and_not_planned_as_free() -> None:
    model = by_name("llama").build()
    forward = model.forward
    model.forward = lambda ids, **others: forward(ids)
    with pytest.raises(PagedCacheError, match=r"wrote nothing to its cache.*model\.eval"):
        plan_memory(model, context=64)


@pytest.mark.parametrize(("context", "means"), [(512, "int4"), (513, "int8")])
def test_adaptive_is_planned_as_what_the_whole_context_would_be(context: int, means: str) -> None:
    plan = plan_memory(llama(), context=context, kv_cache_dtype="adaptive")
    assert plan.pool_bytes == plan.of(means).pool_bytes
    assert plan.notes[0].startswith(f"adaptive is planned as {means}, at all lengths")
    assert any("key_error_guard" in note for note in plan.notes) is (means == "int4")


def test_a_context_beyond_the_model_warns_and_one_within_does_not() -> None:
    with pytest.warns(UserWarning, match="9,000 tokens is longer than the 8,192.*max_position_embeddings"):
        plan_memory(llama(), context=9000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan_memory(llama(), context=8192)
