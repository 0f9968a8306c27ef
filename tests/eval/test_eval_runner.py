from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from eval import runner
from eval.caches import CACHES, CacheEntry, CacheUnavailable, tensor_bytes
from eval.errors import UsageError
from eval.models import LoadedModel
from eval.runner import Row, TaskResult, run_task
from eval.settings import Settings
from eval.tasks import TASKS, Sample

from .conftest import HEAD_DIM, KV_HEADS, LAYERS, tiny_model

TASK = TASKS["translation"]
SAMPLES = [Sample(str(n), "word " * n, "mot " * n) for n in (1, 7, 3, 5, 2)]
SETTINGS = Settings(batch_size=2, max_new_tokens=6)
DYNAMIC = CACHES["dynamic"]


def _run(loaded: LoadedModel, *entries: CacheEntry, settings: Settings = SETTINGS, **more: Any) -> TaskResult:
    return run_task(loaded, TASK, SAMPLES, entries, settings, **more)


def _row(result: TaskResult, cache: str) -> Row:
    return next(row for row in result.rows if row.cache == cache)


def _raising(name: str, error: Exception) -> CacheEntry:
    def create(model: Any, settings: Settings) -> Any:
        raise error

    return CacheEntry(name, name, create, tensor_bytes)


def test_a_row_holds_every_measurement(loaded: LoadedModel) -> None:
    row = _row(_run(loaded, DYNAMIC), "dynamic")
    assert row.problem is None
    assert row.samples == len(SAMPLES)
    assert row.metrics is not None
    assert tuple(row.metrics) == TASK.metric_keys
    assert row.identical == 1.0
    assert row.peak_bytes is not None
    assert row.rise_bytes is not None
    assert row.peak_bytes > row.rise_bytes >= 0
    assert row.prefill_ms is not None
    assert row.prefill_ms > 0
    assert row.decode_ms_per_token is not None
    assert row.decode_ms_per_token > 0
    # 6 tokens: the first comes with the prefill.
    assert [len(batch["step_ms"]) for batch in row.batches] == [5, 5, 5]


def test_kv_bytes_are_those_of_the_largest_batch_to_the_byte(loaded: LoadedModel) -> None:
    row = _row(_run(loaded, DYNAMIC), "dynamic")
    longest = [
        runner._encode(loaded, [sample.prompt for sample in batch])["input_ids"].shape
        for batch in (SAMPLES[:2], SAMPLES[2:4], SAMPLES[4:])
    ]
    slots = max(rows * (tokens + 6 - 1) for rows, tokens in longest)
    assert row.kv_bytes == row.kv_allocated_bytes == 2 * LAYERS * KV_HEADS * HEAD_DIM * 4 * slots


def test_padding_is_on_the_left_and_special_tokens_come_once(loaded: LoadedModel) -> None:
    encoded = runner._encode(loaded, ["a", "abc"])
    mask = encoded["attention_mask"]
    assert mask.tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
    assert loaded.tokenizer.decode(encoded["input_ids"][1]) == "<user>abc<answer>"


def test_paged_tokens_equal_the_default_caches_and_the_attention_is_put_back(loaded: LoadedModel) -> None:
    pytest.importorskip("hf_paged_cache.cache", exc_type=ImportError)
    before = loaded.model.config._attn_implementation
    row = _row(_run(loaded, DYNAMIC, CACHES["paged"]), "paged")
    assert row.problem is None
    assert row.identical == 1.0
    assert row.kv_bytes is not None
    assert row.kv_allocated_bytes is not None
    assert 0 < row.kv_bytes <= row.kv_allocated_bytes
    assert loaded.model.config._attn_implementation == before


def test_the_default_cache_never_runs_with_patched_attention(loaded: LoadedModel) -> None:
    pytest.importorskip("hf_paged_cache.cache", exc_type=ImportError)
    seen: list[tuple[str, str]] = []

    def watched(entry: CacheEntry) -> CacheEntry:
        def create(model: Any, settings: Settings) -> Any:
            cache = entry.create(model, settings)
            seen.append((entry.name, model.config._attn_implementation))
            return cache

        return dataclasses.replace(entry, create=create)

    _run(loaded, watched(CACHES["paged"]), watched(DYNAMIC))
    assert {implementation for name, implementation in seen if name == "dynamic"} == {"sdpa"}
    assert "sdpa" not in {implementation for name, implementation in seen if name == "paged"}


