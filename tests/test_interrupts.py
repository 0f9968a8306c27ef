"""An interrupt at any line leaves a cache as it was, or as it was going to be."""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest
import torch

from hf_paged_cache import PagedCache
from tests.interrupts import ACTS, Act, Interrupted, Scene, interrupting
from tests.models import shared_model
from tests.quantised import cache_of, feed, ids

FEW = 11
"""Lines apart that are tried in a quick run."""


def outcomes(case: str, kind: str, act: Act, stride: int) -> Counter[str]:
    """What comes of an interrupt at every so-manieth line."""
    model = shared_model(case)
    scene = Scene(model, kind, act)
    before = scene.shows()
    lines = scene.run()
    allowed = [before, scene.shows()]
    for do in act.halfway:
        scene = Scene(model, kind, act)
        scene.run(do=do)
        allowed.append(scene.shows())
    found: Counter[str] = Counter()
    for at in range(stride // 2, lines, stride):
        scene = Scene(model, kind, act)
        scene.run(at)
        outcome = scene.check(allowed)
        found[outcome] += 1
        assert outcome.isdigit(), f"{act.name}, line {at} of {lines}: {outcome}"
    return found


@pytest.mark.parametrize("kind", ["auto", "int8", "int4"])
@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.name)
def test_nothing_is_torn_or_lost(act: Act, kind: str) -> None:
    found = outcomes("llama", kind, act, FEW * 10)
    print(act.name, kind, dict(found))


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
    for at in range(3, counted[0], FEW * 5):
        cache = after_a_chunk()
        with interrupting(at), contextlib.suppress(Interrupted):
            feed(model, cache, ids(1, seed=7))
        is_missed = cache.get_seq_length() == 91
        cache.check_integrity()
        assert torch.allclose(feed(model, cache, ids(1, seed=8)), want[is_missed], atol=2e-4), at
        cache.reset()
        cache.check_integrity()
        assert cache.stats().used_blocks == 0
