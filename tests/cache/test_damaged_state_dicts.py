"""A state dict that was changed anywhere is refused with the cache as it was.

Every part of the dicts of several kinds of caches is changed in every way that fits it; a safe loader lets
all of it pass. With a checksum that was made for the changed dict, all that is left to find it by are its
types, sizes and relations; then it is refused or loaded as what it says.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from hf_paged_cache import PagedCache, PagedCacheError
from hf_paged_cache.errors import PoolExhausted
from hf_paged_cache.store.saved import checksum
from tests.host.test_architectures import model_of, step
from tests.support.models import shared_model
from tests.support.padded import fill, ragged
from tests.support.quantized import cache_of, feed, feed_beams, ids

Path = tuple[Any, ...]


def _recorded(model: Any, one: PagedCache) -> None:
    one.activate_past_recording()
    feed(model, one, ids(40))


_PADDED = ragged(3, 20, 37)

KINDS: dict[str, tuple[str, dict[str, Any], Callable[[Any, PagedCache], Any]]] = {
    "plain": ("llama", {}, lambda model, one: feed(model, one, ids(20))),
    "int8": ("llama", {"kv_cache_dtype": "int8"}, lambda model, one: feed(model, one, ids(20))),
    "int4": ("llama", {"kv_cache_dtype": "int4"}, lambda model, one: feed(model, one, ids(52))),
    "two formats": ("llama", {"layer_dtypes": {1: "int4"}}, lambda model, one: feed(model, one, ids(52))),
    "adaptive": (
        "llama", {"kv_cache_dtype": "adaptive", "adaptive_threshold": 30},
        lambda model, one: feed(model, one, ids(40)),
    ),
    "windows": ("gemma3", {"kv_cache_dtype": "k8v4"}, lambda model, one: feed(model, one, ids(45))),
    "recorded": ("gemma3", {}, _recorded),
    "padded": ("llama", {}, lambda model, one: fill(model, one, _PADDED)),
    "beams": ("llama", {"kv_cache_dtype": "int4"}, feed_beams),
    "empty": ("llama", {}, lambda model, one: None),
    "hybrid": ("jamba", {}, lambda model, one: step(model, ids(20), one)),
    "indexed": ("deepseek-v3.2", {}, lambda model, one: step(model, ids(20), one)),
    "recurrent": ("mamba2", {}, lambda model, one: step(model, ids(20), one)),
}  # fmt: skip
"""A model, settings, and what is fed."""


def _model(kind: str) -> Any:
    name = KINDS[kind][0]
    return model_of(name) if kind in ("hybrid", "indexed", "recurrent") else shared_model(name)


def _cache(kind: str) -> PagedCache:
    return cache_of(_model(kind), **{"name": "auto"} | _named(KINDS[kind][1]))


def _named(settings: dict[str, Any]) -> dict[str, Any]:
    return {"name" if key == "kv_cache_dtype" else key: value for key, value in settings.items()}


@cache
def _saved(kind: str) -> dict[str, Any]:
    one = _cache(kind)
    KINDS[kind][2](_model(kind), one)
    return one.state_dict()


# --- ways to change a value ---------------------------------------------------------------------------------


def _others() -> list[Any]:
    endless: list[Any] = []
    endless.append(endless)
    around: dict[Any, Any] = {}
    around[0] = around
    small = [None, True, False, -2, 0, 1, 17, 10**9, -(10**9), 1 << 70, 10**5000, float("nan"), float("inf")]
    return [*small, "", "int8", "auto", b"x", (), [], {}, [0], {0: 0}, (1, (2,)), endless, around,
            torch.tensor(3), torch.zeros(0), torch.float16, torch.device("meta")]  # fmt: skip


def _of_number(value: int) -> list[Any]:
    return [value + 1, value - 1, -value - 1, 2 * value, value + 16, float(value), str(value)]


def _of_list(value: list[Any]) -> list[Any]:
    changed = [[*value, *value[-1:]], value[:-1], value[1:], value[::-1], [*value, 0], [value]]
    if value:
        changed += [value * 1000, [value[0]] * len(value), sorted(value, key=str)]
    return changed


def _of_dict(value: dict[Any, Any]) -> list[Any]:
    keys = list(value)
    changed = [{**value, "more": 1}, {**value, 99: 1}, {**value, -1: 0}, dict(reversed(value.items()))]
    changed += [{name: item for name, item in value.items() if name != key} for key in keys]
    for a, b in itertools.pairwise(keys):
        changed += [value | {a: value[b], b: value[a]}, value | {a: value[b]}]
    return [*changed, {str(key): item for key, item in value.items()}, list(value.items())]


def _of_tensor(value: torch.Tensor) -> list[Any]:
    other = torch.float64 if value.dtype != torch.float64 else torch.int8
    changed = [
        value.to(other), value.to(torch.bool), value[:0], value[None], value.flatten(), value.to("meta"),
        value.to_sparse(), torch.cat((value, value)), value.new_empty(1).expand(1 << 40),
        value.new_empty(1)[0].expand(value.shape), torch.nn.Parameter(value.float()),
    ]  # fmt: skip
    for dim in range(value.dim()):
        changed += [value.narrow(dim, 0, value.shape[dim] // 2), torch.cat((value, value), dim)]
        changed.append(value.new_empty(1).expand(*value.shape[:dim], 1 << 30, *value.shape[dim + 1 :]))
    if value.dim() > 1:
        changed += [value.transpose(0, 1), value[..., :-1], value.mT.contiguous().mT]
    if value.is_floating_point():  # zeros may be what no token is stored in
        changed += [
            value.masked_fill(value != 0, torch.nan),
            value.masked_fill(value != 0, 7),
            value.clone().requires_grad_(),
        ]
    return changed


def _places(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """All values inside of a dict, with the keys that lead there."""
    yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _places(item, (*path, key))


def _changes(saved: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    for path, value in _places(saved):
        ways: dict[type, Callable[[Any], list[Any]]] = {
            int: _of_number, list: _of_list, dict: _of_dict, torch.Tensor: _of_tensor,
        }  # fmt: skip
        own = ways[type(value)](value) if type(value) in ways else []
        yield from ((path, other) for other in (*own, *_others()))


def _changed(saved: Any, path: Path, other: Any) -> Any:
    if not path:
        return other
    twin = copy.copy(saved)
    twin[path[0]] = _changed(saved[path[0]], path[1:], other)
    return twin


# --- what became of it --------------------------------------------------------------------------------------


def _flat(saved: Any) -> dict[Path, Any]:
    """What there is beside containers and devices; tensors as their type, shape and bytes."""
    found: dict[Path, Any] = {}
    for path, value in _places(saved):
        if isinstance(value, torch.Tensor):
            found[path] = value.dtype, value.shape
            found[*path, "bytes"] = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        elif not isinstance(value, dict | list | torch.device) or value in ({}, []):
            found[path] = value
    return found


def _agrees(got: dict[Path, Any], want: dict[Path, Any]) -> bool:
    """Whether a cache holds what a dict says: where no token lies it has zeros, whatever the dict has."""
    if got.keys() != want.keys():
        return False
    for path, value in got.items():
        if isinstance(value, bytes):
            held, said = (np.frombuffer(side, np.uint8) for side in (value, want[path]))
            if ((held != said) & (held != 0)).any():
                return False
        elif value != want[path]:
            return False
    return True


def _try(kind: str, target: PagedCache, path: Path, damaged: Any) -> str:
    before = _flat(target.state_dict())
    try:
        target.load_state_dict(damaged)
    except (PagedCacheError, PoolExhausted):
        try:
            damaged = damaged | {"checksum": checksum(damaged)} if path != ("checksum",) else damaged
        except (
            TypeError,
            ValueError,
            AttributeError,
            RuntimeError,
        ):  # no dict, no end, no memory behind a tensor
            assert _flat(target.state_dict()) == before
            return "refused"
    else:
        assert _flat(damaged) == _flat(_saved(kind))
    try:
        target.load_state_dict(damaged)
    except (PagedCacheError, PoolExhausted):
        assert _flat(target.state_dict()) == before
        target.check_integrity()
        return "refused"
    target.check_integrity()
    is_original = _flat(damaged) == _flat(_saved(kind))
    assert _agrees(*(_flat(said | {"checksum": ""}) for said in (target.state_dict(), damaged)))
    if is_original or path[:1] != ("hosts",):  # what shape states have, only the model knows
        try:
            after = _go_on(kind, target)
        except (PagedCacheError, PoolExhausted):
            assert not is_original
        else:
            assert not is_original or torch.equal(after, _next(kind))
    return "loaded as it was" if is_original else "loaded as it says"


@cache
def _next(kind: str) -> torch.Tensor:
    one = _cache(kind)
    KINDS[kind][2](_model(kind), one)
    return _go_on(kind, one)


def _go_on(kind: str, one: PagedCache) -> torch.Tensor:
    """The logits of a next token."""
    token = ids(1, max(1, one.batch_size))
    if kind != "padded" or one.batch_size != 3:
        return step(_model(kind), token, one)
    mask = torch.cat((_PADDED["attention_mask"], torch.ones(3, 1, dtype=torch.long)), 1)
    return fill(_model(kind), one, {"input_ids": token, "attention_mask": mask})


def _run(kind: str, share: float, seed: int = 0) -> Counter[str]:
    chosen, saved = random.Random(seed), _saved(kind)
    outcomes: Counter[str] = Counter()
    target = _cache(kind)
    if kind != "empty":
        step(_model(kind), ids(3, seed=5), target)
    before = target.state_dict()
    for path, other in _changes(saved):
        if chosen.random() < share:
            outcome = _try(kind, target, path, _changed(saved, path, other))
            outcomes[outcome] += 1
            if outcome != "refused":
                target.load_state_dict(before)
    logits = [
        step(_model(kind), ids(1, max(1, one.batch_size)), one) for one in (target, _cache_with(kind, before))
    ]
    assert torch.equal(*logits)
    return outcomes


def _cache_with(kind: str, saved: dict[str, Any]) -> PagedCache:
    one = _cache(kind)
    one.load_state_dict(saved)
    return one


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_with_a_change_is_refused_or_means_what_it_says(kind: str) -> None:
    total = sum(1 for _ in _changes(_saved(kind)))
    assert _run(kind, 40 / total)["refused"] > 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_with_more_changes_is_refused_or_means_what_it_says(kind: str) -> None:
    outcomes = _run(kind, 0.03, seed=1)
    print(kind, dict(outcomes))
    assert outcomes["refused"] > outcomes["loaded as it says"]
