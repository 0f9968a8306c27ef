"""A forward that the user has compiled stays in one graph, and says and does what the plain one does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import DynamicCache, EncoderDecoderCache

from hf_paged_cache import CacheMismatchError, PagedCache, PoolExhausted
from hf_paged_cache.kernels import dispatch
from tests.host import test_architectures as architectures
from tests.support.chats import BLOCK, assert_sound, fill, given, paged, prompt
from tests.support.models import host_cache, shared_model
from tests.support.padded import positions, ragged

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def no_grad() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def compiled(model: Any) -> tuple[Any, CompileCounter]:
    counter = CompileCounter()
    return torch.compile(model.forward, dynamic=True, backend=counter), counter


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return bool((got - want).abs().max() <= 1e-4 * want.abs().max())


@pytest.mark.full
def test_a_graph_serves_copies_and_other_caches_and_changes_only_its_own() -> None:
    model, ids = shared_model("qwen2"), prompt(2, BLOCK + 4)
    forward, counter = compiled(model)
    cache, stock = paged("qwen2"), host_cache(model)
    forward(ids, **given(cache))
    fill(model, stock, ids)
    copies = [cache.fork(), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    for twin in [*copies, PagedCache.from_cache(cache, model, block_size=BLOCK)]:
        other = copy.deepcopy(stock)
        for seed in range(3):
            token = prompt(2, 1, seed=seed)
            assert close(forward(token, **given(twin)).logits, fill(model, other, token))
        assert_sound(twin, BLOCK + 7)
    assert_sound(cache, BLOCK + 4)
    assert counter.frame_count <= 3


@pytest.mark.full
@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_compiled_forward_that_failed_in_any_layer_is_as_if_it_had_not_been(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = shared_model("llama"), prompt(2, BLOCK + 4)
    forward, _ = compiled(model)
    cache, stock = paged(), host_cache(model)
    forward(ids, **given(cache))
    fill(model, stock, ids)
    write, calls = dispatch.write, []

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == failing:
            raise MemoryError
        return write(*args, **kwargs)

    monkeypatch.setattr(dispatch, "write", fails)
    token = prompt(2, 1, seed=9)
    with pytest.raises(MemoryError):
        forward(token, **given(cache))
    for seed in (9, 10):
        token = prompt(2, 1, seed=seed)
        assert close(forward(token, **given(cache)).logits, fill(model, stock, token))
    assert_sound(cache, BLOCK + 6)


@pytest.mark.full
def test_a_compiled_forward_reads_without_use_cache_and_gives_a_row_to_many() -> None:
    model, ids = shared_model("qwen2"), prompt(1, BLOCK + 4)
    forward, _ = compiled(model)
    cache, stock = paged("qwen2"), host_cache(model)
    forward(ids, **given(cache))
    fill(model, stock, ids.repeat(3, 1))
    tokens = prompt(3, 2, seed=1)
    want = fill(model, copy.deepcopy(stock), tokens)
    assert close(forward(tokens, use_cache=False, **given(cache)).logits, want)
    assert (cache.batch_size, cache.get_seq_length()) == (1, BLOCK + 4)
    assert close(forward(tokens, **given(cache)).logits, want)
    assert cache.batch_size == 3
    assert_sound(cache, BLOCK + 6)


def test_a_compiled_forward_tells_its_ids_and_is_refused_over_tokens_of_other_weights() -> None:
    model, ids = shared_model("qwen2"), prompt(2, BLOCK + 4)
    cache, other = paged("qwen2"), copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.mul_(1.1)
    compiled(model)[0](ids, **given(cache))
    assert torch.equal(cache.input_ids, ids)
    token = prompt(2, 1)
    for forward in (compiled(other)[0], other):
        with pytest.raises(CacheMismatchError, match="computed by another model"):
            forward(token, **given(cache))
    fill(model, cache, token)
    assert_sound(cache, BLOCK + 5)


@pytest.mark.full
def test_a_compiled_forward_of_padded_rows() -> None:
    model, inputs = shared_model("qwen2"), ragged(40, 20)
    forward, counter = compiled(model)
    cache, stock = PagedCache(model, block_size=BLOCK), host_cache(model)
    mask, ids = inputs["attention_mask"], inputs["input_ids"]
    for seed in range(BLOCK + 2):
        told = {"attention_mask": mask, "position_ids": positions(mask)[:, -ids.shape[1] :]}
        got, want = (run(ids, **told, **given(c)).logits for run, c in ((forward, cache), (model, stock)))
        shown = mask[:, -ids.shape[1] :].bool()
        assert close(got[shown], want[shown])
        mask, ids = torch.cat((mask, mask.new_ones(2, 1)), dim=1), prompt(2, 1, seed=seed)
    assert counter.frame_count <= 3
    cache.check_integrity()


@pytest.mark.parametrize(
    ("told", "is_padded"),
    [
        ("no mask", True),
        pytest.param("a short mask", True, marks=pytest.mark.full),
        pytest.param("a short mask", False, marks=pytest.mark.full),
        pytest.param("a short mask by place", True, marks=pytest.mark.full),
        pytest.param("a short mask by place", False, marks=pytest.mark.full),
    ],
)
def test_a_compiled_forward_whose_mask_does_not_cover_the_history_is_refused(
    told: str, is_padded: bool
) -> None:
    model, inputs = shared_model("qwen2"), ragged(40, 10 if is_padded else 40)
    cache, mask, new = PagedCache(model, block_size=BLOCK), inputs["attention_mask"], prompt(2, 4)
    model(**inputs, position_ids=positions(mask), **given(cache))
    forward, _ = compiled(model)
    after = positions(torch.cat((mask, torch.ones_like(new)), dim=1))[:, -4:]
    ways = {
        "no mask": lambda: forward(new, position_ids=after, **given(cache)),
        "a short mask": lambda: forward(
            new, attention_mask=torch.ones_like(new), position_ids=after, **given(cache)
        ),
        "a short mask by place": lambda: forward(new, torch.ones_like(new), after, **given(cache)),
    }
    with pytest.raises(CacheMismatchError, match="mask"):
        ways[told]()
    assert_sound(cache, 40)


@pytest.mark.full
def test_several_forwards_in_one_compiled_function_follow_each_other() -> None:
    model, counter = shared_model("mistral"), CompileCounter()
    cache, stock = paged("mistral"), host_cache(model)

    @torch.compile(dynamic=True, backend=counter)
    def steps(ids: torch.Tensor) -> tuple[torch.Tensor, int]:
        found = [model(part, **given(cache)).logits for part in ids.split(4, dim=1)]
        return torch.cat(found, dim=1), cache.get_seq_length()

    for seed in range(3):
        ids = prompt(2, 8, seed=seed)
        got, length = steps(ids)
        want = torch.cat([fill(model, stock, part) for part in ids.split(4, dim=1)], dim=1)
        assert close(got, want)
        assert length == cache.get_seq_length() == 8 * (seed + 1)
    assert counter.frame_count <= 3
    assert_sound(cache, 24)


@pytest.mark.full
def test_a_compiled_forward_of_an_encoder_decoder() -> None:
    model, ids = shared_model("bart"), prompt(2, 9)
    forward, counter = compiled(model)
    cache = EncoderDecoderCache(PagedCache(model, block_size=BLOCK), DynamicCache())
    stock = host_cache(model)
    for seed in range(4):
        new = {"decoder_input_ids": prompt(2, 1 if seed else 5, seed=seed)}
        assert close(forward(ids, **new, **given(cache)).logits, model(ids, **new, **given(stock)).logits)
    assert counter.frame_count <= 3


@pytest.mark.full
def test_gradients_pass_through_a_compiled_prompt() -> None:
    model, ids = shared_model("qwen2"), prompt(2, 9)
    with torch.enable_grad():
        got = compiled(model)[0](ids, **given(paged("qwen2"))).logits.sum()
        want = model(ids, use_cache=False).logits.sum()
        weight = model.model.layers[0].self_attn.k_proj.weight
        assert close(*(torch.autograd.grad(loss, weight)[0] for loss in (got, want)))


@pytest.mark.slow  # hybrids are compiled in pieces
@pytest.mark.parametrize("name", ["falcon-h1", "mamba2"])
def test_a_hybrid_whose_compiled_forward_failed_goes_on(name: str) -> None:
    model = architectures.model_of(name)
    forward, _ = compiled(model)
    cache, stock = PagedCache(model, block_size=BLOCK, max_tokens=64), architectures.stock(model)
    argument = architectures.cache_name(model)
    for tokens in (20, 1, 60, 1, 1):
        ids = architectures.prompt(tokens)
        if tokens == 60 and name != "mamba2":
            with pytest.raises(PoolExhausted):
                forward(input_ids=ids, use_cache=True, **{argument: cache})
            continue
        got = forward(input_ids=ids, use_cache=True, **{argument: cache}).logits
        assert close(got, architectures.step(model, ids, stock))
