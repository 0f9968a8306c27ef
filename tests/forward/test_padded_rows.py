"""Random operations on a padded batch: every row stays, to the bit, what a cache of its own holds."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch

from hf_paged_cache import PagedCache
from hf_paged_cache.config import LAYER_DTYPES
from hf_paged_cache.errors import PagedCacheError
from tests.support.live_caches import COPIES, GROUP_SIZE, HEAD_DIM, KV_HEADS, WINDOWS, model_config

BLOCK, ROWS, STEPS = 16, 3, 25


class PaddedRows:
    """A cache of a padded batch, and one for each of its rows."""

    def __init__(self, make: Callable[[], PagedCache], layers: int) -> None:
        self.make, self.layers = make, layers
        self.batch = self.made()
        self.alone = [self.made() for _ in range(ROWS)]
        self.padding = [0] * ROWS
        self.length = 0

    def made(self) -> PagedCache:
        cache = self.make()
        cache.activate_past_recording()
        return cache

    def feed(self, tokens: int) -> None:
        """New tokens; before a row begins they are NaN."""
        start, end = self.length, self.length + tokens
        mask = torch.arange(end) >= torch.tensor(self.padding)[:, None]
        sides = [torch.randn(self.layers, ROWS, KV_HEADS, tokens, HEAD_DIM) for _ in range(2)]
        new = mask[:, None, start:, None]
        self.batch._state.note_mask(start, tokens, mask)
        for layer, (keys, values) in enumerate(zip(*sides, strict=True)):
            self.batch.update(*(x.masked_fill(~new, torch.nan) for x in (keys, values)), layer)
        for row, cache in enumerate(self.alone):
            first = max(start, self.padding[row]) - start
            for layer, (keys, values) in enumerate(zip(*sides, strict=True)) if first < tokens else ():
                cache.update(*(x[row : row + 1, :, first:] for x in (keys, values)), layer)
        self.length = end

    def crop(self, count: int) -> None:
        try:
            self.batch.crop(-count)
        except PagedCacheError:
            return  # a window has given back what that needs
        for row, cache in enumerate(self.alone):
            cache.crop(-min(count, self.length - self.padding[row]))
        self.length -= count
        self.padding = [min(n, self.length) for n in self.padding]

    def reorder(self, rows: list[int]) -> None:
        self.batch.reorder_cache(torch.tensor(rows))
        self.alone = [copy.deepcopy(self.alone[row]) for row in rows]
        self.padding = [self.padding[row] for row in rows]

    def replace(self, how: str) -> None:
        self.batch = COPIES[how](self.batch, self.make)

    def check(self) -> None:
        self.batch.check_integrity()
        for row, cache in enumerate(self.alone):
            cache.check_integrity()
            own = max(0, self.length - self.padding[row])
            assert cache.get_seq_length() == own
            for mine, theirs in zip(self.batch.layers, cache.layers, strict=True):
                for got, want in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
                    held = want.shape[2] if own else 0
                    assert not got[row, :, : got.shape[2] - held].any()
                    if own:
                        assert torch.equal(got[row, :, got.shape[2] - held :], want[0])


@pytest.mark.parametrize("kind", WINDOWS)
@pytest.mark.parametrize("format_name", LAYER_DTYPES)
def test_rows_are_those_of_caches_of_their_own(format_name: str, kind: str) -> None:
    rng = random.Random(f"{format_name} {kind}")
    sinks = rng.choice([None, 2 * BLOCK]) if format_name != "auto" else None
    torch.manual_seed(rng.randrange(1000))

    def make() -> PagedCache:
        return PagedCache(
            model_config(kind),
            block_size=BLOCK,
            kv_cache_dtype=format_name,
            sink_tokens=sinks,
            group_size=GROUP_SIZE,
            max_tokens=4000,
            key_error_guard="off",
        )

    rows = PaddedRows(make, len(WINDOWS[kind]))
    width = rng.randrange(30, 90)
    rows.padding = [0, rng.randrange(1, 30), width + 3]  # one row begins with the second chunk
    rows.feed(width)
    rows.check()
    rows.feed(5)
    for step in range(STEPS):
        choice = rng.random()
        if choice < 0.15 and rows.length > 20:
            rows.crop(rng.randrange(1, 12))
        elif choice < 0.25:
            rows.reorder(rng.sample(range(ROWS), ROWS) if step % 20 else [0, 0, 1])
        elif choice < 0.35:
            rows.replace(rng.choice(list(COPIES)))
        else:
            rows.feed(rng.choice([1, 1, 1, 1, 6, 40]))
        rows.check()
