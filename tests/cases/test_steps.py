"""A forward that fails anywhere is as if it had not been, and threads do not see each other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria

from hf_paged_cache import CacheMismatchError, PagedCache, PoolExhausted
from hf_paged_cache.formats import FORMATS
from tests.support.chats import BLOCK, assert_sound, fill, generate, paged, prompt, reference
from tests.support.models import shared_model
from tests.support.threads import in_threads


class _Stop(Exception):
    """What a hook raises."""


def _decoder_layers(model: Any) -> Any:
    return next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))


@pytest.mark.parametrize("warm", [0, BLOCK - 1, BLOCK + 1])
@pytest.mark.parametrize("failing", [1, -1])
@pytest.mark.parametrize("format_name", ["auto", *FORMATS])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_a_prompt_that_failed_in_any_layer_is_right_when_it_is_run_again(
    name: str, format_name: str, failing: int, warm: int
) -> None:
    """Case 69. All layers are at one length as soon as one looks, and no block is half-filled or lost."""
    model = shared_model(name)
    cache, alone = (paged(name, kv_cache_dtype=format_name) for _ in range(2))
    for one in (cache, alone) if warm else ():
        fill(model, one, prompt(1, warm))
    used = cache.stats().used_blocks

    def fail(*args: Any) -> None:
        raise _Stop

    handle = _decoder_layers(model)[failing].register_forward_pre_hook(fail)
    ids = prompt(1, 2 * BLOCK + 3, seed=1)
    try:
        for tokens in (1, ids.shape[1]):
            with pytest.raises(_Stop):
                fill(model, cache, ids[:, :tokens])
            assert_sound(cache, warm)
            assert {layer.get_seq_length() for layer in cache.layers} == {warm}
            assert cache.stats().used_blocks == used
    finally:
        handle.remove()
    assert torch.equal(fill(model, cache, ids), fill(model, alone, ids))
    assert_sound(cache, warm + ids.shape[1])


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2"])
def test_a_forward_that_failed_behind_its_last_layer_is_held_whole(name: str) -> None:
    """Case 69. In the head; the same prompt given to `generate` is not written twice."""
    model, cache, ids = shared_model(name), paged(name), prompt(1, 2 * BLOCK + 3)
    want = reference(model, ids, new=4)
    PagedCache(model)

    def fail(*args: Any) -> None:
        raise _Stop

    handle = model.get_output_embeddings().register_forward_pre_hook(fail)
    with pytest.raises(_Stop):
        fill(model, cache, ids)
    handle.remove()
    assert {layer.get_seq_length() for layer in cache.layers} == {2 * BLOCK + 3}
    assert generate(model, ids, cache, new=4).tolist() == want.tolist()
    assert_sound(cache, 2 * BLOCK + 6)


class _RaiseAt(StoppingCriteria):
    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.shape[1] == self.tokens:
            raise _Stop
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class _InterruptAt:
    """A streamer that a user interrupts after so many calls."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def put(self, value: torch.Tensor) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt

    def end(self) -> None:
        """Nothing to do."""


INTERRUPTIONS: dict[str, tuple[type[BaseException], Callable[[], dict[str, Any]]]] = {
    "stopping criteria": (_Stop, lambda: {"stopping_criteria": [_RaiseAt(BLOCK + 3)]}),
    "streamer": (KeyboardInterrupt, lambda: {"streamer": _InterruptAt(4)}),
}


@pytest.mark.parametrize("how", INTERRUPTIONS)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2", "gpt-oss"])
def test_an_answer_that_was_interrupted_can_be_gone_on_with(name: str, how: str) -> None:
    """Case 69. Between two steps of `generate`."""
    error, options = INTERRUPTIONS[how]
    model, cache, ids = shared_model(name), paged(name), prompt(1, BLOCK)
    want = reference(model, ids)
    PagedCache(model)
    with pytest.raises(error):
        generate(model, ids, cache, **options())
    held = int(cache.get_seq_length())
    assert BLOCK < held < want.shape[1] - 1
    assert {layer.get_seq_length() for layer in cache.layers} == {held}
    begun = want[:, : held + 1]
    got = generate(model, begun, cache, new=want.shape[1] - begun.shape[1])
    assert got.tolist() == want.tolist()
    assert_sound(cache, want.shape[1] - 1)


