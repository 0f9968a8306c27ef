"""Memory comes back, is bounded where a bound was given, and follows what is stored."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria

from hf_paged_cache import PagedCache, PagedCacheError, PoolExhausted
from hf_paged_cache.formats import FORMATS
from tests.support.chats import AT_EDGES, BLOCK, assert_sound, fill, generate, given, paged, prompt, reference
from tests.support.models import shared_model
from tests.support.quantized import states, update_all


@pytest.mark.parametrize("format_name", ["auto", "int8", "int4"])
def test_one_cache_for_many_prompts_takes_no_more_than_for_one(format_name: str) -> None:
    """Case 39. Generate and reset, again and again: the same pools, all of their blocks free."""
    model, cache = shared_model("llama"), paged(kv_cache_dtype=format_name)
    seen = set()
    for turn in range(25):
        generate(model, prompt(2, BLOCK - 2 + turn % 5, seed=turn), cache, new=3)
        cache.reset()
        assert cache.stats().used_blocks == 0
        pools = cache._state.groups[0].pools
        seen.add((cache.memory_footprint().pool_bytes, *(pool.keys.data_ptr() for pool in pools)))
    assert len(seen) == 1
    cache.check_integrity()


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
def test_a_new_cache_for_every_prompt_dies_with_its_last_name(name: str) -> None:
    """Case 39. Without the garbage collector, after forwards and `generate`, with views that were read."""
    model = shared_model(name)
    gc.disable()
    try:
        for turn in range(10):
            cache = paged(name)
            fill(model, cache, prompt(1, BLOCK - 1))
            generate(model, prompt(1, BLOCK + 2), cache, new=2)
            assert cache.layers[0].keys.sum().isfinite()
            died = weakref.ref(cache), weakref.ref(cache._state.groups[0].pools[0].keys)
            del cache
            assert [ref() for ref in died] == [None, None], turn
    finally:
        gc.enable()


@pytest.mark.parametrize("format_name", ["auto", "int8", "int4"])
def test_forwards_with_gradients_leave_no_graph_in_the_cache(format_name: str) -> None:
    """Case 41. What is stored is a constant, and the graph of a forward dies with its output."""
    model, cache = shared_model("llama"), paged(kv_cache_dtype=format_name)
    hidden: list[weakref.ref[torch.Tensor]] = []
    handle = model.model.layers[0].register_forward_hook(
        lambda module, args, output: hidden.append(
            weakref.ref(output if isinstance(output, torch.Tensor) else output[0])
        )
    )
    try:
        for step, tokens in enumerate((BLOCK + 1, 1, 3, BLOCK, 1)):
            out = model(prompt(2, tokens, seed=step), **given(cache))
            assert out.logits.requires_grad
            del out
            assert [ref() for ref in hidden] == [None] * len(hidden)
    finally:
        handle.remove()
    for pool in cache._state.groups[0].pools:
        for tensor in (pool.keys, pool.values):
            assert tensor.grad_fn is None
            assert not tensor.requires_grad
    for layer in cache.layers:
        with pytest.raises(PagedCacheError, match="a gradient has arrived"):
            (layer.keys + 0).sum().backward()


OPERATIONS = ("update", "update", "update", "crop", "reorder", "select", "repeat", "copy", "reset")


@pytest.mark.parametrize("format_name", ["auto", *FORMATS])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_free_and_held_blocks_add_up_after_whatever_is_done(name: str, format_name: str) -> None:
    """Case 42. Random steps; after each one counts agree with tables, and free and held blocks are all."""
    draw = random.Random(5)
    cache = paged(name, kv_cache_dtype=format_name, max_tokens=20 * BLOCK)
    cache.activate_past_recording()
    kept: list[PagedCache] = []
    for _ in range(60):
        _do(draw.choice(OPERATIONS), cache, draw, kept)
        for one in (cache, *kept):
            one.check_integrity()
            stats = one.stats()
            assert stats.free_blocks + stats.used_blocks <= stats.num_blocks
            for group in one._state.groups:
                pool = group.manager.pool
                assert pool.num_free + pool.num_pending + pool.num_referenced == pool.num_blocks
    cache.reset()
    assert cache.stats().used_blocks == 0


def _do(operation: str, cache: PagedCache, draw: random.Random, kept: list[PagedCache]) -> None:
    rows = max(1, cache.batch_size)
    if operation == "update":
        tokens = draw.choice((1, 1, 3, BLOCK - 1, BLOCK, BLOCK + 1))
        try:
            update_all(cache, *states(tokens, rows=rows, seed=draw.randrange(99)))
        except PoolExhausted:
            cache.reset()
    elif operation == "crop" and cache.get_seq_length():
        with suppress(PagedCacheError):  # a window forgets at every crop what it could have rolled back
            cache.crop(-draw.randrange(0, min(20, int(cache.get_seq_length()))))
    elif operation == "reorder":
        cache.reorder_cache(torch.tensor([draw.randrange(rows) for _ in range(rows)]))
    elif operation == "select":
        cache.batch_select_indices(torch.tensor(sorted(draw.sample(range(rows), draw.randint(1, rows)))))
    elif operation == "repeat" and rows <= 2:
        cache.batch_repeat_interleave(draw.randint(1, 3))
    elif operation == "copy":
        kept[:] = [copy.deepcopy(cache)]
    elif operation == "reset" and draw.random() < 0.3:
        cache.reset()


@pytest.mark.parametrize("format_name", ["auto", "int8", "int4"])
def test_a_bounded_cache_says_so_before_it_writes_and_goes_on(format_name: str) -> None:
    """Case 43. Four blocks, and five blocks of tokens."""
    model, cache = shared_model("llama"), paged(kv_cache_dtype=format_name, max_tokens=4 * BLOCK)
    total = 4
    with pytest.raises(PoolExhausted, match="max_tokens") as caught:
        fill(model, cache, prompt(1, 5 * BLOCK))
    assert caught.value.needed_blocks == 5
    assert_sound(cache, 0)
    fill(model, cache, prompt(1, total * BLOCK - 1))
    held = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    with pytest.raises(PoolExhausted, match="nothing was written"):
        fill(model, cache, prompt(1, 2))
    assert_sound(cache, total * BLOCK - 1)
    assert cache.stats().used_blocks == total
    for layer, (keys, values) in zip(cache.layers, held, strict=True):
        assert torch.equal(layer.keys + 0, keys)
        assert torch.equal(layer.values + 0, values)
    fill(model, cache, prompt(1, 1))
    assert_sound(cache, total * BLOCK)


def test_generation_that_runs_into_the_bound_leaves_what_it_has_said() -> None:
    """Case 43. The answer can be finished after a crop."""
    model, cache, ids = shared_model("llama"), paged(max_tokens=2 * BLOCK), prompt(1, BLOCK)
    with pytest.raises(PoolExhausted):
        generate(model, ids, cache, new=40)
    assert_sound(cache, 2 * BLOCK)
    cache.crop(-(BLOCK + 1))
    want = reference(model, ids, new=BLOCK)
    PagedCache(model)
    assert generate(model, ids, cache, new=BLOCK).tolist() == want.tolist()


class _StopAfter(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize("tokens", AT_EDGES)
def test_blocks_in_use_follow_what_was_said_and_not_what_might_have_been(tokens: int) -> None:
    """Case 43. `max_new_tokens` reserves nothing."""
    cache = paged()
    generate(
        shared_model("llama"), prompt(2, tokens), cache, new=200, stopping_criteria=[_StopAfter(tokens + 3)]
    )
    assert_sound(cache, tokens + 2)
    assert cache.stats().used_blocks == 2 * -(-(tokens + 2) // BLOCK)


def test_a_fresh_cache_has_reserved_nothing_however_large_it_may_become() -> None:
    """Case 74. Pools are made at the first update (and pages of theirs only when they are written)."""
    cache = paged(max_tokens=10_000 * BLOCK)
    footprint, stats = cache.memory_footprint(), cache.stats()
    assert footprint.pool_bytes == footprint.used_bytes == footprint.table_bytes == 0
    assert stats.num_blocks == 0
    fill(shared_model("llama"), cache, prompt(1, 3))
    assert cache.stats().num_blocks == 10_000
    assert cache.stats().used_blocks == 1
