"""An interrupt at any line, or a failed allocation, leaves a cache as it was or as it was going to be."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from hf_paged_cache import PagedCache
from hf_paged_cache.forward.rows import EqualRows
from hf_paged_cache.kernels import dispatch
from hf_paged_cache.store.store import Store
from tests.forward.interrupts import ACTS, Act, Interrupted, Scene, interrupting, short_of_memory
from tests.support.models import shared_model
from tests.support.quantized import cache_of, feed, ids

Stopping = Callable[[int | None], AbstractContextManager[list[int]]]


def outcomes(case: str, kind: str, act: Act, stopping: Stopping, stride: int) -> Counter[str]:
    """What comes of stopping at every so-manieth place."""
    model = shared_model(case)
    scene = Scene(model, kind, act)
    before = scene.shows()
    places = scene.run(stopping=stopping)
    allowed = [before, scene.shows()]
    for do in act.halfway:
        scene = Scene(model, kind, act)
        scene.run(do=do)
        allowed.append(scene.shows())
    found: Counter[str] = Counter()
    for at in range(stride // 2, places, stride):
        scene = Scene(model, kind, act)
        scene.run(at, stopping)
        found[outcome := scene.check(allowed)] += 1
        assert outcome.isdigit(), f"{act.name}, place {at} of {places}: {outcome}"
    return found


QUICK = [act for act in ACTS if not act.halfway]


@pytest.mark.parametrize("kind", ["auto", "int4"])
@pytest.mark.parametrize("act", QUICK, ids=lambda act: act.name)
def test_an_interrupt_tears_nothing_and_loses_nothing(act: Act, kind: str) -> None:
    assert outcomes("llama", kind, act, interrupting, 173).total() > 0


@pytest.mark.parametrize("kind", ["auto", "int4"])
@pytest.mark.parametrize("act", QUICK, ids=lambda act: act.name)
def test_nor_does_a_failed_allocation(act: Act, kind: str) -> None:
    outcomes("llama", kind, act, short_of_memory, 1)


@pytest.mark.parametrize("kind", ["auto", "int4"])
def test_a_pool_of_a_window_that_becomes_smaller_is_whole(kind: str) -> None:
    # A fork would keep it from that, so this is no scene.
    model = shared_model("mistral")

    def after_a_chunk() -> PagedCache:
        cache = cache_of(model, kind)
        for tokens in (50, 1, 40):
            feed(model, cache, ids(tokens, seed=tokens))
        return cache

    control = after_a_chunk()
    grown = control.stats().num_blocks
    with interrupting(None) as counted:
        feed(model, control, ids(1, seed=7))
    assert control.stats().num_blocks < grown
    want = [feed(model, control, ids(1, seed=8))]
    missed = after_a_chunk()
    want.append(feed(model, missed, ids(1, seed=8)))
    for at in range(3, counted[0], 55):
        cache = after_a_chunk()
        with interrupting(at), contextlib.suppress(Interrupted):
            feed(model, cache, ids(1, seed=7))
        is_missed = cache.get_seq_length() == 91
        cache.check_integrity()
        assert torch.allclose(feed(model, cache, ids(1, seed=8)), want[is_missed], atol=2e-4), at
        cache.reset()
        cache.check_integrity()
        assert cache.stats().used_blocks == 0


@contextlib.contextmanager
def interrupting_change(name: str, statement: str) -> Iterator[None]:
    """Raise in `Store.change` before a line of it, when it makes the change of that name."""
    lines, first = inspect.getsourcelines(Store.change)
    number = first + [line.strip() for line in lines].index(statement)

    def in_change(frame: FrameType, event: str, argument: Any) -> Any:
        made = getattr(frame.f_locals["make"], "func", None)
        if frame.f_lineno == number and getattr(made, "__name__", "") == name:
            sys.settrace(None)
            raise Interrupted
        return in_change

    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: in_change if frame.f_code is Store.change.__code__ else None)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("statement", ["self._undo = None", "return result"])
def test_an_interrupt_as_a_step_has_just_been_opened_takes_it_back(statement: str, rows: int) -> None:
    model = shared_model("llama")
    cache, control = cache_of(model, "auto"), cache_of(model, "auto")
    for one in (cache, control):
        feed(model, one, ids(20, 1))
    with pytest.raises(Interrupted), interrupting_change("_begin", statement):
        feed(model, cache, ids(2, rows))
    assert (cache.get_seq_length(), cache.stats().batch) == (20, 1)
    cache.check_integrity()
    for tokens in (2, 1):
        assert torch.equal(feed(model, cache, ids(tokens, 1)), feed(model, control, ids(tokens, 1)))


def test_an_interrupt_as_the_last_layer_has_written_takes_back_tokens_and_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = shared_model("llama")
    cache, control = cache_of(model, "auto"), cache_of(model, "auto")
    for one in (cache, control):
        feed(model, one, ids(20, 1))

    def interrupted(*args: object) -> None:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(EqualRows, "sources", interrupted)
        with pytest.raises(Interrupted):
            feed(model, cache, ids(2, 3))
    assert (cache.get_seq_length(), cache.stats().batch) == (20, 1)
    cache.check_integrity()
    assert torch.equal(feed(model, cache, ids(2, 1)), feed(model, control, ids(2, 1)))


def test_a_drop_that_fails_while_tokens_are_moved_leaves_those_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = shared_model("falcon-alibi")
    cache, control = cache_of(model, "auto"), cache_of(model, "auto")
    feed(model, cache, ids(40))
    feed(model, control, ids(40)[:, :5])
    writes = []

    def write(*args: Any) -> None:
        if writes:
            raise KeyboardInterrupt
        writes.append(dispatch.write(*args))

    with monkeypatch.context() as patch:
        patch.setattr("hf_paged_cache.forward.contents.dispatch", SimpleNamespace(write=write))
        with pytest.raises(KeyboardInterrupt):
            cache.prune(5, 9)
    assert cache.get_seq_length() == 5
    assert torch.allclose(feed(model, cache, ids(3)), feed(model, control, ids(3)), atol=1e-5)
    cache.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize(("case", "kind"), [("llama", "int8"), ("mistral", "auto"), ("gemma3", "int4")])
def test_an_interrupt_anywhere(case: str, kind: str) -> None:
    for act in ACTS:
        outcomes(case, kind, act, interrupting, 389)