@pytest.mark.parametrize("format_name", ["auto", *FORMATS])
def test_a_full_pool_in_the_middle_of_an_answer_leaves_all_layers_at_one_length(format_name: str) -> None:
    """Case 43. And a crop makes room to go on."""
    model, cache = shared_model("llama"), paged(kv_cache_dtype=format_name, max_tokens=2 * BLOCK)
    with pytest.raises(PoolExhausted):
        generate(model, prompt(1, BLOCK + 5), cache, new=30)
    assert {layer.get_seq_length() for layer in cache.layers} == {2 * BLOCK}
    cache.crop(-8)
    fill(model, cache, prompt(1, 8, seed=3))
    assert_sound(cache, 2 * BLOCK)


# --- threads ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "format_name", "new"),
    [("llama", "auto", 40), ("llama", "int8", 12), ("llama", "int4", 12), ("gemma3", "auto", 12)],
)
def test_four_threads_over_one_pool_say_what_each_says_alone(name: str, format_name: str, new: int) -> None:
    """Case 81. Forks of one prefix; then the counts add up."""
    model, prefix = shared_model(name), prompt(1, BLOCK + 3)
    base = paged(name, kv_cache_dtype=format_name)
    fill(model, base, prefix)
    said = [torch.cat((prefix, prompt(1, 2 + seed, seed=seed)), dim=1) for seed in range(4)]
    want = [generate(model, ids, base.fork(), new=new).tolist() for ids in said]
    forks = [base.fork() for _ in said]
    got = in_threads(
        [lambda i=ids, c=fork: generate(model, i, c, new=new) for ids, fork in zip(said, forks, strict=True)]
    )
    assert [tokens.tolist() for tokens in got] == want
    held = {b for one in (base, *forks) for b in _blocks(one)}
    assert base._state.groups[0].manager.pool.num_referenced == len(held)
    for one in (base, *forks):
        one.check_integrity()


def _blocks(cache: PagedCache) -> set[int]:
    return {block for table in cache._state.groups[0].manager.tables for block in table.ids if block >= 0}


def test_one_cache_in_two_threads_is_refused_in_the_second() -> None:
    """Case 81. The first goes on as if alone."""
    model, cache, ids = shared_model("llama"), paged(), prompt(1, BLOCK + 1)
    inside, done = threading.Event(), threading.Event()

    def hold(*args: Any) -> None:
        if threading.current_thread().name == "first":
            inside.set()
            done.wait(20)

    handle = model.model.layers[1].register_forward_pre_hook(hold)
    results: dict[str, Any] = {}

    def run(name: str) -> None:
        try:
            results[name] = fill(model, cache, ids)
        except Exception as error:
            results[name] = error

    first = threading.Thread(target=run, args=("first",), name="first")
    try:
        first.start()
        assert inside.wait(20)
        run("second")
    finally:
        done.set()
        first.join()
        handle.remove()
    assert isinstance(results["second"], CacheMismatchError)
    assert "thread" in str(results["second"])
    assert torch.equal(results["first"], fill(model, paged(), ids))
    assert_sound(cache, BLOCK + 1)


# --- layers in several places -------------------------------------------------------------------------------


def test_layers_of_several_dtypes_have_a_pool_each_and_move_together() -> None:
    """Case 73. What several devices would do, seen on one: a pool is chosen by each layer's own K and V."""
    cache = paged(max_tokens=20 * BLOCK)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    held: list[torch.Tensor] = []
    for index, dtype in enumerate(dtypes):
        keys = torch.randn(2, 2, BLOCK + 1, 16).to(dtype)
        cache.update(keys, keys, index)
        held.append(keys)
    assert {pool.keys.dtype for pool in cache._state.groups[0].pools} == set(dtypes)
    cache.reorder_cache(torch.tensor([1, 1]))
    cache.crop(-2)
    for layer, keys in zip(cache.layers, held, strict=True):
        assert layer.keys.dtype == keys.dtype
        assert torch.equal(layer.keys + 0, keys[[1, 1], :, :-2])
    assert_sound(cache, BLOCK - 1)
