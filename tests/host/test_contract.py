"""A `PagedCache` answers every call of the cache contract as `DynamicCache` does."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, MistralConfig, PreTrainedConfig
from transformers.cache_utils import Cache

from hf_paged_cache import PagedCache

LAYERS, HEADS, HEAD_DIM = 3, 2, 16
SIZES = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 512,
}


def full_config() -> PreTrainedConfig:
    return LlamaConfig(**SIZES)


def window_config() -> PreTrainedConfig:
    return MistralConfig(**SIZES, sliding_window=24)


CONFIGS = {"full": full_config, "window": window_config}

Step = Callable[[Cache], None]


class Twins:
    """A stock cache and a paged one that are given the same."""

    def __init__(self, config: PreTrainedConfig, *, batch: int = 2, block_size: int = 16) -> None:
        self.stock = DynamicCache(config=config)
        self.paged = PagedCache(config, block_size=block_size)
        self.batch = batch
        self._generator = torch.Generator().manual_seed(0)

    def update(self, tokens: int) -> None:
        """New K/V in every layer; what comes back must be equal to the bit, as must the mask sizes."""
        for layer in range(LAYERS):
            assert self.paged.get_mask_sizes(tokens, layer) == self.stock.get_mask_sizes(tokens, layer)
        for layer in range(LAYERS):
            keys, values = (
                torch.randn(self.batch, HEADS, tokens, HEAD_DIM, generator=self._generator) for _ in range(2)
            )
            want = self.stock.update(keys, values, layer)
            got = self.paged.update(keys, values, layer)
            for a, b in zip(got, want, strict=True):
                assert a.shape == b.shape
                assert torch.equal(a + 0, b)

    def both(self, step: Step) -> None:
        step(self.stock)
        step(self.paged)

    def check(self) -> None:
        assert self.paged.get_seq_length() == self.stock.get_seq_length()
        for mine, theirs in zip(self.paged.layers, self.stock.layers, strict=True):
            if not self.stock.get_seq_length():
                continue
            assert torch.equal(mine.keys + 0, theirs.keys)
            assert torch.equal(mine.values + 0, theirs.values)
        self.paged.check_integrity()


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> PreTrainedConfig:
    return CONFIGS[request.param]()


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 23, 24, 25, 33, 63, 64, 65, 130])
def test_updates_return_what_the_stock_cache_returns(
    config: PreTrainedConfig, prompt: int, block_size: int
) -> None:
    twins = Twins(config, block_size=block_size)
    for tokens in (prompt, 1, 1, 5, 16, 1, 40, 1):
        twins.update(tokens)
        twins.check()


@pytest.mark.parametrize("remove", [0, 1, 3, 15, 16, 17, 20, 25, 30])
def test_crop_then_regrow_equals_the_stock_cache(remove: int) -> None:
    twins = Twins(full_config())
    twins.update(20)
    twins.both(lambda cache: cache.crop(-remove))
    if remove >= 20:
        # The stock cache keeps an empty tensor, ours keeps nothing.
        assert twins.paged.get_seq_length() == twins.stock.get_seq_length() == 0
        assert twins.paged.stats().used_blocks == 0
    else:
        twins.check()
    twins.update(19)
    twins.check()


def test_crop_of_window_layers_while_recording_equals_the_stock_cache() -> None:
    twins = Twins(window_config())
    twins.both(lambda cache: cache.activate_past_recording())
    twins.update(50)
    for remove, tokens in ((0, 6), (4, 6), (6, 3), (0, 1), (1, 9)):
        twins.both(lambda cache, n=remove: cache.crop(-n))
        twins.check()
        twins.update(tokens)


def test_crop_gives_blocks_back() -> None:
    twins = Twins(full_config())
    twins.update(50)
    assert twins.paged.stats().used_blocks == 2 * 4
    twins.paged.crop(-20)
    assert twins.paged.stats().used_blocks == 2 * 2


ROW_STEPS: dict[str, tuple[Step, int]] = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 1])), 2),
    "swap": (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), 2),
    "repeat": (lambda cache: cache.batch_repeat_interleave(3), 6),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), 1),
    "select twice": (lambda cache: cache.batch_select_indices(torch.tensor([1, 0, 1])), 3),
    "select by mask": (lambda cache: cache.batch_select_indices(torch.tensor([False, True])), 1),
}


@pytest.mark.parametrize("tokens", [15, 16, 17, 40])
@pytest.mark.parametrize("name", ROW_STEPS)
def test_rows_move_as_in_the_stock_cache(config: PreTrainedConfig, name: str, tokens: int) -> None:
    step, batch = ROW_STEPS[name]
    twins = Twins(config)
    twins.update(tokens)
    twins.both(step)
    twins.check()
    twins.batch = batch
    for new in (1, 1, 17, 1):
        twins.update(new)
        twins.check()


def test_repeated_rows_share_their_blocks_until_they_write() -> None:
    twins = Twins(full_config(), batch=1)
    twins.update(40)
    assert twins.paged.stats().used_blocks == 3
    twins.paged.batch_repeat_interleave(8)
    assert twins.paged.stats().used_blocks == 3
    assert twins.paged.stats().shared_blocks == 3
    twins.stock.batch_repeat_interleave(8)
    twins.batch = 8
    twins.update(1)
    # Two full blocks stay shared, the open one is now one per row.
    assert twins.paged.stats().used_blocks == 2 + 8
    twins.check()


def test_reset_allows_another_batch_and_loses_no_block(config: PreTrainedConfig) -> None:
    twins = Twins(config)
    for batch in (4, 2, 5):
        twins.batch = batch
        twins.update(33)
        twins.update(1)
        twins.check()
        twins.paged.reset()
        twins.stock = DynamicCache(config=config)  # before 5.18 a reset only wrote zeros
        assert twins.paged.stats().used_blocks == 0
        twins.paged.check_integrity()


def test_window_layers_keep_only_the_window() -> None:
    twins = Twins(window_config(), batch=1)
    twins.update(300)
    for _ in range(40):
        twins.update(1)
    # 23 tokens of history and the new one span at most three blocks of 16.
    assert twins.paged.stats().used_blocks <= 3


def test_a_reset_ends_the_recording_of_window_layers() -> None:
    twins = Twins(window_config(), batch=1)
    twins.both(lambda cache: cache.activate_past_recording())
    twins.update(100)
    assert twins.paged.stats().used_blocks == 7
    twins.paged.reset()
    assert not twins.paged.layers[0].record_past
    keys = torch.zeros(1, HEADS, 100, HEAD_DIM)
    for layer in range(LAYERS):
        twins.paged.update(keys, keys, layer)
    assert twins.paged.stats().used_blocks <= 3


def test_properties_match_the_stock_cache(config: PreTrainedConfig) -> None:
    stock, paged = DynamicCache(config=config), PagedCache(config)
    assert len(paged) == len(stock) == LAYERS
    assert bool(paged)
    for name in ("is_compileable", "is_croppable", "is_sliding", "is_linear", "is_initialized"):
        assert getattr(paged, name) == getattr(stock, name), name
    assert paged.batch_size == -1
    assert paged.get_max_length() == stock.get_max_length()
    assert paged.get_seq_length() == 0
    assert [item[0] for item in paged] == [None] * LAYERS
    assert "PagedCache(3 layers, 0 rows" in repr(paged)
    assert isinstance(paged, Cache)


def test_early_initialization_takes_places_and_stores_nothing(config: PreTrainedConfig) -> None:
    paged = PagedCache(config)
    paged.early_initialization(2, HEADS, HEAD_DIM, torch.float32, torch.device("cpu"))
    assert paged.is_initialized
    assert paged.get_seq_length() == 0
    keys = torch.randn(2, HEADS, 5, HEAD_DIM)
    for layer in range(LAYERS):
        paged.update(keys, keys, layer)
    assert torch.equal(paged.layers[1].keys + 0, keys)


def test_reading_layers_gives_dense_tensors(config: PreTrainedConfig) -> None:
    twins = Twins(config)
    twins.update(20)
    keys = twins.paged.layers[2].keys
    assert keys.shape == (2, HEADS, 20, HEAD_DIM)
    assert torch.equal(keys[:, :, -1], twins.stock.layers[2].keys[:, :, -1])
    assert keys.numpy().shape == keys.shape
    assert keys.tolist() == twins.stock.layers[2].keys.tolist()
    assert "keys of layer 2" in repr(keys)


def test_what_update_returns_can_be_viewed_as_its_strides_say() -> None:
    cache = PagedCache(full_config(), block_size=16)
    keys = torch.randn(2, 7, HEADS, HEAD_DIM).transpose(1, 2)  # as projections leave them
    got, _ = cache.update(keys, keys, 0)
    assert got.is_contiguous()
    assert torch.equal(got.view(2 * HEADS, -1), keys.reshape(2 * HEADS, -1))


def test_a_cache_that_was_read_can_be_copied_and_the_copy_is_its_own(config: PreTrainedConfig) -> None:
    twins = Twins(config)
    twins.update(20)
    assert twins.paged.layers[0].keys.shape[2] == 20
    copies = copy.deepcopy(twins.stock), copy.deepcopy(twins.paged)
    twins.update(3)
    twins.check()
    twins.stock, twins.paged = copies
    twins.check()
    twins.update(20)
    twins.check()


def test_crop_takes_the_tensor_that_older_versions_pass() -> None:
    twins = Twins(full_config())
    twins.update(20)
    count = torch.tensor(4)
    twins.paged.crop(-count)
    count += 7
    assert twins.paged.get_seq_length() == 16
    assert type(twins.paged._state.rows.end) is int


def test_a_dropped_cache_dies_at_once() -> None:
    twins = Twins(full_config())
    twins.update(20)
    gc.disable()
    try:
        died = weakref.ref(twins.paged)
        pool = weakref.ref(twins.paged._state.groups[0].pools[0].keys)
        del twins
        assert died() is None
        assert pool() is None
    finally:
        gc.enable()


def test_two_caches_from_one_config_are_equal_and_leave_it_alone() -> None:
    config = full_config()
    before: dict[str, Any] = config.to_dict()
    first, second = PagedCache(config), PagedCache(config)
    assert repr(first) == repr(second)
    assert config.to_dict() == before


def test_inference_mode_and_plain_mode_mix() -> None:
    twins = Twins(full_config())
    with torch.inference_mode():
        twins.update(20)
        twins.paged.batch_repeat_interleave(1)
    twins.update(1)
    twins.both(lambda cache: cache.reorder_cache(torch.tensor([1, 1])))
    twins.update(1)
    twins.check()
