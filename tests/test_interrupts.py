"""An interrupt at any line leaves a cache as it was, or as it was going to be."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.interrupts import ACTS, Act, Scene
from tests.models import shared_model

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
