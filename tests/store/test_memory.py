"""What a cache allocates, and when."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)
from transformers.cache_utils import Cache

from hf_paged_cache import PagedCache, disable
from hf_paged_cache.config import PagedCacheConfig
from tests.support.models import cache_kwarg

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
}


def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def gemma2() -> PreTrainedModel:
    """Eager, soft-capped, with window layers: the host would make a float mask at every step."""
    torch.manual_seed(0)
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, sliding_window=32, attn_implementation="eager")).eval()


class AllocatedBytes(TorchDispatchMode):
    """Counts the bytes of new storages that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if type(leaf) is torch.Tensor or type(leaf) is torch.nn.Parameter
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if type(leaf) is torch.Tensor and leaf.untyped_storage().data_ptr() not in before:
                self.total += leaf.untyped_storage().nbytes()
        return result


def bytes_per_step(model: PreTrainedModel, cache: Cache, steps: int, **kwargs: Any) -> list[int]:
    """Bytes that each of some decode steps allocates after a prompt of 40 tokens."""
    counts = []
    with torch.no_grad():
        model(torch.full((2, 40), 5), past_key_values=cache, **{k: v(40) for k, v in kwargs.items()})
        token = torch.full((2, 1), 7)
        for step in range(steps):
            given = {k: v(41 + step) for k, v in kwargs.items()}
            with AllocatedBytes() as allocated:
                model(token, past_key_values=cache, **given)
            counts.append(allocated.total)
    return counts


@pytest.mark.parametrize("build", [llama, gemma2])
def test_a_decode_step_allocates_the_same_at_every_length(build: Callable[[], PreTrainedModel]) -> None:
    model = build()
    cache = PagedCache(model, block_size=16)
    counts = bytes_per_step(model, cache, 110)  # over the edges of blocks, and past eight of them
    # Window layers reach their window, and eager attention is compared with the kernel once, in the first
    # steps.
    assert len(set(counts[40:])) == 1
    disable(model)
    stock = bytes_per_step(model, DynamicCache(config=model.config), 110)
    assert stock[-1] > stock[40]
    assert counts[-1] < stock[-1]


def test_padding_costs_a_decode_step_no_more_than_the_hosts_own_copy_of_the_mask() -> None:
    def padded(length: int) -> torch.Tensor:
        mask = torch.ones(2, length, dtype=torch.long)
        mask[0, :7] = 0
        return mask

    model = llama()
    counts = bytes_per_step(model, PagedCache(model, block_size=16), 100, attention_mask=padded)
    # The host turns the 2-D mask into booleans: one byte per row and token.
    assert counts[-1] - counts[9] <= 90 * 2


def test_pools_are_allocated_once() -> None:
    model = llama()
    cache = PagedCache(model, block_size=16)
    with torch.no_grad():
        model(torch.full((2, 40), 5), past_key_values=cache)
        pool = cache._state.groups[0].pools[0]
        addresses = pool.keys.data_ptr(), pool.values.data_ptr()
        for _ in range(100):
            model(torch.full((2, 1), 7), past_key_values=cache)
    assert len(cache._state.groups[0].pools) == 1
    assert (pool.keys.data_ptr(), pool.values.data_ptr()) == addresses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_footprint_is_exact(dtype: torch.dtype) -> None:
    layers, heads, dim = 3, 2, 16
    cache = PagedCache(LlamaConfig(**SIZES), block_size=32, max_tokens=1000)
    keys = torch.randn(2, heads, 33, dim).to(dtype)
    for layer in range(layers):
        cache.update(keys, keys, layer)
    found = cache.memory_footprint()
    blocks = 33  # 1000 tokens in blocks of 32, and what two rows can leave unused in their last ones
    per_block = 2 * layers * heads * dim * dtype.itemsize * 32
    assert cache.stats().num_blocks == blocks
    assert found.pool_bytes == per_block * blocks
    assert found.used_bytes == per_block * 4  # two rows of two blocks
    assert found.table_bytes == 2 * 32 * 4
    assert found.host_bytes == 0
    assert found.total_bytes == found.pool_bytes + found.table_bytes + found.scratch_bytes


def test_default_capacity_is_the_models_length_for_every_row() -> None:
    cache = PagedCache(LlamaConfig(**SIZES), block_size=64)
    keys = torch.zeros(3, 2, 1, 16)
    for layer in range(3):
        cache.update(keys, keys, layer)
    assert cache.stats().num_blocks == 3 * 1024 // 64


def test_default_capacity_is_cut_to_the_share_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    per_block = 2 * 3 * 2 * 16 * 4 * 64
    monkeypatch.setattr("hf_paged_cache.store.capacity.free_memory_bytes", lambda device: 10 * per_block)
    cache = PagedCache(LlamaConfig(**SIZES), block_size=64, gpu_memory_utilization=0.5)
    keys = torch.zeros(3, 2, 1, 16)
    for layer in range(3):
        cache.update(keys, keys, layer)
    assert cache.stats().num_blocks == 5
    assert cache.memory_footprint().pool_bytes == 5 * per_block


