"""What a cache knows of its text: prompts that disagree are refused, edited chats keep what they share."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_paged_cache import PagedCache
from hf_paged_cache.errors import CacheMismatchError, PagedCacheError, PoolExhausted
from hf_paged_cache.forward.token_ids import TokenIds
from tests.support.models import by_name, cache_kwarg, shared_model
from tests.support.quantized import NAMES, cache_of, feed, ids, states, update_all

FORMATS = ("auto", *NAMES)


def greedy(model: Any, tokens: torch.Tensor, cache: Any = None, new: int = 8, **options: Any) -> torch.Tensor:
    given = {} if cache is None else {cache_kwarg(): cache}
    mask = torch.ones_like(tokens)
    found: torch.Tensor = model.generate(
        tokens, attention_mask=mask, max_new_tokens=new, do_sample=False, **given, **options
    )
    return found


def edited(tokens: torch.Tensor, at: int) -> torch.Tensor:
    tokens = tokens.clone()
    tokens[:, at] = (tokens[:, at] - 3 + 1) % 87 + 3
    return tokens


# --- prompts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["llama", "gpt2", "falcon"])
def test_a_cache_knows_the_ids_that_its_forwards_were_fed(case: str) -> None:
    model = shared_model(case)
    cache = PagedCache(model, block_size=16)
    out = greedy(model, ids(20), cache)
    assert torch.equal(cache.input_ids, out[:, :-1])
    cache.crop(-5)
    assert torch.equal(cache.input_ids, out[:, :-6])
    cache.reorder_cache(torch.tensor([1, 1]))
    assert torch.equal(cache.input_ids, out[[1, 1], :-6])
    cache.reset()
    assert cache.input_ids.shape[1] == 0


@pytest.mark.parametrize("length", [15, 16, 17, 32])
def test_a_prompt_that_is_all_cached_has_its_last_token_computed_again(length: int) -> None:
    model = shared_model("llama")
    tokens = ids(length)
    cache = PagedCache(model, block_size=16)
    feed(model, cache, tokens)
    out = greedy(model, tokens, cache)
    assert torch.equal(out, greedy(model, tokens))
    assert cache.get_seq_length() == out.shape[1] - 1


@pytest.mark.parametrize("at", [0, 7, 19])
def test_a_prompt_that_begins_with_another_text_is_refused(at: int) -> None:
    model = shared_model("llama")
    cache = PagedCache(model, block_size=16)
    feed(model, cache, ids(20, 1))
    other = edited(torch.cat((ids(20, 1), ids(4, 1, seed=1)), 1), at)
    with pytest.raises(CacheMismatchError, match=rf"differ at token {at} \(of 20 known.*truncate_to"):
        greedy(model, other, cache)
    assert cache.get_seq_length() == 20
    assert cache.truncate_to(other) == at
    assert torch.equal(greedy(model, other, cache), greedy(model, other))


def test_a_prompt_of_several_rows_may_go_on_from_one_cached_row() -> None:
    model = shared_model("llama")
    cache = PagedCache(model, block_size=16)
    feed(model, cache, ids(20, 1))
    tokens = torch.cat((ids(20, 1).repeat(3, 1), ids(4, 3, seed=2)), 1)
    assert torch.equal(greedy(model, tokens, cache), greedy(model, tokens))


def test_ids_of_embeddings_are_known_once_they_are_told() -> None:
    model = shared_model("llama")
    cache = PagedCache(model, block_size=16)
    tokens = ids(20, 1)
    with torch.no_grad():
        model(inputs_embeds=model.get_input_embeddings()(tokens), **{cache_kwarg(): cache})
    assert cache.input_ids.shape == (0, 0)
    with pytest.raises(PagedCacheError, match=r"not known; call `cache\.commit"):
        cache.truncate_to(tokens)
    cache.commit(tokens)
    assert torch.equal(cache.input_ids, tokens)
    assert cache.truncate_to(edited(tokens, 11)) == 11


@pytest.mark.parametrize("kind", FORMATS)
def test_truncating_gives_blocks_back_and_regrows_as_a_crop_would(kind: str) -> None:
    model = shared_model("llama")
    cache, cropped = cache_of(model, kind), cache_of(model, kind)
    for held in (cache, cropped):
        feed(model, held, ids(70))
    assert cache.truncate_to(edited(ids(70), 35)) == 35
    cropped.crop(-35)
    assert cache.stats().used_blocks == cropped.stats().used_blocks == 2 * 3
    more = ids(20, seed=4)
    assert torch.equal(feed(model, cache, more), feed(model, cropped, more))
    cache.check_integrity()


def test_truncating_leaves_a_token_to_feed() -> None:
    cache = PagedCache(shared_model("llama"), block_size=16)
    feed(shared_model("llama"), cache, ids(20))
    assert cache.truncate_to(ids(20)) == 19
    assert cache.truncate_to(ids(20)[:, :5]) == 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cache: cache.commit(ids(19)), "has 19 tokens per row, but the cache holds 20"),
        (lambda cache: cache.commit(edited(ids(20), 3)), "disagrees at token 3"),
        (lambda cache: cache.commit(ids(20, 3)), "has 3 rows, but the cache holds 2 rows"),
        (lambda cache: cache.commit([1, 2]), "input_ids must be an integer tensor .*got list"),
        (
            lambda cache: cache.truncate_to(torch.zeros(2, 5)),
            r"integer tensor \[rows, tokens\], got \(2, 5\)",
        ),
        (lambda cache: cache.truncate_to(ids(30, 3)), "has 3 rows, but the cache holds 2 rows"),
        (lambda cache: cache.prune(3, 21), r"prune\(3, 21\): expected 0 <= start <= end <= 20"),
        (lambda cache: cache.prune(5, 3), r"prune\(5, 3\)"),
        (
            lambda cache: cache.prune(3, 9),
            r"keys of a 'llama' model carry their positions.*cache\.crop\(-17\)",
        ),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(call: Any, message: str) -> None:
    cache = PagedCache(shared_model("llama"), block_size=16)
    feed(shared_model("llama"), cache, ids(20))
    keys = cache.layers[0].keys + 0
    with pytest.raises(PagedCacheError, match=message):
        call(cache)
    assert torch.equal(cache.layers[0].keys + 0, keys)
    assert torch.equal(cache.input_ids, ids(20))


# --- drop ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
def test_dropping_the_end_is_a_crop_for_every_model(kind: str) -> None:
    model = shared_model("llama")
    cache, cropped = cache_of(model, kind), cache_of(model, kind)
    for held in (cache, cropped):
        feed(model, held, ids(40))
    cache.prune(25, 40)
    cropped.crop(-15)
    assert torch.equal(feed(model, cache, ids(3)), feed(model, cropped, ids(3)))


@pytest.mark.parametrize(("start", "end"), [(0, 16), (5, 6), (16, 32), (10, 39), (7, 7)])
def test_dropping_inside_moves_the_rest_up_where_keys_have_no_positions(start: int, end: int) -> None:
    model = shared_model("falcon-alibi")
    cache, stock = PagedCache(model, block_size=16), DynamicCache(config=model.config)
    feed(model, cache, ids(40))
    feed(model, stock, ids(40))  # type: ignore[arg-type]  # any cache will do
    cache.prune(start, end)
    for layer in stock.layers:
        layer.keys = torch.cat((layer.keys[:, :, :start], layer.keys[:, :, end:]), 2)
        layer.values = torch.cat((layer.values[:, :, :start], layer.values[:, :, end:]), 2)
    left = torch.cat((ids(40)[:, :start], ids(40)[:, end:]), 1)
    assert torch.equal(cache.input_ids, left)
    for mine, theirs in zip(cache.layers, stock.layers, strict=True):
        assert torch.equal(mine.keys + 0, theirs.keys)
    torch.testing.assert_close(
        feed(model, cache, ids(3)), feed(model, stock, ids(3)), atol=1e-5, rtol=1e-5  # type: ignore[arg-type]
    )  # fmt: skip
    cache.check_integrity()


def test_dropping_inside_a_window_or_a_format_says_why_not() -> None:
    for cache, message in (
        (cache_of(shared_model("mistral"), "auto"), "layers with a window"),
        (cache_of(shared_model("falcon-alibi"), "int8"), "encode them a second time"),
    ):
        feed(shared_model("mistral" if "window" in message else "falcon-alibi"), cache, ids(20))
        with pytest.raises(PagedCacheError, match=message):
            cache.prune(3, 9)


# --- the ids by themselves ----------------------------------------------------------------------------------


def test_dropping_inside_shared_blocks_needs_room_or_changes_nothing() -> None:
    model, tokens = shared_model("falcon-alibi"), ids(64, 1)
    cache = PagedCache(model, block_size=16, max_tokens=64)
    feed(model, cache, tokens)
    forks = [cache.fork(), cache.fork()]
    with pytest.raises(PoolExhausted, match="57 new tokens"):
        cache.prune(3, 7)
    assert torch.equal(cache.input_ids, tokens)
    del forks
    cache.prune(3, 7)
    assert torch.equal(cache.input_ids, torch.cat((tokens[:, :3], tokens[:, 7:]), dim=1))
    cache.check_integrity()


def test_a_model_that_is_refused_takes_no_token_of_an_all_cached_prompt() -> None:
    mine, other = by_name("llama").build(), by_name("llama").build(noise=0.5)
    cache, tokens = PagedCache(mine, block_size=16), ids(48)
    PagedCache(other)
    feed(mine, cache, tokens)
    for _ in range(2):
        with pytest.raises(CacheMismatchError, match="computed by another model"):
            greedy(other, tokens, cache)
        assert cache.get_seq_length() == 48
    assert torch.equal(greedy(mine, tokens, cache), greedy(mine, tokens))


@pytest.mark.parametrize(
    "copied",
    [
        PagedCache.fork,
        copy.deepcopy,
        lambda cache: pickle.loads(pickle.dumps(cache)),
        lambda cache: cache.load_state_dict(cache.state_dict()) or cache,
        lambda cache: PagedCache.from_cache(cache, cache._model(), block_size=16),
    ],
    ids=["fork", "deepcopy", "pickle", "state_dict", "from_cache"],
)
def test_a_copy_knows_whose_weights_computed_it(copied: Any) -> None:
    mine, other = by_name("llama").build(), by_name("llama").build(noise=0.5)
    cache = PagedCache(mine, block_size=16)
    PagedCache(other)
    feed(mine, cache, ids(40))
    twin = copied(cache)
    with pytest.raises(CacheMismatchError, match="computed by another model"):
        feed(other, twin, ids(3))
    feed(mine, twin, ids(3))
    assert twin.get_seq_length() == 43


def test_what_is_known_is_always_a_beginning() -> None:
    history = TokenIds()
    history.feed(0, 5, 2, ids(5))
    history.feed(5, 6, 2, None)
    history.feed(6, 9, 2, ids(3))
    assert history.count == 5
    history.check_prompt(ids(5))
    history.crop(0)
    history.feed(0, 5, 2, ids(7))  # of another shape
    assert history.count == 0


def test_a_prompt_tells_ids_that_the_forward_does_not_show() -> None:
    history = TokenIds()
    history.check_prompt(ids(9))
    history.feed(0, 6, 2, None)
    history.feed(6, 9, 2, None)
    history.feed(9, 10, 2, None)
    assert torch.equal(history.known, ids(9))


def test_ids_grow_one_by_one() -> None:
    history, tokens = TokenIds(), ids(300, 1)
    for at in range(300):
        history.feed(at, at + 1, 1, tokens[:, at : at + 1])
    assert torch.equal(history.known, tokens)
    twin = history.copy()
    history.crop(10)
    assert torch.equal(twin.known, tokens)


# --- other caches -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 7, 8, 9, 40])
@pytest.mark.parametrize("case", ["llama", "mistral", "gemma3"])
def test_conversions_are_exact_in_both_directions(case: str, length: int) -> None:
    model = shared_model(case)
    stock = DynamicCache(config=model.config)
    feed(model, stock, ids(length))  # type: ignore[arg-type]
    paged = PagedCache.from_cache(stock, model, block_size=16)
    back = paged.to_dynamic_cache()
    for mine, theirs, third in zip(paged.layers, stock.layers, back.layers, strict=True):
        assert mine.get_seq_length() == theirs.get_seq_length() == third.get_seq_length() == length
        assert torch.equal(mine.keys + 0, theirs.keys)
        assert torch.equal(third.keys, theirs.keys)
        assert torch.equal(third.values, theirs.values)
    got = [feed(model, cache, ids(5, seed=1)) for cache in (stock, paged, back)]  # type: ignore[arg-type]
    assert torch.equal(got[0], got[2])
    torch.testing.assert_close(got[1], got[0], atol=2e-5, rtol=1e-4)
    paged.check_integrity()


@pytest.mark.parametrize("case", ["mistral", "gemma3"])
def test_what_a_window_had_dropped_before_a_conversion_is_not_cropped_to(case: str) -> None:
    model, tokens = shared_model(case), ids(40)
    stock, first = DynamicCache(config=model.config), PagedCache(model, block_size=16)
    for held in (stock, first):
        feed(model, held, tokens[:, :20])  # type: ignore[arg-type]
    for source in (stock, first):
        cache = PagedCache.from_cache(source, model, block_size=16)
        for copied in (cache, cache.fork(), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            with pytest.raises(PagedCacheError, match="cannot crop to 19 tokens"):
                copied.crop(-1)
            assert copied.get_seq_length() == 20
    feed(model, cache, tokens[:, 20:])
    cache.reset()
    feed(model, cache, tokens[:, :20])
    cache.crop(-1)  # what it stored itself is all there
    assert cache.get_seq_length() == 19


def test_a_cache_of_other_settings_is_taken_over() -> None:
    model = shared_model("mistral")
    first = PagedCache(model, block_size=64)
    feed(model, first, ids(40))
    second = PagedCache.from_cache(first, model, block_size=16, kv_cache_dtype="int8")
    assert second.get_seq_length() == 40
    assert set(second.stats().layer_dtypes.values()) == {"int8"}
    assert torch.equal(second.input_ids, first.input_ids)
    with pytest.raises(CacheMismatchError, match="they differ at token 7"):
        greedy(model, torch.cat((edited(ids(40), 7), ids(3)), dim=1), second)
    feed(model, second, ids(1))


def test_caches_that_cannot_be_converted_say_why() -> None:
    model = shared_model("llama")
    other = DynamicCache()
    for layer in range(5):
        other.update(*states(3), layer)
    for given, message in (
        (other, "5 layers, and the model 3"),
        ("text", "cannot convert a str"),
    ):
        with pytest.raises(PagedCacheError, match=message):
            PagedCache.from_cache(given, model)  # type: ignore[arg-type]


def test_reads_of_earlier_versions_work_and_name_what_replaces_them() -> None:
    cache = PagedCache(shared_model("llama"), block_size=16)
    update_all(cache, *states(20))
    keys = [layer.keys + 0 for layer in cache.layers]
    reads: dict[str, Any] = {
        "get_seq_length": lambda: cache.seen_tokens == cache.get_usable_length(1) == 20,
        "get_max_length": lambda: cache.get_max_cache_shape() == -1,
        "layers": lambda: torch.equal(cache.key_cache[1] + 0, keys[1]) and len(cache.value_cache) == 3,
        "keys": lambda: torch.equal(cache[2][0] + 0, keys[2]),
        "to_dynamic_cache": lambda: torch.equal(cache.to_legacy_cache()[0][0] + 0, keys[0]),
    }
    for name, read in reads.items():
        with pytest.warns(FutureWarning, match=name):
            assert read()
    with pytest.raises(IndexError, match="layer 3 of a cache with 3 layers"), pytest.warns(FutureWarning):
        cache[3]
    with pytest.raises(PagedCacheError, match="from_cache"):
        PagedCache.from_legacy_cache(())
