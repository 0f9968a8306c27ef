"""What copies of a cache must not lose, whatever was done to its blocks before."""

from __future__ import annotations

import gc
import pickle

import pytest
import torch

from hf_paged_cache import PagedCache
from hf_paged_cache.config import LAYER_DTYPES
from hf_paged_cache.errors import PoolExhausted
from tests.models import shared_model
from tests.quantised import NAMES, cache_of, states, update_all


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
