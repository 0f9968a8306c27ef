"""Caches of one store on several streams of a GPU, with streams that only note what they are told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hf_paged_cache import PagedCache
from hf_paged_cache.store.device.streams import Streams
from tests.support.models import shared_model

GPU = torch.device("cuda", 0)


class Stream:
    """Has work queued until it is told otherwise."""

    def __init__(self, name: str) -> None:
        self.name, self.waited, self.is_idle = name, list[str](), False

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other.name)

    def query(self) -> bool:
        return self.is_idle


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Streams `a`, `b`, and `current`, the one that is."""
    found = SimpleNamespace(a=Stream("a"), b=Stream("b"))
    found.current = found.a
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found.current)
    return found


def test_a_stream_that_takes_blocks_waits_for_all_others(on: SimpleNamespace) -> None:
    streams = Streams()
    for stream, takes, waits in (
        ("a", True, 0),
        ("a", True, 0),
        ("b", False, 1),  # new here: what it reads was written there
        ("b", False, 0),
        ("a", False, 0),
        ("a", True, 1),
        ("b", True, 1),
    ):
        on.current = getattr(on, stream)
        on.current.waited.clear()
        streams.enter(GPU, takes_blocks=takes)
        assert len(on.current.waited) == waits, (stream, takes)


def test_streams_without_work_are_forgotten_and_come_as_new(on: SimpleNamespace) -> None:
    streams = Streams()
    streams.enter(GPU, takes_blocks=True)
    on.current, on.a.is_idle = on.b, True
    streams.enter(GPU, takes_blocks=True)
    streams.enter(GPU, takes_blocks=True)
    assert on.b.waited == ["a"]
    on.current = on.a
    streams.enter(GPU, takes_blocks=False)
    assert on.a.waited == ["b"]


def test_memory_that_is_dropped_outlives_what_all_streams_have_queued(on: SimpleNamespace) -> None:
    streams, recorded = Streams(), []
    for stream in (on.a, on.b):
        on.current = stream
        streams.enter(GPU, takes_blocks=True)
    tensor = SimpleNamespace(device=GPU, record_stream=lambda stream: recorded.append(stream.name))
    streams.retire([tensor])  # type: ignore[list-item]
    assert sorted(recorded) == ["a", "b"]


def test_forks_enter_when_they_come_take_blocks_and_replace_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    model, entered = shared_model("llama"), list[bool]()
    cache = PagedCache(model, block_size=16, max_tokens=64)

    def enter(self: Streams, device: torch.device, *, takes_blocks: bool) -> None:
        entered.append(takes_blocks)

    monkeypatch.setattr(Streams, "enter", enter)

    def step(cache: PagedCache, tokens: int) -> list[bool]:
        entered.clear()
        with torch.no_grad():
            model(torch.full((1, tokens), 5), past_key_values=cache, use_cache=True)
        return list(entered)

    assert set(step(cache, 15)) == {True}
    assert step(cache, 1) == [False]
    assert step(cache, 1) == [True]  # the next block
    fork = cache.fork()
    assert step(fork, 1) == [True]  # a copy of the open block
    assert step(fork, 1) == [False]
