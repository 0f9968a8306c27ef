"""What a forward leaves behind: all of it, or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StoppingCriteriaList

from hf_paged_cache import PagedCache
from hf_paged_cache.errors import CacheMismatchError, PagedCacheError, PoolExhausted
from tests.support.models import CASES, by_name, cache_kwarg, host_cache, paged_cache, shared_model
from tests.support.quantized import NAMES, cache_of, feed, ids

FORMATS = ("auto", *NAMES)


def greedy(model: Any, tokens: torch.Tensor, cache: Any, new: int = 8, **options: Any) -> torch.Tensor:
    found: torch.Tensor = model.generate(
        tokens,
        max_new_tokens=new,
        do_sample=False,
        **({} if cache is None else {cache_kwarg(): cache}),
        **options,
    )
    return found


@contextmanager
def failing(module: torch.nn.Module, error: BaseException, *, after: bool = False) -> Iterator[None]:
    def fail(*args: Any) -> None:
        raise error

    register = module.register_forward_hook if after else module.register_forward_pre_hook
    handle = register(fail)
    try:
        yield
    finally:
        handle.remove()


def contents(cache: PagedCache) -> list[torch.Tensor]:
    return [side + 0 for layer in cache.layers for side in (layer.keys, layer.values) if side is not None]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# --- failures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("warm", [0, 30])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("layer", [0, 1, -1])
@pytest.mark.parametrize("case", ["llama", "mistral", "gemma3"])
def test_a_forward_that_fails_in_any_layer_leaves_the_cache_as_it_was(
    case: str, layer: int, after: bool, warm: int, tokens: int
) -> None:
    model = shared_model(case)
    cache = PagedCache(model, block_size=16)
    if warm:
        feed(model, cache, ids(warm))
    before, used = contents(cache), cache.stats().used_blocks
    module = model.model.layers[layer].self_attn
    with failing(module, KeyboardInterrupt(), after=after), pytest.raises(KeyboardInterrupt):
        feed(model, cache, ids(tokens, seed=1))
    assert {part.get_seq_length() for part in cache.layers} == {cache.get_seq_length()}
    # After the attention of the last layer everything is written, and nobody can tell that the head failed.
    if not (after and module is model.model.layers[-1].self_attn):
        assert cache.get_seq_length() == warm
        assert cache.stats().used_blocks == used
        assert same(contents(cache), before)
    cache.check_integrity()


@pytest.mark.parametrize("kind", FORMATS)
def test_the_same_forward_again_gives_what_it_would_have_given(kind: str) -> None:
    model = shared_model("llama")
    cache, alone = cache_of(model, kind), cache_of(model, kind)
    for held in (cache, alone):
        feed(model, held, ids(30))
    for count, tokens in enumerate((ids(1, seed=1), ids(20, seed=2), ids(1, seed=3))):
        with failing(model.model.layers[count], ZeroDivisionError()), pytest.raises(ZeroDivisionError):
            feed(model, cache, tokens)
        assert torch.equal(feed(model, cache, tokens), feed(model, alone, tokens))
    cache.check_integrity()


def test_generate_stopped_from_outside_leaves_a_cache_to_go_on_with() -> None:
    model = shared_model("llama")

    class Stop:
        def __init__(self, error: BaseException, at: int) -> None:
            self.error, self.at = error, at

        def __call__(self, tokens: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            if tokens.shape[1] == self.at:
                raise self.error
            return torch.zeros(tokens.shape[0], dtype=torch.bool)

    class Streamer:
        seen = 0

        def put(self, value: torch.Tensor) -> None:
            self.seen += 1
            if self.seen == 5:
                raise KeyboardInterrupt

        def end(self) -> None:
            pass

    tokens = ids(30, 1)
    want = greedy(model, tokens, None, 20)
    for options in (
        {"stopping_criteria": StoppingCriteriaList([Stop(RuntimeError("enough"), 35)])},  # type: ignore[list-item]
        {"streamer": Streamer()},
    ):
        cache = PagedCache(model, block_size=16)
        with pytest.raises((RuntimeError, KeyboardInterrupt)):
            greedy(model, tokens, cache, 20, **options)
        held = cache.get_seq_length()
        assert {layer.get_seq_length() for layer in cache.layers} == {held}
        assert held > 30
        begun = want[:, : held + 1]
        rest = greedy(model, begun, cache, 20 - (held - 29), attention_mask=torch.ones_like(begun))
        assert torch.equal(rest, want)


def test_a_full_pool_is_refused_before_anything_is_written() -> None:
    model = shared_model("llama")
    cache = PagedCache(model, block_size=16, max_tokens=64)
    feed(model, cache, ids(50, 1))
    before = contents(cache)
    with pytest.raises(PoolExhausted):
        feed(model, cache, ids(30, 1))
    assert same(contents(cache), before)
    feed(model, cache, ids(10, 1))
    assert cache.get_seq_length() == 60


def test_a_loop_without_a_model_is_told_to_finish_its_forward() -> None:
    """Nothing on the stack says that the forward is over, so the order of the layers has to."""
    cache = cache_of(shared_model("llama"), "auto")
    keys = torch.randn(1, 2, 5, 16)
    cache.update(keys, keys, 0)
    assert cache.get_seq_length() == 5
    with pytest.raises(ValueError, match="interrupted: it is taken back now"):
        cache.update(keys, keys, 0)
    assert cache.get_seq_length() == 0


# --- use_cache=False ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("case", ["llama", "mistral", "gemma3", "gpt2", "falcon-alibi"])
def test_use_cache_false_reads_and_does_not_write(case: str, kind: str) -> None:
    model = shared_model(case)
    cache, alone = cache_of(model, kind), cache_of(model, kind)
    for held in (cache, alone):
        feed(model, held, ids(30))
    before, used = contents(cache), cache.stats().used_blocks
    for tokens in (ids(1, seed=1), ids(25, seed=2)):
        with torch.no_grad():
            got = model(tokens, **{cache_kwarg(): cache}, use_cache=False).logits
        assert cache.get_seq_length() == 30
        assert torch.equal(got, feed(model, alone.fork(), tokens))
    assert cache.stats().used_blocks == used
    assert same(contents(cache), before)
    cache.check_integrity()
    assert torch.equal(feed(model, cache, ids(5, seed=3)), feed(model, alone, ids(5, seed=3)))


def test_generate_without_use_of_a_warm_cache_is_refused() -> None:
    model = shared_model("llama")
    cache = PagedCache(model, block_size=16)
    feed(model, cache, ids(30, 1))
    with pytest.raises(PagedCacheError, match=r"use_cache=False.*cache\.frozen\(\)"):
        greedy(model, torch.cat((ids(30, 1), ids(3, 1)), 1), cache, use_cache=False)
    assert cache.get_seq_length() == 30
    assert torch.equal(
        greedy(model, ids(9, 1), PagedCache(model, block_size=16), use_cache=False),
        greedy(model, ids(9, 1), None),
    )


class Wrapped(torch.nn.Module):
    """Calls a model's forward by name, as adapters do."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.forward(*args, **kwargs)


