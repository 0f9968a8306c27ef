"""A cache shows itself as it is, whatever its model, and stays as it is."""

from __future__ import annotations

import copy
import re
from collections import Counter
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

from eval.zoo import inputs, registry, runs, tiny
from hf_paged_cache import PagedCache
from hf_paged_cache.blocks import BlockRun, BlockState
from hf_paged_cache.display.html import MOST_CELLS, as_html
from hf_paged_cache.display.stats import GroupStats, MemoryFootprint
from tests.support.models import (
    BLOCK_SIZE,
    CASES,
    ModelCase,
    cache_kwarg,
    paged_cache,
    paged_parts,
    shared_model,
)
from tests.support.quantized import BLOCK, NAMES, cache_of, feed, ids, states

HYBRIDS = (
    "deepseek_v4",
    "falcon_h1",
    "gemma3n_text",
    "glm_moe_dsa",
    "lfm2",
    "mamba2",
    "qwen3_next",
    "zamba2",
)
"""Types of the zoo with states beside K and V, windows of several sizes, indexers, or no K and V at all."""


class Page(HTMLParser):
    """What is in a piece of HTML; complains about tags that are not closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.cells: list[tuple[str, str]] = []  # (what a tooltip says, what is written in the cell)
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in {"div", "span", "b", "table", "tr", "td"}
        assert {name for name, _ in attrs} <= {"style", "title"}
        self._open.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        title = self._open[-1][1].get("title")
        if title is not None:
            self.cells.append((title, data))

    def drawn(self) -> str:
        """The letters of all cells."""
        return " ".join(sign for _, sign in self.cells)


def shown(cache: PagedCache) -> Page:
    return Page(cache._repr_html_())


def picture(cache: PagedCache) -> Any:
    """Everything that showing could change."""
    state = cache._state
    groups = [
        (
            group.manager.pool._states.hex(),
            list(group.manager.pool._ref_counts),
            list(group.manager.pool._free),
            [list(table.ids) for table in group.manager.tables],
            group.manager.version,
            copy.copy(group.manager.pool.counters),
        )
        for group in state.groups
    ]
    return groups, dict(state.rows.tokens), state.rows.start, state.rows.end, state.rows.batch, state.is_open


# --- the map ------------------------------------------------------------------------------------------------


def test_every_block_has_a_cell_that_says_what_it_is() -> None:
    model = shared_model("llama")
    cache = PagedCache(model, block_size=16, max_tokens=5 * 16)
    feed(model, cache, ids(33, rows=1))
    # The third block is being filled; a block is sealed by the first token after it.
    assert shown(cache).drawn() == "o o o · ·"
    feed(model, cache, ids(1, rows=1))
    assert shown(cache).drawn() == "s s o · ·"
    twin = cache.fork()
    assert shown(cache).drawn().startswith("2 2 2 ·")
    assert ("block 2: open, held 2 times", "2") in shown(cache).cells
    feed(model, twin, ids(1, rows=1))
    assert shown(cache).drawn().startswith("2 2 o o ·")
    assert "copied to be written to 1" in shown(cache).text


def test_a_block_that_somebody_could_find_again_is_drawn_as_cached() -> None:
    model = shared_model("llama")
    cache = PagedCache(model, block_size=16, max_tokens=3 * 16)
    feed(model, cache, ids(17, rows=1))
    feed(model, cache, ids(1, rows=1))
    pool = cache._state.groups[0].manager.pool
    pool.share([0])
    cache.reset()
    pool.release([0], keep=True)
    assert shown(cache).drawn() == "c · ·"
    assert "cached: sealed, held by nobody (1)" in shown(cache).text


def test_the_legend_explains_and_counts_every_kind() -> None:
    model = shared_model("llama")
    cache = PagedCache(model, block_size=16, max_tokens=8 * 16)
    feed(model, cache, torch.cat((ids(33, rows=1), ids(33, rows=1)))[:, :33])
    feed(model, cache, ids(1, rows=2))
    counts = cache.stats().groups[0].blocks_by_kind
    assert sum(counts.values()) == cache.stats().num_blocks
    assert counts["shared"] == 2
    text = shown(cache).text
    for kind in ("free", "open", "sealed", "shared", "cached"):
        assert re.search(rf"{kind}[^()]*\({counts[kind]}\)", text)
    assert "pending" not in text
    assert "equal prompt rows 1" in text


def group_of(*runs: tuple[int, BlockState, int], window: int | None = None) -> GroupStats:
    found, first = [], 0
    for count, state, holders in runs:
        found.append(BlockRun(first, count, state, holders))
        first += count
    return GroupStats(window, (0,), 64, first, tuple(found))


def page_of(*groups: GroupStats) -> Page:
    from dataclasses import replace

    stats = replace(PagedCache(shared_model("llama").config).stats(), groups=groups)
    return Page(as_html("PagedCache", "auto", 1, stats, MemoryFootprint(0, 0, 0, 0, 0)))


def test_a_large_pool_is_drawn_in_few_cells_that_hold_all_blocks() -> None:
    page = page_of(
        group_of((3, BlockState.SEALED, 1), (1, BlockState.OPEN, 1), (100_000, BlockState.FREE, 0))
    )
    assert page.drawn() == "s s s o 100,000 free"
    assert page.cells[-1][0] == "blocks 4-100003: free"
    assert "Not drawn" not in page.text


def test_what_is_not_drawn_is_counted_in_words() -> None:
    alternating = [(1, BlockState.SEALED, 1), (2, BlockState.SEALED, 3), (1, BlockState.FREE, 0)] * 1000
    page = page_of(group_of(*alternating))
    assert len(page.cells) == MOST_CELLS
    assert "Not drawn: the blocks from 256 on (936 free, 936 sealed, 1,872 shared)." in page.text


@pytest.mark.parametrize("groups", [1, 2, 5, 8])
def test_all_groups_together_have_a_few_hundred_cells(groups: int) -> None:
    ragged = [(1, BlockState.SEALED, 1), (1, BlockState.FREE, 0)] * 1000
    page = page_of(*(group_of(*ragged, window=16 * index) for index in range(1, 1 + groups)))
    assert len(page.cells) <= MOST_CELLS
    assert page.text.count("Not drawn") == groups


# --- bytes and formats --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["auto", *NAMES])
def test_bytes_by_format_add_up_to_those_in_use(name: str) -> None:
    model = shared_model("llama")
    cache = cache_of(model, name, layer_dtypes={1: "int8"})
    feed(model, cache, ids(5 * BLOCK + 3))
    feed(model, cache, ids(1))
    stats, footprint = cache.stats(), cache.memory_footprint()
    assert sum(stats.bytes_by_format.values()) == footprint.used_bytes
    assert {key for key, count in stats.bytes_by_format.items() if count} >= {name, "int8"}
    text = shown(cache).text
    for count in (*stats.bytes_by_format.values(), footprint.used_bytes, footprint.pool_bytes):
        assert f"{count:,} bytes" in text or not count
    stored = "the model's dtype" if name == "auto" else name
    assert ("layers 0-2: int8" if name == "int8" else f"layers 0, 2: {stored}") in text


def test_layers_that_the_guard_moved_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "hf_paged_cache.store.key_guard.key_error", lambda layer_format, keys: float(keys.max() > 1e3)
    )
    cache = cache_of(shared_model("llama"), "int4")
    assert cache.stats().moved_layers == {}
    keys, values = states(3 * BLOCK + 1)
    for layer_idx in range(3):
        cache.update(keys + (2e3 if layer_idx == 1 else 0), values, layer_idx)
    assert cache.stats().layer_dtypes == {0: "int4", 1: "k8v4", 2: "int4"}
    assert cache.stats().moved_layers == {1: "int4"}
    assert "Moved by the guard: layer 1 from int4 to k8v4." in shown(cache).text


def test_layers_that_nobody_moved_are_not() -> None:
    cache = cache_of(shared_model("llama"), "adaptive", layer_dtypes={0: "auto"})
    assert cache.stats().moved_layers == {}
    feed(shared_model("llama"), cache, ids(40))
    assert cache.stats().moved_layers == {}
    assert "Moved" not in shown(cache).text


# --- showing changes nothing --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_cache_of_every_family_shows_itself_at_any_time_and_stays_as_it_is(case: ModelCase) -> None:
    model = case.build()
    prompt = {"input_ids": ids(21, seed=1)}
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "num_beams": 2}
    plain = model.generate(**prompt, **{cache_kwarg(): paged_cache(model)}, **options)
    cache = paged_cache(model)
    seen: list[Page] = []

    def show(*_: Any) -> None:
        for part in paged_parts(cache):
            before = picture(part)
            seen.append(shown(part))
            assert picture(part) == before

    show()
    assert "Empty" in seen[0].text
    # The whole model, and something in the middle of its forward.
    hooks = [model.register_forward_hook(show)]
    hooks += [module.register_forward_hook(show) for module in list(model.modules())[-8:-2:3]]
    found = model.generate(**prompt, **{cache_kwarg(): cache}, **options)
    for hook in hooks:
        hook.remove()
    assert torch.equal(found, plain)
    show()
    assert len(seen) > 12
    for part in paged_parts(cache):
        part.check_integrity()
        part.reset()
    show()
    assert set(seen[-1].drawn().split()) <= {"·", "free"} or "free" in seen[-1].drawn()


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_cache_with_states_of_the_host_shows_itself(name: str) -> None:
    entry = registry.entries().get(name)
    if entry is None:
        pytest.skip(f"the installed transformers has no {name!r}")
    model = tiny.build(entry)
    prompt = inputs.prompt(model, entry, (21, 21), seed=1)
    plain = runs.generate(model, prompt, 4, cache=PagedCache(model, block_size=BLOCK_SIZE)).sequences
    cache = PagedCache(model, block_size=BLOCK_SIZE)
    seen = [shown(cache)]
    hook = model.register_forward_hook(lambda *_: seen.append(shown(cache)))
    assert torch.equal(runs.generate(model, prompt, 4, cache=cache).sequences, plain)
    hook.remove()
    seen.append(shown(cache))
    assert ("no layer has K and V in blocks" in seen[-1].text) == (not cache.stats().layer_dtypes)
    host_bytes = cache.memory_footprint().host_bytes
    assert (f"{host_bytes:,} bytes" in seen[-1].text) == (host_bytes > 0)


def test_the_self_cache_of_a_pair_shows_the_decoder() -> None:
    model = shared_model("bart")
    pair = EncoderDecoderCache(PagedCache(model, block_size=16), DynamicCache())
    model.generate(ids(20), **{cache_kwarg(): pair}, max_new_tokens=5, do_sample=False)
    assert "2 rows x 5 tokens" in shown(pair.self_attention_cache).text


def test_a_step_that_failed_is_shown_as_taken_back() -> None:
    model = shared_model("llama")
    cache = PagedCache(model, block_size=16, max_tokens=64)
    feed(model, cache, ids(16, rows=1))

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with model.model.layers[1].register_forward_pre_hook(fail), pytest.raises(KeyboardInterrupt):  # type: ignore[union-attr]
        feed(model, cache, ids(20, rows=1))
    assert "1 row x 16 tokens" in shown(cache).text
    assert Counter(shown(cache).drawn())["·"] == 3


def test_what_a_cache_cannot_tell_becomes_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_paged_cache.errors import PoolExhausted

    def overflown() -> None:
        raise PoolExhausted("<rows> are full", needed_blocks=1, free_blocks=0, block_size=16)

    cache = PagedCache(shared_model("llama"))
    monkeypatch.setattr(cache._state, "pull", overflown)
    assert shown(cache).text == "PagedCache: The KV cache is out of memory. <rows> are full"


def test_text_is_escaped() -> None:
    class Odd(PagedCache):
        pass

    Odd.__name__ = "<script>alert('&')</script>"
    assert shown(Odd(shared_model("llama"))).text.startswith("<script>alert('&')</script>")


def test_its_repr_is_one_line_as_before() -> None:
    cache = PagedCache(shared_model("llama"), block_size=16)
    assert repr(cache) == "PagedCache(3 layers, 0 rows x 0 tokens, 0/0 blocks of 16, auto)"


# --- counts -------------------------------------------------------------------------------------------------


def test_counts_of_a_generation_with_beams() -> None:
    model = shared_model("llama")
    cache = PagedCache(model, block_size=16)
    model.generate(ids(40, rows=1), **{cache_kwarg(): cache}, num_beams=3, max_new_tokens=12, do_sample=False)
    stats = cache.stats()
    assert stats.equal_rows == 2  # three beams of one prompt
    assert stats.counters.taken - stats.counters.given_back == stats.used_blocks
    assert stats.counters.shared >= 2 * 3  # the prompt's blocks, by two more beams
    assert stats.counters.copied >= 2  # its last block is not full
    assert stats.counters.revived == stats.counters.evicted == 0


def test_copies_count_for_themselves_and_forks_with_their_pool() -> None:
    model = shared_model("llama")
    cache = PagedCache(model, block_size=16, max_tokens=256)
    feed(model, cache, ids(20, rows=1).repeat(2, 1))
    twin, apart = cache.fork(), copy.deepcopy(cache)
    assert [each.stats().equal_rows for each in (cache, twin, apart)] == [1, 0, 0]
    assert twin.stats().counters == cache.stats().counters
    assert apart.stats().counters.taken == 0
    feed(model, twin, ids(1))
    assert cache.stats().counters.copied > 0
