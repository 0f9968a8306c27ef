"""Copies of a cache: forks that share blocks, deep copies, snapshots. Each goes on by itself."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_paged_cache import PagedCache
from hf_paged_cache.errors import CacheMismatchError, PagedCacheError, PoolExhausted
from tests.support.models import cache_kwarg, shared_model
from tests.support.quantized import NAMES, cache_of, feed, ids, states, update_all
from tests.support.tails import few
from tests.support.threads import in_threads

FORMATS = ("auto", *NAMES)
MODELS = ("llama", "mistral", "gemma3")


def through_file(cache: PagedCache) -> PagedCache:
    file = io.BytesIO()
    torch.save(cache.state_dict(), file)
    file.seek(0)
    config = cache._state.config
    twin = PagedCache(
        cache._config,
        block_size=config.block_size,
        kv_cache_dtype=config.kv_cache_dtype,
        group_size=config.group_size,
    )
    twin.load_state_dict(torch.load(file, weights_only=True))
    return twin


COPIES: dict[str, Callable[[PagedCache], PagedCache]] = {
    "fork": lambda cache: cache.fork(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "state_dict": through_file,
}


def go_on(model: Any, cache: Any, tokens: torch.Tensor, steps: int = 20) -> torch.Tensor:
    """Logits of a chunk and of single tokens after it."""
    found = [feed(model, cache, tokens)[:, -1]]
    for step in range(steps):
        found.append(feed(model, cache, ids(1, tokens.shape[0], seed=step))[:, -1])
    return torch.stack(found)


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("case", MODELS)
def test_a_copy_and_its_original_go_on_as_if_alone(case: str, kind: str, name: str) -> None:
    model = shared_model(case)
    want = {}
    for seed in (1, 2):
        alone = cache_of(model, kind)
        feed(model, alone, ids(37))
        want[seed] = go_on(model, alone, ids(3, seed=seed))
    cache = cache_of(model, kind)
    feed(model, cache, ids(37))
    twin = COPIES[name](cache)
    assert twin.get_seq_length() == 37
    assert torch.equal(twin.input_ids, ids(37))
    assert torch.equal(go_on(model, twin, ids(3, seed=1)), want[1])
    assert torch.equal(go_on(model, cache, ids(3, seed=2)), want[2])
    for held in (cache, twin):
        held.check_integrity()


@pytest.mark.parametrize("kind", ["auto", "int8"])
def test_forks_share_blocks_until_one_of_them_writes(kind: str) -> None:
    cache = cache_of(shared_model("llama"), kind)
    update_all(cache, *states(40))
    twins = [cache.fork() for _ in range(5)]
    assert cache.stats().used_blocks == 3
    assert cache.stats().shared_blocks == 3
    for count, twin in enumerate(twins, start=1):
        update_all(twin, *states(1, seed=count))
        assert cache.stats().used_blocks == 3 + count
    update_all(cache, *states(1))
    assert cache.stats().used_blocks == 2 + 6  # the last one to write owns the open block by then
    del twins, twin
    gc.collect()
    cache.check_integrity()
    assert cache.stats().used_blocks == 3


def test_forks_of_forks_and_of_empty_caches_draw_on_one_pool() -> None:
    model = shared_model("llama")
    first = PagedCache(model, block_size=16, max_tokens=128)
    second = first.fork()
    third = second.fork()
    for cache in (first, second, third):
        feed(model, cache, ids(33, 1))
    assert first.stats().used_blocks == third.stats().used_blocks == 9
    assert first.memory_footprint().pool_bytes == third.memory_footprint().pool_bytes
    third.reset()
    assert first.stats().used_blocks == 6
    for cache in (first, second, third):
        cache.check_integrity()


def test_a_full_shared_pool_refuses_and_all_caches_stay_usable() -> None:
    model = shared_model("llama")
    caches = [PagedCache(model, block_size=16, max_tokens=64)]
    caches += [caches[0].fork() for _ in range(2)]
    feed(model, caches[0], ids(30, 1))
    feed(model, caches[1], ids(30, 1))
    with pytest.raises(PoolExhausted, match="which 3 caches share"):
        feed(model, caches[2], ids(120, 1))
    assert [cache.get_seq_length() for cache in caches] == [30, 30, 0]
    caches[0].reset()
    caches[1].reset()
    alone = PagedCache(model, block_size=16)
    assert torch.equal(feed(model, caches[2], ids(60, 1)), feed(model, alone, ids(60, 1)))


def test_a_pool_that_grows_takes_all_its_caches_along() -> None:
    model = shared_model("llama")
    cache = PagedCache(model, block_size=16)
    feed(model, cache, ids(40, 1))
    twin, blocks = cache.fork(), cache.stats().num_blocks
    twin.batch_repeat_interleave(40)
    feed(model, twin, ids(40, 40))
    assert twin.stats().num_blocks > blocks
    alone = PagedCache(model, block_size=16)
    feed(model, alone, ids(40, 1))
    assert torch.equal(go_on(model, cache, ids(3, 1)), go_on(model, alone, ids(3, 1)))
    cache.check_integrity()


def failing_forward(model: Any, cache: PagedCache, layer: int) -> None:
    """A forward that an exception leaves before a layer, after which nobody looks at the cache."""
    handle = model.model.layers[layer].register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        feed(model, cache, ids(5, 1, seed=7))
    handle.remove()


def grow_by(cache: PagedCache, model: Any) -> None:
    """Take so many blocks that the pool has to grow."""
    blocks = cache.stats().num_blocks
    cache.batch_repeat_interleave(40)
    feed(model, cache, ids(40, 40))
    assert cache.stats().num_blocks > blocks


@pytest.mark.parametrize("kind", ["auto", "int4"])
@pytest.mark.parametrize("case", MODELS)
def test_a_pool_grows_after_a_forward_of_another_cache_has_failed(case: str, kind: str) -> None:
    model = shared_model(case)
    cache = cache_of(model, kind)
    feed(model, cache, ids(40, 1))
    twin, alone = cache.fork(), copy.deepcopy(cache)
    failing_forward(model, twin, layer=1)
    grow_by(cache, model)
    assert torch.equal(go_on(model, twin, ids(3, 1)), go_on(model, alone, ids(3, 1)))
    for held in (cache, twin):
        held.check_integrity()


def test_and_the_failed_one_goes_on_as_a_dynamic_cache_would() -> None:
    model = shared_model("llama")
    cache, dynamic = PagedCache(model, block_size=16), DynamicCache(config=model.config)
    feed(model, cache, ids(40, 1))
    feed(model, dynamic, ids(40, 1))
    twin = cache.fork()
    failing_forward(model, twin, layer=1)
    grow_by(cache, model)
    torch.testing.assert_close(go_on(model, twin, ids(3, 1)), go_on(model, dynamic, ids(3, 1)))


def test_a_step_that_somebody_goes_on_with_after_the_pool_has_grown_is_written_where_it_lies_now() -> None:
    model = shared_model("llama")
    cache = PagedCache(model, block_size=16)
    feed(model, cache, ids(40, 1))
    twin = cache.fork()
    failing_forward(model, twin, layer=1)
    grow_by(cache, model)
    keys, values = states(5)
    for layer_idx in range(1, len(twin.layers)):
        twin.update(keys, values, layer_idx)
    update_all(twin, *states(1))
    assert all(torch.equal(layer.keys[:, :, 40:45] + 0, keys) for layer in twin.layers[1:])


def test_a_pool_stays_where_it_is_while_another_cache_is_in_a_forward() -> None:
    model = shared_model("llama")
    cache = PagedCache(model, block_size=16)
    feed(model, cache, ids(40, 1))
    twin, refused = cache.fork(), []

    def grow(*args: Any) -> None:
        with pytest.raises(PoolExhausted):
            grow_by(cache.fork(), model)
        refused.append(True)

    handle = model.model.layers[1].register_forward_pre_hook(grow)
    feed(model, twin, ids(5, 1))
    handle.remove()
    assert refused == [True]
    for layer_idx in range(len(twin.layers) - 1):  # nobody knows of a forward here, so it may go on
        twin.update(*states(1), layer_idx)
    grow()
    twin.update(*states(1), len(twin.layers) - 1)
    grow_by(cache.fork(), model)


def test_a_cache_that_went_on_into_the_room_of_a_fork_can_be_pickled() -> None:
    model = shared_model("llama")
    cache = PagedCache(model, block_size=16, max_tokens=64)
    feed(model, cache, ids(40, 1))
    cache.fork()
    feed(model, cache, ids(40, 1, seed=1))
    twin = pickle.loads(pickle.dumps(cache))
    assert twin.get_seq_length() == 80
    assert torch.equal(twin.layers[2].keys + 0, cache.layers[2].keys + 0)


def test_a_frozen_reader_leaves_no_trace() -> None:
    model = shared_model("mistral")
    cache = PagedCache(model, block_size=16)
    feed(model, cache, ids(30, 1))
    used, keys = cache.stats().used_blocks, [layer.keys.clone() for layer in cache.layers]
    with cache.frozen() as peek:
        feed(model, peek, ids(25, 1, seed=3))
        assert peek.get_seq_length() == 55
    assert peek.get_seq_length() == 0
    assert cache.get_seq_length() == 30
    assert cache.stats().used_blocks == used
    assert all(torch.equal(layer.keys + 0, kept) for layer, kept in zip(cache.layers, keys, strict=True))


def test_copies_work_where_gradients_are_recorded() -> None:
    model = shared_model("llama")
    cache = PagedCache(model, block_size=16)
    model(ids(20), **{cache_kwarg(): cache})
    for make in COPIES.values():
        twin = make(cache)
        assert torch.equal(twin.layers[1].keys + 0, cache.layers[1].keys + 0)


def test_a_fork_inside_a_forward_is_refused() -> None:
    model = shared_model("llama")
    cache = PagedCache(model, block_size=16)
    refused = []

    def fork(*args: Any) -> None:
        with pytest.raises(PagedCacheError, match="fork: a forward is in progress"):
            cache.fork()
        refused.append(True)

    handle = model.model.layers[1].register_forward_pre_hook(fork)
    feed(model, cache, ids(5))
    handle.remove()
    assert refused == [True]
    assert cache.get_seq_length() == 5


# --- snapshots ----------------------------------------------------------------------------------------------


def test_rows_that_share_blocks_share_them_after_loading() -> None:
    cache = cache_of(shared_model("llama"), "int8")
    update_all(cache, *states(40))
    cache.batch_repeat_interleave(6)
    assert through_file(cache).stats().used_blocks == 3


def test_a_layer_that_the_guard_has_moved_comes_back_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_paged_cache.store.key_guard.key_error", lambda layer_format, keys: 9.0)
    cache = cache_of(shared_model("llama"), "int4")
    update_all(cache, *states(70))
    update_all(cache, *states(1))
    assert set(cache.stats().layer_dtypes.values()) == {"k8v4"}
    twin = through_file(cache)
    assert twin.stats().layer_dtypes == cache.stats().layer_dtypes
    assert all(torch.equal(a.keys + 0, b.keys + 0) for a, b in zip(twin.layers, cache.layers, strict=True))


BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "not a dict": (lambda saved: 7, "must be what `cache.state_dict"),
    "other version": (lambda saved: saved | {"version": 99}, "version is 99 there and 2 here"),
    "other blocks": (
        lambda saved: saved | {"settings": saved["settings"] | {"block_size": 64}},
        "block_size is 64 there and 16 here",
    ),
    "other format": (
        lambda saved: saved | {"settings": saved["settings"] | {"kv_cache_dtype": "int8"}},
        "kv_cache_dtype is int8 there and auto here",
    ),
    "other layers": (lambda saved: saved | {"tokens": {0: 5}}, r"layers is \[0\] there"),
    "cut": (lambda saved: {k: v for k, v in saved.items() if k != "groups"}, "lacks groups"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_state_dict_that_does_not_fit_is_refused_and_changes_nothing(name: str) -> None:
    damage, message = BAD[name]
    cache = cache_of(shared_model("llama"), "auto")
    update_all(cache, *states(20))
    with pytest.raises(PagedCacheError, match=message):
        cache.load_state_dict(damage(cache.state_dict()))
    assert cache.get_seq_length() == 20
    cache.check_integrity()


def test_a_snapshot_that_does_not_fit_into_the_pool_is_refused() -> None:
    cache = cache_of(shared_model("llama"), "auto")
    update_all(cache, *states(200))
    small = cache_of(shared_model("llama"), "auto", max_tokens=64)
    with pytest.raises(PoolExhausted, match="larger `max_tokens`"):
        small.load_state_dict(cache.state_dict())
    assert small.get_seq_length() == 0
    update_all(small, *states(30))
    small.check_integrity()


# --- threads ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", few(FORMATS, {"auto", "int4"}))
def test_caches_over_one_pool_in_four_threads_answer_as_if_alone(kind: str) -> None:
    model = shared_model("mistral")
    base = cache_of(model, kind)
    feed(model, base, ids(30, 1))
    caches = [base.fork() for _ in range(4)]
    alone = [base.fork() for _ in range(4)]
    want = [go_on(model, cache, ids(3, 1, seed=seed)) for seed, cache in enumerate(alone)]
    got = in_threads(
        [lambda c=cache, s=seed: go_on(model, c, ids(3, 1, seed=s)) for seed, cache in enumerate(caches)]
    )
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    base.check_integrity()
    del caches, alone
    gc.collect()
    assert base.stats().used_blocks == len(
        {i for group in base._state.groups for t in group.manager.tables for i in t.ids if i >= 0}
    ) * len(base._state.groups)


def test_one_cache_in_two_threads_is_refused_and_the_first_goes_on() -> None:
    model = shared_model("llama")
    cache = PagedCache(model, block_size=16)
    inside, done = threading.Event(), threading.Event()

    def hold(*args: Any) -> None:
        inside.set()
        done.wait(60)

    handle = model.model.layers[1].register_forward_pre_hook(hold)
    alone = feed_in_thread = None

    def first() -> torch.Tensor:
        return feed(model, cache, ids(9, 1))

    def second() -> Any:
        inside.wait(60)
        try:
            return cache.update(*states(1), 0)
        finally:
            done.set()

    feed_in_thread, refused = in_threads([first, second])
    handle.remove()
    assert isinstance(refused, CacheMismatchError)
    assert "another thread" in str(refused)
    assert "cache.fork()" in str(refused)
    alone = feed(model, PagedCache(model, block_size=16), ids(9, 1))
    assert torch.equal(feed_in_thread, alone)
    assert cache.get_seq_length() == 9


def test_a_cache_can_change_threads_between_calls_also_after_a_failure() -> None:
    model = shared_model("llama")
    cache = PagedCache(model, block_size=16)
    handle = model.model.layers[1].register_forward_pre_hook(lambda *args: 1 / 0)
    (failed,) = in_threads([lambda: feed(model, cache, ids(9, 1))])
    handle.remove()
    assert isinstance(failed, ZeroDivisionError)
    got = [feed(model, cache, ids(9, 1)), *in_threads([lambda: feed(model, cache, ids(4, 1, seed=1))])]
    alone = PagedCache(model, block_size=16)
    for mine, tokens in zip(got, (ids(9, 1), ids(4, 1, seed=1)), strict=True):
        assert torch.equal(mine, feed(model, alone, tokens))


def test_what_is_loaded_wants_no_gradients() -> None:
    model, cache = shared_model("llama"), PagedCache(shared_model("llama"), block_size=16)
    with torch.no_grad():
        model(ids(20), **{cache_kwarg(): cache})
    saved = cache.state_dict()
    cache.reset()
    model(ids(10), **{cache_kwarg(): cache})
    cache.load_state_dict(saved)
    model(ids(3), **{cache_kwarg(): cache}).logits.sum().backward()
    model.zero_grad()
