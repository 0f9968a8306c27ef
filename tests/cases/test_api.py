"""Old names, odd reads, foreign settings: they work, or the error says what to do."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils import _pytree
from transformers import DynamicCache

from hf_paged_cache import PagedCache, PagedCacheError, PoolExhausted, disable, plan_memory
from hf_paged_cache.formats import FORMATS
from tests.support.chats import (
    AT_EDGES,
    BLOCK,
    FAMILIES,
    answer_elsewhere,
    assert_sound,
    fill,
    generate,
    given,
    paged,
    prompt,
    reference,
)
from tests.support.models import host_cache, shared_model
from tests.support.quantized import states, update_all

ROOT = Path(__file__).parents[2]

OLD_NAMES: dict[str, Any] = {
    "seen_tokens": lambda cache: cache.seen_tokens == BLOCK + 1,
    "get_max_cache_shape": lambda cache: cache.get_max_cache_shape() == cache.get_max_length(0),
    "get_usable_length": lambda cache: cache.get_usable_length(3) == BLOCK + 1,
    "get_usable_length of a layer": lambda cache: cache.get_usable_length(3, 1) == BLOCK + 1,
}


@pytest.mark.parametrize("old", OLD_NAMES)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_lengths_under_their_old_names_are_right_and_name_the_new_one(name: str, old: str) -> None:
    """Case 45. Remote model code still calls them."""
    cache = paged(name)
    fill(shared_model(name), cache, prompt(2, BLOCK + 1))
    with pytest.warns(FutureWarning, match=r"deprecated; use `get_(seq|max)_length"):
        assert OLD_NAMES[old](cache)


@pytest.mark.parametrize("gone", ["get_max_length_of", "_seen_tokens", "is_sliding_window"])
def test_a_name_that_no_cache_had_is_an_ordinary_attribute_error(gone: str) -> None:
    """Case 45. Nothing is made up for misspelt names."""
    with pytest.raises(AttributeError, match=gone):
        getattr(paged(), gone)


OLD_READS: dict[str, Any] = {
    "key_cache": lambda cache, i: (cache.key_cache[i], cache.value_cache[i]),
    "cache[i]": lambda cache, i: cache[i],
    "to_legacy_cache": lambda cache, i: cache.to_legacy_cache()[i],
}


@pytest.mark.parametrize("format_name", ["auto", "int8", "int4"])
@pytest.mark.parametrize("read", OLD_READS)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_old_reads_give_dense_rows_without_padding_and_name_the_new_one(
    name: str, read: str, format_name: str
) -> None:
    """Case 46. K and V are as long as the history, whatever the block size."""
    model = shared_model(name)
    for tokens in AT_EDGES:
        cache, stock = paged(name, kv_cache_dtype=format_name), host_cache(model)
        for one in (cache, stock):
            fill(model, one, prompt(2, tokens))
        for index, layer in enumerate(stock.layers):
            with pytest.warns(FutureWarning, match=r"deprecated; use `(layers\[i\]|to_dynamic_cache)"):
                keys, values = OLD_READS[read](cache, index)
            assert keys.shape == layer.keys.shape
            assert values.shape == layer.values.shape
            if format_name == "auto":
                assert torch.equal(keys + 0, layer.keys)
                assert torch.equal(values + 0, layer.values)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_iterating_gives_as_many_items_as_there_are_layers(name: str) -> None:
    """Case 46. Before and after the first forward."""
    cache = paged(name)
    assert len(list(cache)) == len(cache) == len(cache.layers)
    fill(shared_model(name), cache, prompt(2, BLOCK + 1))
    items = list(cache)
    assert len(items) == len(cache)
    assert all(torch.equal(item[0] + 0, layer.keys) for item, layer in zip(items, cache.layers, strict=True))
    with pytest.raises(IndexError, match="layer 9"):
        cache[9]


def test_an_older_transformers_is_named_before_anything_else_goes_wrong(tmp_path: Path) -> None:
    """Case 47. Not as an AttributeError or a name that cannot be imported."""
    stand_in = tmp_path / "transformers"
    stand_in.mkdir()
    (stand_in / "__init__.py").write_text('__version__ = "4.57.1"\n', encoding="utf-8")
    code = "from hf_paged_cache import PagedCache"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""},
    )
    assert done.returncode != 0
    assert "ImportError: hf_paged_cache needs transformers >= 5.17, and 4.57.1 is installed" in done.stderr


@pytest.mark.parametrize("tokens", [0, *AT_EDGES])
@pytest.mark.parametrize("format_name", ["auto", "int4"])
def test_a_cache_answers_what_generic_code_asks_of_a_container(format_name: str, tokens: int) -> None:
    """Case 49. `len`, truth, iteration, `repr`, equality, `hash`, membership."""
    cache = paged(kv_cache_dtype=format_name)
    if tokens:
        fill(shared_model("llama"), cache, prompt(2, tokens))
    assert len(cache) == 3
    assert bool(cache)  # the stock cache is false when it is empty, and is then replaced by `cache or ...`
    assert len(list(iter(cache))) == 3
    assert cache == cache
    assert cache != paged(kv_cache_dtype=format_name)
    assert cache in [cache]
    assert {cache: 1}[cache] == 1
    assert len(repr(cache)) < 120
    assert f"2 rows x {tokens} tokens" in repr(cache) or not tokens
    assert "tensor" not in repr(cache)


@pytest.mark.parametrize("named", ["static", "dynamic", "hybrid"])
def test_a_cache_type_in_the_models_own_settings_is_refused_by_the_host_or_overruled(named: str) -> None:
    """Case 50. `cache_implementation=None` says that the cache that was passed is meant."""
    model = shared_model("llama")
    ids = prompt(1, 9)
    want = reference(model, ids, new=4)
    model.generation_config.cache_implementation = named
    try:
        cache = paged()
        if named == "static":
            with pytest.raises(ValueError, match="cache_implementation"):
                generate(model, ids, cache, new=4)
            assert_sound(cache, 0)
        got = generate(model, ids, cache, new=4, cache_implementation=None)
        assert got.tolist() == want.tolist()
        assert_sound(cache, 12)
    finally:
        model.generation_config.cache_implementation = None


def test_the_callers_dicts_stay_as_they_are_and_serve_again() -> None:
    """Case 65. Settings and config, for two caches."""
    model = shared_model("llama")
    settings: dict[str, Any] = {
        "block_size": BLOCK,
        "kv_cache_dtype": "int4_group",
        "layer_dtypes": {1: "int8"},
        "group_size": {0: 8, 1: 8, 2: 16},
    }
    before, config = copy.deepcopy(settings), model.config.to_dict()
    caches = [PagedCache(model, **settings) for _ in range(2)]
    settings["layer_dtypes"][0] = "auto"  # a later change is none of theirs
    del settings["layer_dtypes"][0]
    for cache in caches:
        fill(model, cache, prompt(2, 3 * BLOCK))
    assert settings == before
    assert model.config.to_dict() == config
    assert caches[0].stats() == caches[1].stats()
    assert caches[0].stats().layer_dtypes == {0: "int4_group", 1: "int8", 2: "int4_group"}
    for a, b in zip(caches[0].layers, caches[1].layers, strict=True):
        assert torch.equal(a.keys + 0, b.keys + 0)


@pytest.mark.parametrize("device", ["cpu"])
def test_generate_does_not_try_to_compile_over_a_cache_that_is_not_static(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 75. `is_compileable` is False, and no graph is made."""
    model = shared_model("llama").to(device)
    cache = paged()
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: pytest.fail("compiled"))
    assert not cache.is_compileable
    generate(model, prompt(1, 9).to(device), cache, new=4)
    assert not cache.is_compileable