@pytest.fixture
def taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory costs when it is allocated, as on a GPU."""
    monkeypatch.setattr("hf_paged_cache.store.capacity._is_taken_at_once", lambda device: True)


@pytest.mark.usefixtures("taken_at_once")
def test_where_memory_is_taken_at_once_a_pool_has_what_generate_says_it_will_use() -> None:
    model = llama()
    cache = PagedCache(model, block_size=16)

    def generate(cache: PagedCache, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        given = {cache_kwarg(): cache, "attention_mask": torch.ones_like(ids), "do_sample": False}
        out: torch.Tensor = model.generate(ids, **given, eos_token_id=None, **options)
        return out

    ids = torch.full((2, 40), 5)
    for new, tokens in ((30, 70), (5, 75), (400, 475)):  # the last is a later, longer turn
        ids = generate(cache, ids, max_new_tokens=new)
        assert cache.stats().num_blocks == 2 * -(-tokens // 16)
    beams = PagedCache(model, block_size=16)
    generate(beams, ids[:, :40], max_length=100, num_beams=3)
    assert beams.stats().num_blocks == 6 * -(-100 // 16)


@pytest.mark.usefixtures("taken_at_once")
def test_where_memory_is_taken_at_once_a_plain_forward_gets_its_prompt_and_a_reserve() -> None:
    cache = PagedCache(LlamaConfig(**SIZES), block_size=64)
    keys = torch.zeros(3, 2, 100, 16)
    for layer in range(3):
        cache.update(keys, keys, layer)
    assert cache.stats().num_blocks == 3 * -(-(100 + 256) // 64)
    for layer in range(3):
        cache.update(torch.zeros(3, 2, 800, 16), torch.zeros(3, 2, 800, 16), layer)
    assert cache.stats().num_blocks <= 3 * 1024 // 64
    cache.reset()
    explicit = PagedCache(LlamaConfig(**SIZES), block_size=64, max_tokens=640)
    explicit.update(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), 0)
    assert explicit.stats().num_blocks == 10


def test_blocks_of_a_short_window_are_as_large_as_may_be() -> None:
    for size in (16, 32, 64, 128, 256):
        config = PagedCacheConfig(block_size=size)
        assert config.block_size_of(None) == size
        for window in range(1, 5000):
            chosen, kept = config.block_size_of(window), window - 1

            def held(of: int, kept: int = kept) -> int:
                return (-(-kept // of) + 1) * of

            assert chosen == 16 or held(chosen) <= 1.15 * kept or not kept
            assert window < 128 or (window % 16 and window < 214) or held(chosen) <= 1.15 * kept
            assert chosen == size or held(2 * chosen) > 1.15 * kept


@pytest.mark.parametrize(("window", "block_size"), [(128, 64), (256, 32), (200, 16), (256, 256), (500, 64)])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int4"])
def test_a_window_is_held_once_at_decode(window: int, block_size: int, kv_cache_dtype: str) -> None:
    torch.manual_seed(0)
    sizes = SIZES | {"num_hidden_layers": 2, "sliding_window": window}
    model = MistralForCausalLM(MistralConfig(**sizes)).eval()
    settings = {"kv_cache_dtype": kv_cache_dtype, "block_size": block_size, "key_error_guard": "off"}
    cache, stock = PagedCache(model, **settings), DynamicCache(config=model.config)

    def step(tokens: int) -> tuple[int, int]:
        ids = torch.randint(3, 90, (2, tokens))
        with torch.no_grad():
            got, want = (model(ids, past_key_values=c, use_cache=True).logits for c in (cache, stock))
        if kv_cache_dtype == "auto":
            torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
        cache.check_integrity()
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in stock.layers)
        return cache.memory_footprint().pool_bytes, held

    first, held = step(window + 50)
    assert kv_cache_dtype != "auto" or first <= 1.15 * held
    assert {group.block_size for group in cache.stats().groups} == {cache._state.config.block_size_of(window)}
    step(1)
    during, _ = step(window // 2)  # the old window is read while the new one is written
    assert during > first
    assert step(1)[0] == first


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pool_memory_that_was_never_written_is_not_resident() -> None:
    config = LlamaConfig(num_hidden_layers=4, hidden_size=512, num_attention_heads=8, num_key_value_heads=8)
    keys = torch.zeros(1, 8, 64, 64)
    PagedCache(config, max_tokens=65536).update(keys, keys, 0)  # whatever is loaded and compiled once
    cache = PagedCache(config, max_tokens=65536)
    before = _resident_kib()
    for layer in range(4):
        cache.update(keys, keys, layer)
    grown_kib = _resident_kib() - before
    assert cache.memory_footprint().pool_bytes == 1 << 30
    # One block in use is 1 MiB; huge pages round K and V up to 2 MiB each, and the rest is slack for the
    # allocator.
    assert grown_kib < 16 * 1024


def _resident_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])
