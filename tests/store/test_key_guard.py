"""Keys that lose too much in 4 bits are stored in 8, or refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from hf_paged_cache import PagedCache
from hf_paged_cache.errors import QuantizationError
from hf_paged_cache.formats import FORMATS, kv_format
from hf_paged_cache.store.key_guard import KEY_ERROR_BOUND, key_error
from tests.support.models import shared_model
from tests.support.quantized import BLOCK, cache_of, states, update_all


@pytest.fixture
def model() -> Any:
    return shared_model("llama")


def uneven(keys: torch.Tensor) -> torch.Tensor:
    """Keys of which one token in a while is much larger than the others: no scale per channel suits both."""
    spoilt = keys.clone()
    spoilt[:, :, 5::8] *= 60
    return spoilt


def test_the_measure_of_the_guard() -> None:
    keys = torch.randn(2, 8, 64, 32, generator=torch.Generator().manual_seed(0))
    plain = key_error(FORMATS["int4"], keys)
    assert 0.05 < plain < KEY_ERROR_BOUND / 2
    assert key_error(FORMATS["int4"], keys + 60) == pytest.approx(plain, rel=0.2)
    assert key_error(FORMATS["int4"], torch.full_like(keys, 0.3)) < KEY_ERROR_BOUND  # all alike, as padding
    one_token, one_head = keys.clone(), keys.clone()
    one_token[:, :, 5] *= 50  # takes the range of all channels
    one_head[:, :7] *= 10
    one_head[:, 7, 3] *= 100
    assert key_error(FORMATS["int4"], one_token) > KEY_ERROR_BOUND
    assert key_error(FORMATS["int4"], one_head) > KEY_ERROR_BOUND
    grouped = kv_format("int4_group", group_size=16)
    assert grouped is not None
    offset = torch.zeros(32)
    offset[3] = 60
    assert key_error(grouped, keys + offset) > KEY_ERROR_BOUND


@pytest.mark.parametrize("at_once", [True, False])
def test_the_guard_moves_one_layer_and_says_so_once(
    model: Any, at_once: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_paged_cache.store.key_guard.key_error", _error_of_marked_keys)
    cache = cache_of(model, "int4")
    keys, values = states(4 * BLOCK + 1)
    spoilt = keys.clone()
    spoilt[..., 0] = MARK
    with caplog.at_level(logging.WARNING, "hf_paged_cache"):
        steps = [slice(0, None)] if at_once else [slice(i, i + 1) for i in range(keys.shape[2])]
        for step in steps:
            for layer_idx in range(3):
                given = spoilt if layer_idx == 1 else keys
                cache.update(given[:, :, step], values[:, :, step], layer_idx)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert said[0].startswith("layer 1: the keys lose too much in 'int4'")
    assert cache.stats().layer_dtypes == {0: "int4", 1: "k8v4", 2: "int4"}
    errors = [
        float((layer.keys - x).norm()) for layer, x in zip(cache.layers, (keys, spoilt, keys), strict=True)
    ]
    assert errors[0] == errors[2] > 5 * errors[1]
    cache.check_integrity()
    sealed, dense = 3, 2
    records = [2 * FORMATS[name].bind(BLOCK, 16, 16).nbytes for name in ("int4", "k8v4", "int4")]
    used = sealed * sum(records) + dense * 3 * 2 * 2 * BLOCK * 16 * 4
    assert cache.memory_footprint().used_bytes == used
    cache.reset()
    update_all(cache, keys, values)
    assert cache.stats().layer_dtypes[1] == "k8v4"


def test_a_pool_that_all_layers_have_left_is_given_up(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_paged_cache.store.key_guard.key_error", lambda layer_format, keys: 9.0)
    cache = cache_of(model, "int4", max_tokens=100)
    update_all(cache, *states(70))
    assert set(cache.stats().layer_dtypes.values()) == {"k8v4"}
    group = cache._state.groups[0]
    assert {pool.shape.format.name for pool in group.pools if pool.shape.format} == {"k8v4"}
    for step in range(20):
        update_all(cache, *states(1, seed=step))
    cache.check_integrity()


MARK = 0.75


def _error_of_marked_keys(layer_format: Any, keys: torch.Tensor) -> float:
    return 9.0 if bool((keys[..., 0] == MARK).all()) else 0.0


def test_the_guard_finds_keys_that_four_bits_spoil(model: Any) -> None:
    cache = PagedCache(model, kv_cache_dtype="int4")
    keys, values = states(200)
    spoilt = keys.clone()
    spoilt[:, :, 70] *= 50
    for layer_idx in range(3):
        cache.update(spoilt if layer_idx == 2 else keys, values, layer_idx)
    assert cache.stats().layer_dtypes == {0: "int4", 1: "int4", 2: "k8v4"}


def test_a_step_whose_sealing_fails_changes_nothing(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(model, "int4")
    keys, values = states(3 * BLOCK)
    update_all(cache, keys, values)
    before = [layer.keys.clone() for layer in cache.layers]

    def fail(*args: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("hf_paged_cache.kernels.dispatch.encode_blocks", fail)
        with pytest.raises(MemoryError):
            cache.update(*states(1), 0)
    cache.check_integrity()
    assert cache.get_seq_length() == 3 * BLOCK
    for layer, content in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys.clone(), content)
    update_all(cache, *states(1))
    assert all(float((x.keys[:, :, :-1] - keys).norm() / keys.norm()) < 0.15 for x in cache.layers)
    cache.check_integrity()


def test_a_move_that_fails_is_tried_again(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_paged_cache.store.key_guard.key_error", lambda layer_format, keys: 9.0)
    cache = cache_of(model, "int4")
    keys, values = states(2 * BLOCK)
    update_all(cache, keys, values)

    def fail(*args: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("hf_paged_cache.store.layer_group.LayerGroup._pool_for", fail)
        with pytest.raises(MemoryError):
            cache.update(*states(1), 0)
    update_all(cache, *states(1))
    assert set(cache.stats().layer_dtypes.values()) == {"k8v4"}
    cache.check_integrity()


@pytest.mark.parametrize("at_once", [True, False])
def test_the_guard_can_raise_and_nothing_is_changed(
    model: Any, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_paged_cache.store.key_guard.key_error", _error_of_marked_keys)
    cache = cache_of(model, "int4", key_error_guard="error")
    keys, values = states(3 * BLOCK)
    spoilt = keys.clone()
    spoilt[..., 0] = MARK

    def run() -> None:
        for step in [slice(0, None)] if at_once else [slice(i, i + 1) for i in range(keys.shape[2])]:
            for layer_idx in range(3):
                given = spoilt if layer_idx == 1 else keys
                cache.update(given[:, :, step], values[:, :, step], layer_idx)

    with pytest.raises(QuantizationError, match=r"layer 1: the keys lose.*layer_dtypes=\{1: 'int8'\}"):
        run()
    assert cache.get_seq_length() == (0 if at_once else 2 * BLOCK)
    cache.check_integrity()


def test_the_guard_can_be_off(model: Any) -> None:
    cache = cache_of(model, "int4", key_error_guard="off")
    keys, values = states(5 * BLOCK)
    update_all(cache, uneven(keys), values)
    assert set(cache.stats().layer_dtypes.values()) == {"int4"}