@pytest.mark.parametrize(
    ("name", "format_name"),
    [
        ("llama", "int4"),
        *(
            pytest.param(*x, marks=pytest.mark.full)
            for x in [("llama", "auto"), ("gemma3", "auto"), ("gpt2", "int8")]
        ),
    ],
)
def test_a_forward_that_the_user_compiled_has_three_graphs_at_most(name: str, format_name: str) -> None:
    """Case 75. 40 steps, over the edges of blocks and windows: what the plain forward says."""
    model = shared_model(name)
    caches = [paged(name, kv_cache_dtype=format_name) for _ in range(2)]
    if format_name != "auto":
        disable(model)  # a graph takes dense tensors, in which a token sees itself unrounded
    torch._dynamo.reset()
    counter = CompileCounter()
    forward = torch.compile(model.forward, dynamic=True, backend=counter)
    with torch.no_grad():
        for step in range(40):
            ids = prompt(2, BLOCK + 4 if not step else 1, seed=step)
            got, want = forward(ids, **given(caches[0])).logits, fill(model, caches[1], ids)
            assert (got - want).abs().max() <= 1e-4 * want.abs().max(), step
    assert_sound(caches[0], BLOCK + 43)
    assert counter.frame_count <= 3


@pytest.mark.parametrize("format_name", ["auto", "int8"])
def test_a_cache_is_one_opaque_leaf_for_pytrees(format_name: str) -> None:
    """Case 77. It is neither taken apart nor rebuilt with other layers."""
    cache = paged("gemma3", kv_cache_dtype=format_name)
    fill(shared_model("gemma3"), cache, prompt(2, BLOCK + 1))
    leaves, spec = _pytree.tree_flatten({"cache": cache, "ids": [1, 2]})
    assert leaves[0] is cache
    assert _pytree.tree_unflatten(leaves, spec)["cache"] is cache
    assert cache.is_sliding == host_cache(shared_model("gemma3")).is_sliding


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tokens", AT_EDGES)
def test_a_cache_turns_into_a_stock_one_and_back_exactly(name: str, tokens: int) -> None:
    """Case 4. `from_cache` and `to_dynamic_cache`, and both go on alike."""
    model, stock = shared_model(name), host_cache(shared_model(name))
    fill(model, stock, prompt(2, tokens))
    cache = PagedCache.from_cache(stock, model, block_size=BLOCK)
    assert_sound(cache, tokens)
    again = cache.to_dynamic_cache()
    assert isinstance(again, DynamicCache)
    assert not isinstance(again, PagedCache)
    for one, two, three in zip(stock.layers, cache.layers, again.layers, strict=True):
        for side in ("keys", "values"):
            want = getattr(one, side)
            assert torch.equal(getattr(two, side) + 0, want)
            assert torch.equal(getattr(three, side), want)
    ids = prompt(2, 3, seed=1)
    want = fill(model, stock, ids)
    for one in (cache, again):
        assert (fill(model, one, ids) - want).abs().max() <= 1e-4 * want.abs().max()


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_cache_in_bits_is_made_from_a_stock_one_within_the_error_of_its_format(format_name: str) -> None:
    """Case 4. Every format takes over what another cache holds."""
    stock = DynamicCache(config=shared_model("llama").config)
    update_all(stock, *states(2 * BLOCK + 5, rows=2))  # type: ignore[arg-type]
    cache = PagedCache.from_cache(
        stock, shared_model("llama"), block_size=BLOCK, kv_cache_dtype=format_name, group_size=8
    )
    for mine, theirs in zip(cache.layers, stock.layers, strict=True):
        assert (mine.keys - theirs.keys).norm() <= 0.15 * theirs.keys.norm()
    with pytest.raises(PagedCacheError, match="belongs to another model"):
        PagedCache.from_cache(stock, shared_model("mistral"))


