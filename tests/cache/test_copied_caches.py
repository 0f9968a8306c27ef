"""What copies of a cache must not lose, whatever was done to its blocks before."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_paged_cache import CacheMismatchError, PagedCache, PagedCacheError
from hf_paged_cache.config import LAYER_DTYPES
from hf_paged_cache.errors import PoolExhausted, StaleViewError
from tests.forward.interrupts import Interrupted, interrupting
from tests.support.models import shared_model
from tests.support.padded import fill, ragged
from tests.support.poison import poison
from tests.support.quantized import NAMES, cache_of, feed, feed_beams, ids, states, update_all


def test_rows_whose_blocks_lie_in_another_order_come_back_in_their_own() -> None:
    cache = cache_of(shared_model("llama"), "auto")
    update_all(cache, *states(20))
    cache.batch_repeat_interleave(3)
    for step in range(30):
        update_all(cache, *states(1, 3, seed=step))
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    twin = pickle.loads(pickle.dumps(cache))
    for layer, other in zip(cache.layers, twin.layers, strict=True):
        assert torch.equal(layer.keys.clone(), other.keys.clone())
        assert torch.equal(layer.values.clone(), other.values.clone())


@pytest.mark.parametrize("name", LAYER_DTYPES)
def test_windows_that_keep_more_than_they_need_find_room_again(name: str) -> None:
    model = shared_model("mistral")
    cache, twin = (
        PagedCache(model, kv_cache_dtype=name, block_size=16, group_size=8, max_tokens=800) for _ in range(2)
    )
    cache.activate_past_recording()
    for step in range(12):
        update_all(cache, *states(16, 2, seed=step))
    twin.load_state_dict(cache.state_dict())
    twin.check_integrity()
    for one in (cache, twin):
        one.crop(-100)
        update_all(one, *states(3, 2, seed=50))
    for layer, other in zip(cache.layers, twin.layers, strict=True):
        assert torch.equal(layer.keys.clone(), other.keys.clone())


@pytest.mark.parametrize("name", LAYER_DTYPES)
def test_a_dropped_fork_gives_its_blocks_back_without_waiting_for_the_garbage_collector(name: str) -> None:
    cache = cache_of(shared_model("gemma3"), name)
    update_all(cache, *states(40, 2))
    before = cache.stats().used_blocks
    gc.disable()
    try:
        fork = cache.fork()
        update_all(fork, *states(60, 2, seed=1))
        assert cache.stats().used_blocks > before
        del fork
        cache.check_integrity()
        assert cache.stats().used_blocks == before
    finally:
        gc.enable()


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_leave_a_block_to_a_fork_take_what_was_in_it_along(name: str) -> None:
    """Also when no slot is free but those of blocks that no row holds any more."""
    cache = cache_of(shared_model("llama"), name, sink_tokens=0)
    update_all(cache, *states(1))
    cache.batch_repeat_interleave(2)
    update_all(cache, *states(1, 2))
    update_all(cache, *states(40, 2))
    cache.crop(-40)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    forks = [cache.fork() for _ in range(2)]
    update_all(forks[0], *states(60, 2))  # takes what was just given back
    update_all(cache, *states(1, 2))
    for one in (cache, *forks):
        one.check_integrity()
        for layer, (keys, values) in zip(one.layers, before, strict=True):
            assert torch.equal(layer.keys[:, :, :2], keys)
            assert torch.equal(layer.values[:, :, :2], values)


@pytest.mark.parametrize("name", LAYER_DTYPES)
def test_a_cache_that_cannot_load_is_empty_and_holds_no_block(name: str) -> None:
    """Layers with a window have room, and come first; those that keep all tokens have none."""
    model = shared_model("gemma3")
    cache, small = (cache_of(model, name, max_tokens=size) for size in (800, 100))
    update_all(cache, *states(150, 2))
    cache.activate_past_recording()
    with pytest.raises(PoolExhausted, match="make the cache with a larger `max_tokens`"):
        small.load_state_dict(cache.state_dict())
    assert small.stats().used_blocks == 0
    assert small.get_seq_length() == 0
    small.check_integrity()
    small.crop(0)
    update_all(small, *states(30, 2))
    small.check_integrity()


# --- nothing but its own tokens -----------------------------------------------------------------------------


def _fed(model: Any, cache: PagedCache) -> None:
    feed(model, cache, ids(5))


def _cropped(model: Any, cache: PagedCache) -> None:
    cache.activate_past_recording()
    feed(model, cache, ids(52))
    cache.crop(-31)


def _truncated(model: Any, cache: PagedCache) -> None:
    cache.activate_past_recording()
    feed(model, cache, ids(52))
    assert cache.truncate_to(torch.cat((ids(52)[:, :37], ids(5)), 1)) == 37


def _padded(model: Any, cache: PagedCache) -> None:
    fill(model, cache, ragged(3, 20, 37))


WAYS: dict[str, Callable[[Any, PagedCache], None]] = {
    "five tokens": _fed,
    "after crop": _cropped,
    "after truncate_to": _truncated,
    "padding": _padded,
    "beams": feed_beams,
}


def _same(one: Any, other: Any) -> bool:
    """Whether two state dicts agree to the bit."""
    if isinstance(one, torch.Tensor):
        sides = [side.contiguous().view(-1).view(torch.uint8) for side in (one, other)]
        return one.shape == other.shape and torch.equal(*sides)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(item, other[key]) for key, item in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("name", LAYER_DTYPES)
def test_what_lies_beside_the_tokens_of_a_cache_is_in_none_of_its_copies(
    name: str, family: str, way: str
) -> None:
    """Whoever had the blocks before: what no token lies in is overwritten, and nobody sees it."""
    model = shared_model(family)
    cache = cache_of(model, name)
    feed(model, cache, ids(64, 4, seed=9))
    cache.reset()
    WAYS[way](model, cache)
    saved = cache.state_dict()
    twin = cache_of(model, name)
    twin.load_state_dict(saved)
    poison(cache)
    assert _same(cache.state_dict(), saved)
    assert _same(pickle.loads(pickle.dumps(cache)).state_dict(), saved)
    assert _same(twin.state_dict(), saved)
    for group in copy.deepcopy(cache)._state.groups:
        tokens = dict.fromkeys(group.blocks, group.num_tokens)
        want = group.export(tokens)
        # As if no block were partly filled: the whole of what lies in it.
        whole = group.export(dict.fromkeys(group.blocks, group.num_tokens + group.block_size))
        for index, layer in want.layers.items():
            assert _same(whole.layers[index].keys, layer.keys)
            assert _same(whole.layers[index].values, layer.values)
            assert _same(whole.layers[index].records, layer.records)


@pytest.mark.parametrize("name", LAYER_DTYPES)
def test_a_file_tells_nothing_of_whoever_had_the_blocks_before(name: str) -> None:
    """To the byte the file of a cache that never held another text."""
    model, files = shared_model("llama"), []
    for text in (None, ids(64, 4, seed=9)):
        cache = cache_of(model, name, max_tokens=300)
        if text is not None:
            feed(model, cache, text)
            cache.reset()
        feed(model, cache, ids(37))
        file = io.BytesIO()
        torch.save(cache.state_dict(), file)
        files.append(file.getvalue())
    assert files[0] == files[1]


def test_ids_that_were_cropped_are_in_no_copy() -> None:
    model = shared_model("llama")
    cache = cache_of(model, "auto")
    feed(model, cache, ids(40))
    cache.crop(-35)
    twin = copy.deepcopy(cache)
    assert torch.equal(twin.input_ids, ids(40)[:, :5])
    assert twin._state.rows.ids._ids[:, 5:40].tolist() != ids(40)[:, 5:].tolist()


# --- all or nothing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["auto", "int4"])
def test_loading_that_is_interrupted_leaves_the_cache_as_it_was_or_loaded(name: str) -> None:
    """At lines evenly spread over all that the package runs for it."""
    model = shared_model("llama")
    source, cache, other = (cache_of(model, name) for _ in range(3))
    feed(model, source, ids(40))
    feed(model, cache, ids(21, 1, seed=3))
    saved, before = source.state_dict(), cache.state_dict()
    other.load_state_dict(before)
    with interrupting(None) as lines:
        other.load_state_dict(saved)
    outcomes = []
    for at in range(0, lines[0], lines[0] // 40):
        with contextlib.suppress(Interrupted), interrupting(at):
            cache.load_state_dict(saved)
        outcomes.append(cache.get_seq_length() == 40)
        assert _same(cache.state_dict(), saved if outcomes[-1] else before)
        cache.check_integrity()
        if outcomes[-1]:
            cache.load_state_dict(before)
    assert False in outcomes
    cache.load_state_dict(saved)
    cache.check_integrity()
    assert torch.equal(feed(model, cache, ids(1)), feed(model, source, ids(1)))


def test_loading_into_a_full_pool_needs_no_room_beside_what_it_replaces() -> None:
    model = shared_model("llama")
    source, cache = (cache_of(model, "auto", max_tokens=96) for _ in range(2))
    for one, seed in ((source, 0), (cache, 1)):
        feed(model, one, ids(96, 1, seed=seed))
    fork = cache.fork()
    before = fork.state_dict()
    cache.load_state_dict(source.state_dict())
    assert _same(cache.state_dict(), source.state_dict())
    assert _same(fork.state_dict(), before)
    for one in (cache, fork):
        one.check_integrity()
    old = fork.layers[0].keys
    fork.load_state_dict(source.state_dict())
    with pytest.raises(StaleViewError):
        old.clone()


def test_a_cache_takes_back_what_it_had_room_for_itself() -> None:
    """Rounding up to blocks gave three rows more room than two get."""
    cache = cache_of(shared_model("llama"), "auto", block_size=16, max_tokens=150)
    update_all(cache, *states(1, 3))
    cache.reset()
    update_all(cache, *states(81, 2))
    saved, keys = cache.state_dict(), [layer.keys.clone() for layer in cache.layers]
    cache.load_state_dict(saved)
    cache.check_integrity()
    assert all(torch.equal(layer.keys.clone(), want) for layer, want in zip(cache.layers, keys, strict=True))


def test_a_cache_that_a_state_dict_does_not_fit_into_keeps_its_tokens() -> None:
    model = shared_model("llama")
    source, small = cache_of(model, "auto"), cache_of(model, "auto", max_tokens=64)
    feed(model, source, ids(100, 1))
    feed(model, small, ids(40, 1))
    before = small.state_dict()
    with pytest.raises(PoolExhausted, match="The cache is as it was"):
        small.load_state_dict(source.state_dict())
    assert _same(small.state_dict(), before)
    small.check_integrity()
    feed(model, small, ids(20, 1))


# --- what cannot be taken in --------------------------------------------------------------------------------


@pytest.mark.parametrize("has_config", [False, True])
def test_a_cache_with_other_layers_is_refused_by_their_number(has_config: bool) -> None:
    model = shared_model("llama")
    for layers in (1, 2, 4):
        other = DynamicCache(config=model.config) if has_config else DynamicCache()
        for layer_idx in range(min(layers, 3 if has_config else layers)):
            other.update(*states(5), layer_idx)
        if not has_config or layers < 3:
            with pytest.raises(
                PagedCacheError, match=r"has . layers, and the model 3|did not reach that layer"
            ):
                PagedCache.from_cache(other, model)
    assert PagedCache.from_cache(DynamicCache(), model).get_seq_length() == 0


@pytest.mark.parametrize("shape", [(0, 2, 3, 16, 16), (1, 0, 3, 16, 16), (1, 2, 3, 0, 16), (1, 2, 3, 16, 0)])
@pytest.mark.parametrize("name", ["auto", "int8", "int4"])
@pytest.mark.parametrize("is_warm", [False, True])
def test_k_and_v_without_rows_heads_or_channels_are_refused_and_change_nothing(
    name: str, shape: tuple[int, ...], is_warm: bool
) -> None:
    cache = cache_of(shared_model("llama"), name)
    if is_warm:
        update_all(cache, *states(5))
    before = cache.state_dict()
    keys, values = torch.zeros(shape[:4]), torch.zeros(*shape[:3], shape[4])
    for take in (
        cache.update,
        *([] if is_warm else [lambda k, v, i: cache.layers[i].lazy_initialization(k, v)]),
    ):
        with pytest.raises(
            CacheMismatchError, match="layer 1: K and V must have at least one row, one kv head"
        ):
            take(keys, values, 1)
    assert _same(cache.state_dict(), before)
    update_all(cache, *states(5))
    cache.check_integrity()