def test_contenders_take_turns_in_going_first(loaded: LoadedModel) -> None:
    order: list[str] = []

    def noting(name: str) -> CacheEntry:
        def create(model: Any, settings: Settings) -> Any:
            order.append(name)
            return DYNAMIC.create(model, settings)

        return CacheEntry(name, name, create, tensor_bytes)

    _run(loaded, noting("a"), noting("b"))
    warm_up, batches = order[:2], order[2:]
    assert warm_up == ["a", "b"]
    assert batches == ["a", "b", "b", "a", "a", "b"]


def test_other_tokens_lower_the_share_that_is_identical(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate_batch = runner.generate_batch

    def changed(model: Any, inputs: Any, entry: CacheEntry, *rest: Any) -> runner.BatchResult:
        result = generate_batch(model, inputs, entry, *rest)
        if entry.name == "other":
            # One row in each of the three batches of 2, 2 and 1.
            result.tokens[0][-1] += 1
        return result

    monkeypatch.setattr(runner, "generate_batch", changed)
    result = _run(loaded, DYNAMIC, dataclasses.replace(DYNAMIC, name="other"))
    assert _row(result, "other").identical == pytest.approx(2 / 5)
    flags = [p.identical for p in result.predictions if p.cache == "other"]
    assert flags == [False, True, False, True, False]


def test_without_the_default_cache_nothing_is_called_identical(loaded: LoadedModel) -> None:
    result = _run(loaded, dataclasses.replace(DYNAMIC, name="other"))
    assert _row(result, "other").identical is None
    assert {prediction.identical for prediction in result.predictions} == {None}


@pytest.mark.parametrize(
    ("error", "problem", "failed"),
    [
        (CacheUnavailable("needs a GPU"), "needs a GPU", False),
        (KeyError("layer\n7"), "KeyError: 'layer\\n7'", True),
        (RuntimeError("two\nlines"), "RuntimeError: two lines", True),
    ],
)
def test_a_cache_that_cannot_run_becomes_a_row_and_the_others_go_on(
    loaded: LoadedModel, error: Exception, problem: str, failed: bool
) -> None:
    result = _run(loaded, _raising("broken", error), DYNAMIC)
    broken = _row(result, "broken")
    assert (broken.problem, broken.failed, broken.metrics) == (problem, failed, None)
    assert _row(result, "dynamic").problem is None
    assert {prediction.cache for prediction in result.predictions} == {"dynamic"}


def test_progress_adds_up_to_batches_times_caches(loaded: LoadedModel) -> None:
    units: list[int] = []
    other = _raising("broken", CacheUnavailable("no"))
    _run(loaded, DYNAMIC, other, advance=lambda label, done: units.append(done))
    assert sum(units) == 3 * 2


def test_a_prompt_beyond_the_models_context_is_refused_before_anything_runs(loaded: LoadedModel) -> None:
    short = dataclasses.replace(loaded, model=tiny_model(loaded.tokenizer, context=64))
    with pytest.raises(UsageError, match=r"need \d+ tokens; the model's context is 64"):
        _run(short, DYNAMIC, settings=dataclasses.replace(SETTINGS, max_new_tokens=60))


@pytest.mark.parametrize(
    ("row", "kept"),
    [([4, 5, 9, 0, 0], [4, 5, 9]), ([9, 9], [9]), ([4, 5], [4, 5]), ([4, 8, 5], [4, 8])],
)
def test_tokens_end_with_the_first_stop_token(row: list[int], kept: list[int]) -> None:
    assert runner._until_stop(row, {8, 9}) == kept


def test_a_storage_shared_by_two_layers_counts_once() -> None:
    class Layer:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.keys, self.values, self.states = tensor, tensor[:2], {0: [tensor]}

    class Cache:
        layers = [Layer(torch.zeros(8)), Layer(torch.zeros(4))]  # noqa: RUF012

    assert tensor_bytes(Cache()).used_bytes == 4 * (8 + 4)
