"""Interrupts at any line of the package, and what must hold afterwards."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import hf_paged_cache
from hf_paged_cache import PagedCache
from hf_paged_cache.errors import PagedCacheError, PoolExhausted
from tests.support.models import cache_kwarg
from tests.support.quantized import cache_of, feed, ids

_PACKAGE = str(Path(hf_paged_cache.__file__).parent)
# Compiling and choosing kernels happens once per process; it changes no cache.
_OUTSIDE = ("kernels/cpp/build.py", "kernels/triton/")


class Interrupted(KeyboardInterrupt):
    """Ours, and nobody else's."""


@contextlib.contextmanager
def interrupting(at: int | None) -> Iterator[list[int]]:
    """Raise when the package is about to run its line number `at`, counted from here; None only counts.

    Yields:
        One number: the lines that were run.
    """
    lines = [0]

    def in_package(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            lines[0] += 1
            if lines[0] - 1 == at:
                sys.settrace(None)
                raise Interrupted
        return in_package

    def everywhere(frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        is_ours = name.startswith(_PACKAGE) and not any(part in name for part in _OUTSIDE)
        return in_package if is_ours and frame.f_code.co_name != "__del__" else None

    before = sys.gettrace()
    sys.settrace(everywhere)
    try:
        yield lines
    finally:
        sys.settrace(before)


@contextlib.contextmanager
def short_of_memory(at: int | None) -> Iterator[list[int]]:
    """Let the package's allocation number `at` fail, counted from here; None only counts.

    Yields:
        One number: the tensors that it made.
    """
    made = [0]

    def failing(allocate: Callable[..., Any]) -> Callable[..., Any]:
        def allocated(*args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_code.co_filename.startswith(_PACKAGE):
                made[0] += 1
                if made[0] - 1 == at:
                    raise MemoryError("no room for a tensor")
            return allocate(*args, **kwargs)

        return allocated

    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "full", "zeros", "ones", "cat", "tensor"):
            patch.setattr(torch, name, failing(getattr(torch, name)))
        yield made


@dataclass(frozen=True)
class Act:
    """Something that is done with a cache.

    Attributes:
        name: What test ids show.
        run: Does it. May return another cache, which must be whole as well.
        held: Tokens that the cache holds before.
        rows: Rows that it has before.
        halfway: What may be left beside nothing and all of it: what these would have done.
    """

    name: str
    run: Callable[[Any, PagedCache], PagedCache | None]
    held: int = 20
    rows: int = 2
    halfway: tuple[Callable[[Any, PagedCache], None], ...] = ()


def _feeds(tokens: int, rows: int | None = None, **options: Any) -> Callable[[Any, PagedCache], None]:
    def run(model: Any, cache: PagedCache) -> None:
        fed = ids(tokens, rows or max(1, cache._num_rows), seed=5)
        with torch.no_grad():
            model(fed, **{cache_kwarg(): cache}, **options)

    return run


def _does(change: Callable[[PagedCache], Any]) -> Callable[[Any, PagedCache], PagedCache | None]:
    def run(model: Any, cache: PagedCache) -> PagedCache | None:
        made = change(cache)
        return made if isinstance(made, PagedCache) else None

    return run


def _generates(new_tokens: int) -> Callable[[Any, PagedCache], None]:
    def run(model: Any, cache: PagedCache) -> None:
        prompt = torch.cat((cache.input_ids, ids(3, 2, seed=6)), 1)
        mask, options = torch.ones_like(prompt), {cache_kwarg(): cache}
        model.generate(prompt, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, **options)

    return run


ACTS = [
    Act("prompt", _feeds(20), held=0),
    Act("equal rows", _feeds(20, 2), held=0),
    Act("step", _feeds(1)),
    Act("step over an edge", _feeds(1), held=32),
    Act("chunk", _feeds(30)),
    Act("read only", _feeds(3, use_cache=False)),
    Act("one row becomes three", _feeds(2, 3), rows=1),
    Act("generate", _generates(6), held=28, halfway=tuple(map(_generates, range(1, 6)))),
    Act("crop", _does(lambda cache: cache.crop(-7))),
    Act("crop all", _does(lambda cache: cache.crop(-20))),
    Act("reset", _does(lambda cache: cache.reset())),
    Act("reorder", _does(lambda cache: cache.reorder_cache(torch.tensor([1, 0])))),
    Act("repeat", _does(lambda cache: cache.batch_repeat_interleave(3))),
    Act("select", _does(lambda cache: cache.batch_select_indices(torch.tensor([1])))),
    Act("truncate", _does(lambda cache: cache.truncate_to(cache.input_ids[:, :9]))),
    Act("fork", _does(lambda cache: cache.fork())),
    Act("deepcopy", _does(copy.deepcopy)),
    Act("save and load", _does(lambda cache: cache.load_state_dict(cache.state_dict()))),
]


class Scene:
    """A cache with a history, and a fork of it, which share a pool.

    Args:
        model: Who fills them.
        kind: The format.
        act: What is going to be done.
    """

    def __init__(self, model: Any, kind: str, act: Act) -> None:
        self.model = model
        self.act = act
        self.cache = cache_of(model, kind)
        if act.held:
            feed(model, self.cache, ids(act.held, act.rows, seed=1))
        self.other = self.cache.fork()

    def shows(self) -> list[tuple[int, int, torch.Tensor]]:
        """Rows, tokens and the logits of what comes next, of every cache in it. Changes none of them."""
        return [_shown(self.model, cache) for cache in (self.cache, self.other)]

    def run(
        self,
        at: int | None = None,
        stopping: Callable[[int | None], contextlib.AbstractContextManager[list[int]]] = interrupting,
        do: Callable[[Any, PagedCache], Any] | None = None,
    ) -> int:
        """Do it, or something else, stopped somewhere or not. Returns how many places there are for that."""
        made = None
        # A finalizer swallows whatever arrives while it runs, so not every stop shows.
        with stopping(at) as places, contextlib.suppress(Interrupted, MemoryError, PoolExhausted):
            made = (do or self.act.run)(self.model, self.cache)
        if made is not None:
            _shown(self.model, made)
        return places[0]

    def check(self, allowed: list[list[tuple[int, int, torch.Tensor]]]) -> str:
        """What has become of it: the number of the outcome in `allowed`, or what is wrong."""
        try:
            self.cache.check_integrity()
            self.other.check_integrity()
            shown = self.shows()
        except (AssertionError, PagedCacheError) as error:
            return f"{type(error).__name__}: {error}"
        found = [all(map(_is_like, shown, wanted)) for wanted in allowed]
        if not any(found):
            return f"other rows, tokens or logits: {[item[:2] for item in shown]}"
        self.cache.reset()
        self.other.reset()
        self.cache.check_integrity()
        stats = self.cache.stats()
        return str(found.index(True)) if stats.used_blocks == 0 else f"{stats.used_blocks} blocks are lost"


def _shown(model: Any, cache: PagedCache) -> tuple[int, int, torch.Tensor]:
    held, rows = int(cache.get_seq_length()), cache._num_rows
    with torch.no_grad():
        fed = ids(2, max(1, rows), seed=9)
        logits = model(fed, **{cache_kwarg(): cache.fork() if held else cache_of(model, "auto")}).logits[
            :, -1
        ]
    return rows, held, logits


def _is_like(a: tuple[int, int, torch.Tensor], b: tuple[int, int, torch.Tensor]) -> bool:
    return a[:2] == b[:2] and torch.allclose(a[2], b[2], atol=2e-4)