@pytest.mark.parametrize("case", [case.name for case in CASES])
@pytest.mark.parametrize("call", ["model", "forward"])
def test_a_cache_that_is_passed_is_used_whatever_the_config_says(
    case: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fine-tuning recipes leave `use_cache` of the config at False."""
    model = shared_model(case)
    for module in model.modules():
        if hasattr(module, "config"):
            monkeypatch.setattr(module.config, "use_cache", False)
    cached = host_cache(model), paged_cache(model)
    run = model if call == "model" else Wrapped(model)
    encoded = {"input_ids": ids(7, 1)} if model.config.is_encoder_decoder else {}
    name = "decoder_input_ids" if encoded else "input_ids"
    for tokens in (ids(20, 1), ids(1, 1, seed=1), ids(3, 1, seed=2)):
        with torch.no_grad():
            want, got = (
                run(**encoded, **{name: tokens}, **{cache_kwarg(): cache}).logits for cache in cached
            )
        assert (got - want).abs().max() <= 2e-4 * want.abs().max()
    assert cached[0].get_seq_length() == cached[1].get_seq_length() == 24
    if call == "model":
        with torch.no_grad():
            run(**encoded, **{name: ids(2, 1)}, **{cache_kwarg(): cached[1]}, use_cache=False)
        assert cached[1].get_seq_length() == 24


def test_what_an_adapter_is_told_counts() -> None:
    model = shared_model("llama")
    cache = PagedCache(model, block_size=16)
    with torch.no_grad():
        Wrapped(model)(ids(20), **{cache_kwarg(): cache}, use_cache=False)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("case", ["llama", "falcon"])
def test_gradient_checkpointing_keeps_the_cache_from_the_layers(case: str) -> None:
    """So does the host with its own cache, and says so."""
    model = by_name(case).build().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    cache = PagedCache(model, block_size=16)
    got = model(ids(20), **{cache_kwarg(): cache}).logits
    got.sum().backward()
    assert cache.get_seq_length() == 0
    assert torch.equal(got, model(ids(20), **{cache_kwarg(): host_cache(model)}).logits)


# --- one row becomes several --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 3, "do_sample": True}])
@pytest.mark.parametrize("case", ["llama", "mistral", "gemma3", "gpt2"])
def test_one_cached_row_is_shared_by_all_rows_that_go_on_from_it(case: str, options: dict[str, Any]) -> None:
    model = shared_model(case)
    tokens = ids(40, 1)
    cache = PagedCache(model, block_size=16)
    feed(model, cache, tokens[:, :-1])

    def run(cache: Any) -> torch.Tensor:
        torch.manual_seed(0)
        found: torch.Tensor = model.generate(
            tokens,
            max_new_tokens=8,
            **{"do_sample": False} | options,
            **({cache_kwarg(): cache} if cache else {}),
        )
        return found

    assert torch.equal(run(cache), run(None))
    assert cache.batch_size == 3
    cache.check_integrity()


@pytest.mark.parametrize("options", [{"num_beams": 8}, {"num_return_sequences": 8, "do_sample": True}])
def test_beams_and_samples_share_the_blocks_of_their_prompt(options: dict[str, Any]) -> None:
    model = shared_model("llama")
    for size in (16, 64):
        cache = PagedCache(model, block_size=size)
        new, most = 24, []

        def count(tokens: torch.Tensor, scores: Any, cache: Any = cache, most: Any = most, **kw: Any) -> Any:
            most.append(cache.stats().used_blocks)
            return scores

        tokens = torch.cat([ids(128, 1, seed=s) for s in range(2)], 1)[:, :200]
        model.generate(
            tokens, max_new_tokens=new, logits_processor=[count], **{"do_sample": False} | options,
            **{cache_kwarg(): cache},
        )  # fmt: skip
        assert max(most) <= -(-200 // size) + 8 * (-(-new // size) + 1)


def test_a_spread_that_fails_is_undone() -> None:
    model = shared_model("llama")
    cache = PagedCache(model, block_size=16)
    feed(model, cache, ids(30, 1))
    with failing(model.model.layers[1], ZeroDivisionError()), pytest.raises(ZeroDivisionError):
        feed(model, cache, ids(4, 3))
    assert (cache.batch_size, cache.get_seq_length()) == (1, 30)
    with torch.no_grad():
        model(ids(4, 3), **{cache_kwarg(): cache}, use_cache=False)
    assert (cache.batch_size, cache.get_seq_length()) == (1, 30)
    with pytest.raises(ValueError, match="kv heads"):
        cache.update(torch.randn(3, 5, 1, 16), torch.randn(3, 5, 1, 16), 0)
    assert cache.batch_size == 1
    cache.check_integrity()


# --- encoder and decoder ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["t5", "bart"])
def test_an_encoder_is_read_once_also_after_a_failure_and_by_beams(case: str) -> None:
    model = shared_model(case)
    tokens, begun = ids(9, 1), ids(5, 1)
    begun[:, 0] = model.config.decoder_start_token_id
    cache = paged_cache(model)
    layers = model.decoder.block if case == "t5" else model.model.decoder.layers

    def forward(**options: Any) -> torch.Tensor:
        with torch.no_grad():
            out: torch.Tensor = model(input_ids=tokens, decoder_input_ids=begun, **options).logits
        return out

    with failing(layers[1], ZeroDivisionError()), pytest.raises(ZeroDivisionError):
        forward(**{cache_kwarg(): cache})
    assert cache.get_seq_length() == 0
    want = forward()
    torch.testing.assert_close(forward(**{cache_kwarg(): cache}), want, atol=1e-5, rtol=1e-5)
    cross = [layer.keys + 0 for layer in cache.cross_attention_cache.layers]
    longer = torch.cat((begun, begun[:, 1:]), 1)
    mask = torch.ones_like(longer)

    def beams(cache: Any) -> torch.Tensor:
        given = {"decoder_input_ids": longer, "decoder_attention_mask": mask, "num_beams": 3}
        return greedy(model, tokens, cache, **given)

    assert torch.equal(beams(cache), beams(None))
    assert all(
        torch.equal((layer.keys + 0)[:1], kept)
        for layer, kept in zip(cache.cross_attention_cache.layers, cross, strict=True)
    )


# --- forwards that end early --------------------------------------------------------------------------------


@contextmanager
def ending_at(model: Any, layer: int) -> Iterator[None]:
    """Let forwards do nothing more after so many layers."""
    left_out = model.model.layers[layer:]
    for module in left_out:
        module.forward = lambda hidden, *args, **kwargs: hidden
    try:
        yield
    finally:
        for module in left_out:
            del module.forward


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("given", ["model", "config"])
def test_a_model_without_its_last_layers_goes_on_as_with_the_default_cache(kind: str, given: str) -> None:
    model = by_name("llama").build()
    model.model.layers = model.model.layers[:2]  # the config still says three
    tokens = ids(40, 1)
    cache = cache_of(model if given == "model" else model.config, kind)
    found = greedy(model, tokens, cache, 20)
    if kind == "auto":
        assert torch.equal(found, greedy(model, tokens, DynamicCache(config=model.config), 20))
    assert [layer.get_seq_length() for layer in cache.layers] == [59, 59, 0]
    cache.check_integrity()


def test_a_forward_that_returned_early_counts_and_one_that_failed_there_does_not() -> None:
    model = shared_model("llama")
    for made_of in (model, model.config):
        cache = PagedCache(made_of, block_size=16)
        with ending_at(model, 2):
            feed(model, cache, ids(20))
        assert [layer.get_seq_length() for layer in cache.layers] == [20, 20, 0]
        cache = PagedCache(made_of, block_size=16)
        with failing(model.model.layers[2], ZeroDivisionError()), pytest.raises(ZeroDivisionError):
            feed(model, cache, ids(20))
        assert [layer.get_seq_length() for layer in cache.layers] == [0, 0, 0]


@pytest.mark.parametrize("kind", FORMATS)
def test_layers_of_unlike_lengths_are_named_and_can_be_made_alike(kind: str) -> None:
    model = shared_model("llama")
    cache, control = cache_of(model, kind), cache_of(model, kind)
    for held in (cache, control):
        feed(model, held, ids(20))
    with ending_at(model, 2):  # drafts of the first layers
        for seed in range(3):
            feed(model, cache, ids(1, seed=seed))
    assert [layer.get_seq_length() for layer in cache.layers] == [23, 23, 20]
    with pytest.raises(CacheMismatchError, match="layer 2 holds 20 tokens per row"):
        feed(model, cache, ids(1))
    assert [layer.get_seq_length() for layer in cache.layers] == [23, 23, 20]
    cache.crop(-3)
    assert torch.equal(feed(model, cache, ids(5, seed=9)), feed(model, control, ids(5, seed=9)))
    cache.check_integrity()


@pytest.mark.parametrize("kind", ["int4", "int8_block"])
def test_blocks_of_layers_of_unlike_lengths_are_not_encoded(kind: str) -> None:
    model = shared_model("llama")
    cache, control = cache_of(model, kind), cache_of(model, kind)
    for held in (cache, control):
        feed(model, held, ids(30))
    with ending_at(model, 2):
        for seed in range(2):
            feed(model, cache, ids(1, seed=seed))
        with pytest.raises(CacheMismatchError, match="layer 2 holds 30 tokens per row"):
            feed(model, cache, ids(1, seed=2))
    cache.crop(-2)
    assert torch.equal(feed(model, cache, ids(5, seed=9)), feed(model, control, ids(5, seed=9)))
