"""A timeline sees what every cache holds after each forward, and nothing else changes."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from eval.zoo import inputs, registry, runs, tiny
from hf_paged_cache import MemoryTimeline, PagedCache
from hf_paged_cache.errors import PagedCacheError
from tests.support.models import (
    CASES,
    ModelCase,
    cache_kwarg,
    cache_kwargs,
    host_cache,
    paged_cache,
    shared_model,
)
from tests.support.quantized import BLOCK, cache_of, feed, ids

PROMPT, STEPS, ROWS = 20, 6, 2
LLAMA_TOKEN_BYTES = 2 * 3 * 2 * 16 * 4  # K and V, layers, kv heads, head dim, float32


def generate(model: Any, cache: Any = None, **options: Any) -> torch.Tensor:
    given = {} if cache is None else {cache_kwarg(): cache}
    found: torch.Tensor = model.generate(
        ids(PROMPT, ROWS), **given, max_new_tokens=STEPS, do_sample=False, **options
    )
    return found


def hooks_of(model: torch.nn.Module) -> int:
    return len(model._forward_hooks) + len(model._forward_pre_hooks) + len(model._forward_hooks_with_kwargs)


# --- what is seen -------------------------------------------------------------------------------------------


def test_every_forward_of_a_paged_cache_is_seen_with_its_blocks_and_bytes() -> None:
    model = shared_model("llama")
    cache = PagedCache(model, block_size=16, max_tokens=256)
    with MemoryTimeline(model) as timeline:
        generate(model, cache)
    lengths = range(PROMPT, PROMPT + STEPS)  # the last token is never fed
    assert [row.tokens for row in timeline.rows] == list(lengths)
    assert [row.used_blocks for row in timeline.rows] == [ROWS * -(-length // 16) for length in lengths]
    block_bytes = 16 * LLAMA_TOKEN_BYTES
    assert [row.used_bytes for row in timeline.rows] == [
        row.used_blocks * block_bytes for row in timeline.rows
    ]  # type: ignore[operator]
    assert {row.allocated_bytes for row in timeline.rows} == {cache.memory_footprint().pool_bytes}
    assert timeline.rows[-1].used_bytes == cache.memory_footprint().used_bytes
    times = [row.elapsed_s for row in timeline.rows]
    assert times == sorted(times)
    assert times[0] > 0


@pytest.mark.parametrize("is_given", [True, False])
def test_the_default_cache_is_seen_whether_given_or_made_by_generate(is_given: bool) -> None:
    model = shared_model("llama")
    with MemoryTimeline(model) as timeline:
        generate(model, DynamicCache(config=model.config) if is_given else None)
    rows = timeline.rows
    assert [row.used_bytes for row in rows] == [ROWS * row.tokens * LLAMA_TOKEN_BYTES for row in rows]
    assert [row.allocated_bytes for row in rows] == [row.used_bytes for row in rows]
    assert {row.used_blocks for row in rows} == {None}


def test_a_static_cache_uses_what_it_has_filled() -> None:
    model = shared_model("llama")
    with MemoryTimeline(model) as timeline:
        generate(model, StaticCache(config=model.config, max_cache_len=64))
    for row in timeline.rows:
        # Beside K and V it holds its lengths.
        assert 0 <= row.used_bytes - ROWS * row.tokens * LLAMA_TOKEN_BYTES < 100
        assert 0 <= row.allocated_bytes - ROWS * 64 * LLAMA_TOKEN_BYTES < 100


def test_a_cropped_default_cache_still_holds_its_storage() -> None:
    model = shared_model("llama")
    cache = DynamicCache(config=model.config)
    with MemoryTimeline(model) as timeline:
        feed(model, cache, ids(40))
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, :10], layer.values[:, :, :10]
    from hf_paged_cache.tools.timeline import holdings_of

    held = holdings_of(cache)
    assert held.used_bytes == ROWS * 10 * LLAMA_TOKEN_BYTES
    assert held.allocated_bytes == timeline.rows[0].used_bytes


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_quantized_bytes_are_those_of_the_footprint(name: str) -> None:
    model = shared_model("llama")
    cache = cache_of(model, name)
    with MemoryTimeline(model) as timeline:
        feed(model, cache, ids(4 * BLOCK + 3))
        feed(model, cache, ids(1))
    footprint = cache.memory_footprint()
    assert timeline.rows[-1].used_bytes == footprint.used_bytes
    assert timeline.rows[-1].allocated_bytes == footprint.pool_bytes


@pytest.mark.parametrize("argument", cache_kwargs())
@pytest.mark.filterwarnings("ignore")
def test_a_forward_that_gets_its_cache_by_any_name_is_seen(argument: str) -> None:
    model = shared_model("llama")
    cache = PagedCache(model, block_size=16, max_tokens=64)
    with MemoryTimeline(model) as timeline, torch.no_grad():
        model(ids(5, 1), **{argument: cache})
    assert timeline.rows[0].tokens == 5


def test_a_forward_that_makes_its_own_cache_is_seen() -> None:
    model = shared_model("llama")
    with MemoryTimeline(model) as timeline, torch.no_grad():
        model(ids(5, 1), use_cache=True)
    assert (timeline.rows[0].tokens, timeline.label) == (5, "DynamicCache")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell")
def test_memory_of_the_process_is_seen_to_grow_by_what_the_cache_writes() -> None:
    model = shared_model("llama")
    with MemoryTimeline(model) as timeline:
        feed(model, cache_of(model, "auto"), ids(5))
        held = mmap.mmap(-1, 64 << 20)  # no allocator has memory at hand for that
        torch.frombuffer(held, dtype=torch.uint8).fill_(1)
        feed(model, cache_of(model, "auto"), ids(5))
    before, after = (row.process_bytes for row in timeline.rows)
    assert before is not None
    assert after is not None
    assert after - before > len(held) * 0.9
    assert timeline.start_process_bytes is not None
    assert timeline.process_memory_kind == "resident memory"


# --- any model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_results_of_every_family_stay_the_same_for_both_caches(case: ModelCase) -> None:
    model = case.build()
    for make in (host_cache, paged_cache):
        plain = generate(model, make(model), num_beams=2)
        cache = make(model)
        with MemoryTimeline(model) as timeline:
            assert torch.equal(generate(model, cache, num_beams=2), plain)
        assert len(timeline.rows) == STEPS
        assert (timeline.rows[0].used_blocks is None) == (make is host_cache)
        if make is paged_cache and not case.is_encoder_decoder:
            assert timeline.rows[-1].tokens == cache.stats().tokens


@pytest.mark.parametrize("name", ["lfm2", "mamba2", "qwen3_next"])
def test_states_beside_k_and_v_count_in_both_caches(name: str) -> None:
    entry = registry.entries().get(name)
    if entry is None:
        pytest.skip(f"the installed transformers has no {name!r}")
    model = tiny.build(entry)
    prompt = inputs.prompt(model, entry, (9, 9), seed=1)
    seen = []
    for cache in (DynamicCache(config=model.config), PagedCache(model, block_size=16)):
        with MemoryTimeline(model) as timeline:
            runs.generate(model, prompt, 3, cache=cache)
        seen.append(timeline.rows)
    stock, paged = seen
    assert [row.tokens for row in stock] == [row.tokens for row in paged] == [9, 10, 11]
    assert stock[-1].used_bytes > 0
    assert paged[-1].used_bytes >= stock[-1].used_bytes


# --- life of the hook ---------------------------------------------------------------------------------------


def test_the_hook_goes_with_the_block_and_after_an_error() -> None:
    model = shared_model("llama")
    before = hooks_of(model)
    timeline = MemoryTimeline(model)

    def record_and_fail() -> None:
        with timeline:
            assert hooks_of(model) > before
            feed(model, cache_of(model, "auto"), ids(5))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        record_and_fail()
    assert hooks_of(model) == before
    feed(model, cache_of(model, "auto"), ids(5))
    assert len(timeline.rows) == 1  # what was seen before the error


def test_a_second_block_begins_anew_and_one_inside_the_other_is_refused() -> None:
    model = shared_model("llama")
    timeline = MemoryTimeline(model)
    with timeline:
        feed(model, cache_of(model, "auto"), ids(5))
        with pytest.raises(PagedCacheError, match="recording already"):
            timeline.__enter__()
    with timeline:
        feed(model, cache_of(model, "auto"), ids(7))
    assert [row.tokens for row in timeline.rows] == [7]


def test_a_failed_forward_is_not_seen() -> None:
    model = shared_model("llama")
    with MemoryTimeline(model) as timeline:
        cache = PagedCache(model, block_size=16, max_tokens=16)
        feed(model, cache, ids(5, 1))
        with pytest.raises(RuntimeError):
            feed(model, cache, ids(40, 1))
    assert [row.tokens for row in timeline.rows] == [5]


# --- bad input ----------------------------------------------------------------------------------------------


def test_without_a_forward_with_a_cache_the_reason_is_named() -> None:
    model = shared_model("llama")
    with MemoryTimeline(model, label="paged") as timeline, torch.no_grad():
        model(ids(5), use_cache=False)
    for ask in (lambda: timeline.rows, timeline.to_dict, timeline.plot):
        with pytest.raises(PagedCacheError, match="paged: no forward of this LlamaForCausalLM with a cache"):
            ask()


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(PagedCacheError, match=r"torch\.nn\.Module, got LlamaConfig"):
        MemoryTimeline(shared_model("llama").config)


@pytest.mark.parametrize("timelines", [[], [1]])
def test_what_is_no_list_of_timelines_is_refused(timelines: Any) -> None:
    with pytest.raises(PagedCacheError, match="non-empty list of MemoryTimeline"):
        MemoryTimeline.plot_together(timelines)


# --- for people ---------------------------------------------------------------------------------------------


def test_its_data_are_numbers_and_strings() -> None:
    model = shared_model("llama")
    with MemoryTimeline(model, label="paged") as timeline:
        generate(model, PagedCache(model, block_size=16))
    data = json.loads(json.dumps(timeline.to_dict()))
    assert data["label"] == "paged"
    assert len(data["rows"]) == STEPS
    assert set(data["rows"][0]) == {
        "tokens", "used_bytes", "allocated_bytes", "used_blocks", "process_bytes", "elapsed_s",
    }  # fmt: skip


def test_two_caches_are_drawn_together_against_tokens(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model = shared_model("llama")
    timelines = []
    for label, cache in (("paged", PagedCache(model, block_size=16)), ("default", None)):
        with MemoryTimeline(model, label=label) as timeline:
            generate(model, cache)
        timelines.append(timeline)
    figure: Any = timelines[0].plot(timelines[1], path=tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000
    panels = figure.axes
    in_use, blocks = panels[0], panels[-1]
    assert [line.get_label().split("\n")[0] for line in in_use.lines] == ["paged", "default"]
    assert list(in_use.lines[1].get_xdata()) == [row.tokens for row in timelines[1].rows]
    assert list(in_use.lines[1].get_ydata()) == [row.used_bytes / 1024 for row in timelines[1].rows]
    assert "KiB" in in_use.get_ylabel()
    assert [line.get_label() for line in blocks.lines] == ["paged"]
    looks = {(line.get_linestyle(), line.get_marker()) for line in in_use.lines}
    assert len(looks) == 2  # told apart without colour
    assert {axes.get_xlabel() for axes in panels} == {"tokens in each row of the cache"}


@pytest.mark.parametrize("count", [1, 3, 4])
def test_no_line_runs_through_the_legend(count: int) -> None:
    pytest.importorskip("matplotlib")
    model = shared_model("llama")
    timelines = []
    for index in range(count):
        with MemoryTimeline(model, label=f"a cache with a name, {index}") as timeline:
            generate(model, PagedCache(model, block_size=16, max_tokens=256))
        timelines.append(timeline)
    figure = MemoryTimeline.plot_together(timelines)
    figure.draw_without_rendering()
    for axes in figure.axes:
        legend = axes.get_legend().get_window_extent()
        points = [point for line in axes.lines for point in axes.transData.transform(line.get_xydata())]
        assert [point for point in points if legend.contains(*point)] == []
