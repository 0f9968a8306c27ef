"""What a quantized `PagedCache` promises beside its tokens: bytes, formats per layer, refusals."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from transformers import Lfm2Config

from hf_paged_cache import PagedCache
from hf_paged_cache.errors import PagedCacheError, UnstorableValueError, UnsupportedLayerError
from hf_paged_cache.formats import kv_format
from hf_paged_cache.forward.recurrent_state import HostStates
from hf_paged_cache.store import pool_tensors
from hf_paged_cache.store.device.fault_flags import Faults
from tests.blocks.rows import Counted
from tests.support.models import cache_kwarg, shared_model
from tests.support.quantized import BLOCK, NAMES, cache_of, feed, ids, states, update_all


@pytest.fixture
def model() -> Any:
    return shared_model("llama")


# --- bytes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_records_and_of_the_blocks_kept_dense(model: Any, name: str) -> None:
    cache = cache_of(model, name, max_tokens=2 * 160)
    feed(model, cache, ids(101))
    layer_format = kv_format(name, group_size=8)
    assert layer_format is not None
    record = 3 * 2 * layer_format.bind(BLOCK, 16, 16).nbytes  # layers, kv heads
    dense = 3 * 2 * 2 * BLOCK * 16 * 4
    kept = {"int4": 2, "int4_group": 2, "int8_block": 1}.get(name, 0)
    slots = {"int4": 3, "int4_group": 3, "int8_block": 2}.get(name, 0)
    footprint, stats = cache.memory_footprint(), cache.stats()
    assert stats.used_blocks == 2 * 7
    assert footprint.used_bytes == 2 * ((7 - kept) * record + kept * dense)
    assert footprint.pool_bytes == stats.num_blocks * record + 2 * slots * dense


@pytest.mark.parametrize("name", NAMES)
def test_decoding_allocates_no_pool(model: Any, name: str) -> None:
    cache = cache_of(model, name, max_tokens=400)
    feed(model, cache, ids(40))
    before = cache.memory_footprint().pool_bytes
    for step in range(60):
        feed(model, cache, ids(1, seed=step))
    assert cache.memory_footprint().pool_bytes == before
    cache.check_integrity()


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_written_once(model: Any, name: str) -> None:
    cache = cache_of(model, name)
    feed(model, cache, ids(80))
    group = cache._state.groups[0]
    sealed = [i for table in group.manager.tables for i in table.ids[1:4]]
    before = [pool.records[sealed].clone() for pool in group.pools if pool.records is not None]
    for step in range(40):
        feed(model, cache, ids(1, seed=step))
    for pool, content in zip(group.pools, before, strict=True):
        assert pool.records is not None
        assert torch.equal(pool.records[sealed], content)


@pytest.mark.parametrize("name", NAMES)
def test_a_crop_keeps_the_bytes_and_a_write_decodes_that_one_block(model: Any, name: str) -> None:
    cache = cache_of(model, name)
    keys, values = states(5 * BLOCK + 3)
    update_all(cache, keys, values)
    held = [layer.keys.clone() for layer in cache.layers]
    records = [pool.records.clone() for pool in cache._state.groups[0].pools if pool.records is not None]
    cache.crop(-(BLOCK + 10))
    kept = 4 * BLOCK - 7
    for layer, before in zip(cache.layers, held, strict=True):
        assert torch.equal(layer.keys.clone(), before[:, :, :kept])
    for pool, before in zip(cache._state.groups[0].pools, records, strict=True):
        assert torch.equal(pool.records, before)
    new_keys, new_values = states(1, seed=1)
    update_all(cache, new_keys, new_values)
    for layer, before in zip(cache.layers, held, strict=True):
        assert torch.equal(layer.keys.clone()[:, :, :kept], before[:, :, :kept])
    cache.check_integrity()


@pytest.mark.parametrize("name", NAMES)
def test_what_layers_show_is_close_to_what_they_were_given(model: Any, name: str) -> None:
    cache = cache_of(model, name)
    keys, values = states(70)
    update_all(cache, keys, values)
    for layer in cache.layers:
        for shown, given in ((layer.keys, keys), (layer.values, values)):
            assert shown.dtype == given.dtype
            assert shown.shape == given.shape
            error = float((shown - given).norm() / given.norm())
            assert 0 < error < 0.15


def test_a_deep_copy_goes_its_own_way(model: Any) -> None:
    for name in NAMES:
        cache = cache_of(model, name)
        feed(model, cache, ids(50))
        twin = copy.deepcopy(cache)
        expected = feed(model, cache, ids(20, seed=1))
        for step in range(30):
            feed(model, cache, ids(1, seed=step))
        assert torch.equal(feed(model, twin, ids(20, seed=1)), expected), name
        twin.check_integrity()
        cache.check_integrity()


@pytest.mark.parametrize("name", NAMES)
def test_repeated_and_selected_rows(model: Any, name: str) -> None:
    cache = cache_of(model, name)
    feed(model, cache, ids(45))
    twin = copy.deepcopy(cache)
    cache.batch_repeat_interleave(3)
    more = ids(1, rows=6, seed=2)
    grown = feed(model, cache, more)
    for step in range(20):
        feed(model, cache, ids(1, rows=6, seed=step))
    cache.batch_select_indices(torch.tensor([4, 0]))
    cache.check_integrity()
    twin.batch_select_indices(torch.tensor([1, 0]))
    assert torch.allclose(feed(model, twin, more[[4, 0]]), grown[[4, 0]], atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_first_prompt_is_computed_from_no_byte(model: Any, name: str) -> None:
    tokens = ids(70)
    with torch.no_grad():
        exact = model(tokens, use_cache=False).logits
    assert torch.equal(feed(model, cache_of(model, name), tokens), exact)


# --- formats of layers --------------------------------------------------------------------------------------


def test_layers_can_have_formats_and_groups_of_their_own(model: Any) -> None:
    cache = cache_of(
        model, "int4", layer_dtypes={0: "int8", 2: "auto"}, group_size={1: 16}, key_error_guard="off"
    )
    keys, values = states(50)
    update_all(cache, keys, values)
    assert cache.stats().layer_dtypes == {0: "int8", 1: "int4", 2: "auto"}
    errors = [float((layer.keys - keys).norm()) for layer in cache.layers]
    assert errors[2] == 0 < errors[0] < errors[1]
    for step in range(40):
        update_all(cache, *states(1, seed=step))
    cache.check_integrity()
    assert torch.equal(cache.layers[2].keys[:, :, :50], keys)
    # All layers share tables, so those in int8 keep the first and the open block as they came, too.
    assert torch.equal(cache.layers[0].keys[:, :, :BLOCK], keys[:, :, :BLOCK])


def test_group_sizes_differ_by_layer(model: Any) -> None:
    cache = cache_of(model, "int4_group", group_size={0: 2, 1: 16, 2: 8}, key_error_guard="off")
    keys, values = states(40)
    update_all(cache, keys, values)
    errors = [float((layer.values - values).norm()) for layer in cache.layers]
    assert errors[0] < errors[2] < errors[1]


@pytest.mark.parametrize(("tokens", "name"), [(512, "int4"), (513, "int8")])
def test_adaptive_goes_by_the_prompt(model: Any, tokens: int, name: str) -> None:
    cache = PagedCache(model, kv_cache_dtype="adaptive", max_tokens=1024)
    update_all(cache, *states(tokens))
    assert set(cache.stats().layer_dtypes.values()) == {name}


def test_adaptive_chooses_anew_after_a_reset(model: Any) -> None:
    cache = PagedCache(
        model, kv_cache_dtype="adaptive", adaptive_threshold=30, block_size=BLOCK, max_tokens=512
    )
    for tokens, name in ((20, "int4"), (31, "int8"), (40, "int8"), (30, "int4")):
        keys, values = states(tokens)
        update_all(cache, keys, values)
        assert set(cache.stats().layer_dtypes.values()) == {name}
        assert float((cache.layers[0].keys - keys).norm() / keys.norm()) < 0.15
        for _ in range(20):
            update_all(cache, *states(1))
        assert set(cache.stats().layer_dtypes.values()) == {name}
        cache.check_integrity()
        cache.reset()


def test_pools_of_another_format_are_free_memory_when_the_next_are_sized(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate, held = pool_tensors.allocate, []

    def allocated(*args: Any) -> torch.Tensor:
        tensor = allocate(*args)
        held.append((weakref.ref(tensor), tensor.nbytes))
        return tensor

    def free(device: torch.device) -> int:
        return 100_000 - sum(nbytes for tensor, nbytes in held if tensor() is not None)

    monkeypatch.setattr(pool_tensors, "allocate", allocated)
    monkeypatch.setattr("hf_paged_cache.store.capacity.free_memory_bytes", free)

    def blocks(cache: PagedCache, tokens: int) -> int:
        update_all(cache, *states(tokens))
        found = cache.stats().num_blocks
        cache.reset()
        return found

    def made() -> PagedCache:
        return cache_of(model, "adaptive", adaptive_threshold=30)

    prompts = (20, 60, 20)
    want = [blocks(made(), tokens) for tokens in prompts]
    cache = made()
    assert [blocks(cache, tokens) for tokens in prompts] == want


@pytest.mark.parametrize("name", NAMES)
def test_sinks_and_residual_can_be_longer(model: Any, name: str) -> None:
    cache = cache_of(model, name, sink_tokens=2 * BLOCK, residual_length=2 * BLOCK)
    keys, values = states(7 * BLOCK + 5)
    update_all(cache, keys, values)
    for layer in cache.layers:
        exact = (layer.keys.clone() == keys).all(-1).all(1)[0]
        assert exact[: 2 * BLOCK].all()
        assert exact[6 * BLOCK :].all()
        assert not exact[2 * BLOCK : 6 * BLOCK].any()


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_which_some_are_in_their_sinks_still_are_copied_whole(model: Any, name: str) -> None:
    mask = torch.ones(2, 41, dtype=torch.long)
    mask[1, :30] = 0
    logits = []
    for is_fork in (False, True):
        cache = cache_of(model, name, sink_tokens=BLOCK)
        with torch.no_grad():
            model(ids(40), attention_mask=mask[:, :40], **{cache_kwarg(): cache})
            cache = cache.fork() if is_fork else cache
            logits.append(model(ids(1), attention_mask=mask, **{cache_kwarg(): cache}).logits)
    assert torch.equal(*logits)


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": None}, "kv_cache_dtype must be one of .* got None"),
        ({"group_size": 0}, "group_size must be a positive number of channels.* got 0; 32 is the default"),
        ({"group_size": {1: 2.5}}, r"group_size must be .* got \{1: 2.5\}"),
        ({"kv_cache_dtype": "int4_group", "group_size": 48}, "must divide the head dim, which is 16; got 48"),
        ({"group_size": {-1: 32}}, r"group_size must be .* got \{-1: 32\}"),
        ({"group_size": {"a": 32}}, r"group_size must be .* got \{'a': 32\}"),
        ({"kv_cache_dtype": "int4", "residual_length": 0}, "residual_length must be at least a block of 64"),
        ({"group_size": {3: 8}}, "group_size names layer 3, but the model has layers 0…2"),
        ({"layer_dtypes": {7: "int8"}}, "layer_dtypes names layer 7, but the model has layers 0…2"),
        ({"layer_dtypes": {0: "int3"}}, r"layer_dtypes must be .* got \{0: 'int3'\}; e.g. layer_dtypes=\{0"),
        ({"layer_dtypes": {0: "adaptive"}}, "layer_dtypes must be .* got {0: 'adaptive'}"),
        ({"layer_dtypes": {"0": "int8"}}, "layer_dtypes must be .* got {'0': 'int8'}"),
        ({"layer_dtypes": ["int8"]}, r"layer_dtypes must be .* got \['int8'\]"),
        ({"residual_length": 100}, "residual_length must be a number of whole blocks of 64 tokens, got 100"),
        ({"residual_length": -64}, "residual_length must be .* got -64"),
        ({"sink_tokens": 4}, "sink_tokens must be a number of whole blocks of 64 tokens, got 4"),
        ({"sink_tokens": True}, "sink_tokens must be .* got True"),
        ({"key_error_guard": "warn"}, "key_error_guard must be one of on, off, error, got 'warn'"),
        ({"adaptive_threshold": -1}, "adaptive_threshold must be a number of tokens, got -1"),
        ({"compile": True, "kv_cache_dtype": "int8"}, "compile=True stores K and V in the model's dtype"),
        ({"compile": True, "layer_dtypes": {0: "int8"}}, "compile=True stores K and V in the model's dtype"),
    ],
)
def test_settings_out_of_range_are_refused(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PagedCacheError, match=message):
        PagedCache(model, **options)


def test_layers_without_keys_have_no_format() -> None:
    config = Lfm2Config(num_hidden_layers=3, hidden_size=32, layer_types=["conv", "full_attention", "conv"])
    with pytest.raises(UnsupportedLayerError, match=r"layer_dtypes names layer 2, .* 'conv' .* are \[1\]"):
        PagedCache(config, layer_dtypes={1: "int8", 2: "int8"})


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 7e4])
@pytest.mark.parametrize("side", ["K", "V"])
@pytest.mark.parametrize("name", NAMES)
def test_what_has_no_scale_is_refused_by_layer_and_the_cache_is_as_it_was(
    model: Any, name: str, side: str, bad: float
) -> None:
    cache = cache_of(model, name)
    update_all(cache, *states(40))
    before = [layer.keys.clone() for layer in cache.layers]
    keys, values = states(3, seed=1)
    spoilt = {"K": keys.clone(), "V": values.clone()}
    spoilt[side][0, 1, 2, 3] = bad
    cache.update(keys, values, 0)
    with pytest.raises(UnstorableValueError, match=f"^layer 1: {side} has a NaN.*layer_dtypes={{1: 'auto'}}"):
        cache.update(spoilt["K"], spoilt["V"], 1)
    assert cache.get_seq_length() == 40
    for layer, content in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys.clone(), content)
    update_all(cache, keys, values)
    assert cache.get_seq_length() == 43
    cache.check_integrity()


def test_notes_of_a_device_are_read_a_step_later() -> None:
    faults = Faults(torch.device("cpu"), [3, 5])
    faults.check()
    faults.check()
    faults.of(5)[1] = 1
    faults.check()
    for _ in range(2):
        with pytest.raises(UnstorableValueError, match=r"^layer 5: V of an earlier step.*reset"):
            faults.check()
    twin = faults.copy()
    twin.check()
    with pytest.raises(UnstorableValueError, match=r"^layer 5"):
        twin.check()
    faults.reset()
    faults.check()
    faults.check()


def test_notes_of_a_device_stay_until_other_rows_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset alone does not drop them: while it may fail, the rows that were spoilt may come back."""
    cache = cache_of(shared_model("llama"), "int8")
    update_all(cache, *states(3))
    (group,) = cache._state.groups
    faults = group.faults[torch.device("cpu")] = Faults(torch.device("cpu"), [0, 1, 2])
    faults.of(1)[0] = 1
    update_all(cache, *states(1))
    clear = HostStates.clear

    def clear_and_fail(hosts: HostStates) -> None:
        clear(hosts)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(HostStates, "clear", clear_and_fail)
        with pytest.raises(MemoryError):
            cache.reset()
    with pytest.raises(UnstorableValueError, match=r"^layer 1: K of an earlier step"):
        update_all(cache, *states(1))
    assert cache.get_seq_length() == 4
    cache.reset()
    for _ in range(3):
        update_all(cache, *states(1))
    assert cache.get_seq_length() == 3


@pytest.mark.parametrize("kind", NAMES)
def test_bookkeeping_of_a_step_takes_as_much_however_long_rows_are(model: Any, kind: str) -> None:
    def looks(blocks: int) -> int:
        cache = cache_of(model, kind, max_tokens=BLOCK * (blocks + 10))
        update_all(cache, *states(BLOCK * blocks))
        (group,) = cache._state.groups
        update_all(cache, *states(1))
        (table,) = group.manager.tables
        table.ids = Counted(table.ids)
        Counted.looks = 0
        for step in range(2 * BLOCK):
            update_all(cache, *states(1, seed=step))
        return Counted.looks

    assert 0 < looks(200) == looks(10)
