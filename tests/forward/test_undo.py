"""Objects are put back as they were saved."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from hf_paged_cache.forward.undo import Undo


class Part:
    """Keeps states as layers of linear attention do."""

    def __init__(self) -> None:
        self.states: dict[int, torch.Tensor | None] = {0: torch.zeros(2), 1: None}
        self.keys: torch.Tensor | None = None
        self.flags = {"ready": False}
        self.length = 3


def _write(part: Any) -> None:
    part.states[0].fill_(7)


def _first_state(part: Any) -> None:
    part.states[1] = torch.ones(2)


def _replace(part: Any) -> None:
    part.keys = torch.ones(3)


def _flag(part: Any) -> None:
    part.flags["ready"] = True


def _count(part: Any) -> None:
    part.length += 1


def _new_attribute(part: Any) -> None:
    part.device = "cpu"


def _shown(part: Any) -> str:
    return repr(vars(part))


@pytest.mark.parametrize("change", [_write, _first_state, _replace, _flag, _count, _new_attribute])
def test_every_change_is_taken_back(change: Any) -> None:
    part, undo = Part(), Undo()
    before = _shown(part)
    undo.save(part)
    change(part)
    assert _shown(part) != before
    undo.restore()
    assert _shown(part) == before
    _write(part)
    undo.restore()
    assert _shown(part) != before


def test_the_first_of_two_saves_counts() -> None:
    part, undo = Part(), Undo()
    undo.save(part)
    _write(part)
    undo.save(part)
    undo.restore()
    assert part.states[0].tolist() == [0, 0]


def test_a_tensor_that_is_not_cloned_comes_back_itself() -> None:
    part, undo = Part(), Undo()
    part.keys = keys = torch.ones(3)
    undo.save(part, clone=False)
    part.keys = torch.cat((keys, keys))
    undo.restore()
    assert part.keys is keys


def test_putting_back_can_be_done_again() -> None:
    part, undo = Part(), Undo()
    before = _shown(part)
    undo.save(part)
    for _ in range(2):
        _write(part)
        _new_attribute(part)
        undo.put_back()
        assert _shown(part) == before


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_restores_the_copy(twin_of: Any) -> None:
    part, undo = Part(), Undo()
    undo.save(part)
    _write(part)
    twin, twin_undo = twin_of((part, undo))
    twin_undo.restore()
    assert twin.states[0].tolist() == [0, 0]
    assert part.states[0].tolist() == [7, 7]