def test_a_cache_takes_the_config_by_the_name_that_stock_caches_have_for_it() -> None:
    model, ids = shared_model("llama"), prompt(1, BLOCK)
    want = fill(model, PagedCache(model.config, block_size=BLOCK), ids)
    assert torch.equal(fill(model, PagedCache(config=model.config, block_size=BLOCK), ids), want)
    with pytest.raises(PagedCacheError, match=r"config_or_model must be .* got NoneType"):
        PagedCache()


@pytest.mark.parametrize("rows", [1, 3])
def test_max_cache_len_is_room_for_every_row(rows: int) -> None:
    """As in `StaticCache`; `max_tokens` is over all rows."""
    cache = paged(max_cache_len=2 * BLOCK)
    fill(shared_model("llama"), cache, prompt(rows, 2 * BLOCK))
    assert cache.stats().num_blocks == cache.stats().used_blocks == 2 * rows
    with pytest.raises(PoolExhausted, match="out of memory"):
        fill(shared_model("llama"), cache, prompt(rows, 1))
    again = pickle.loads(pickle.dumps(cache))
    assert again.get_seq_length() == 2 * BLOCK


def test_the_name_of_vllm_for_fp8_is_understood() -> None:
    model, ids = shared_model("llama"), prompt(1, BLOCK + 3)
    want = fill(model, paged(kv_cache_dtype="fp8"), ids)
    for settings in ({"kv_cache_dtype": "fp8_e4m3"}, {"layer_dtypes": dict.fromkeys(range(3), "fp8_e4m3")}):
        cache = paged(**settings)
        assert torch.equal(fill(model, cache, ids), want)
        assert set(cache.stats().layer_dtypes.values()) == {"fp8"}
    assert plan_memory(model, context=64, kv_cache_dtype="fp8_e4m3").kv_cache_dtype == "fp8"
    assert plan_memory(model, context=64, dtype="bf16").dtype == "bfloat16"


@pytest.mark.full  # a process that imports torch
def test_a_filled_cache_and_its_model_go_on_in_a_process_that_is_spawned() -> None:
    model, cache, ids = shared_model("llama"), paged(kv_cache_dtype="int4"), prompt(1, 2 * BLOCK + 4)
    fill(model, cache, ids[:, :-2])
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    child = context.Process(target=answer_elsewhere, args=(answer, model, cache, ids))
    child.start()
    implementation, tokens = answer.get(timeout=120)
    child.join()
    assert (implementation, tokens) == ("hf_paged_cache_sdpa", generate(model, ids, cache).tolist())
