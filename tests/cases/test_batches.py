"""Rows do not see each other, what nobody wrote, or how the prompt was cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM

from hf_paged_cache import PagedCache
from tests.support.chats import BLOCK, FAMILIES, fill, generate, paged, prompt, reference
from tests.support.models import PAD, shared_model


def _poison(cache: PagedCache, value: float) -> None:
    """Write a value wherever no token of a row is: free blocks, and the ends of open ones."""
    for group in cache._state.groups:
        tables = group.manager.tables
        used = {block for table in tables for block in table.ids}
        kept = group.dense.dense_ids(group.manager).values()
        for pool in group.pools:
            held = used if pool.records is None else set(kept)
            free = [index for index in range(pool.keys.shape[0]) if index not in held]
            for tensor in (pool.keys, pool.values):
                tensor[free] = value
            if pool.records is not None:
                pool.records[[i for i in range(pool.records.shape[0]) if i not in used]] = 0xFF
            else:
                tail = group.num_tokens % BLOCK
                for table in tables if tail else ():
                    pool.keys[table.ids[-1], :, :, tail:] = value
                    pool.values[table.ids[-1], :, :, tail:] = value


@pytest.mark.parametrize("value", [1e4, float("nan")])
@pytest.mark.parametrize("format_name", ["auto", "int8", "fp8", "k8v4", "int4", "int8_block", "int4_group"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt-oss"])
def test_what_lies_in_unused_slots_and_freed_blocks_moves_no_logit(
    name: str, format_name: str, value: float
) -> None:
    """Case 20. Poison in every slot that holds no token, again after a crop."""
    model = shared_model(name)
    clean, poisoned = (paged(name, kv_cache_dtype=format_name, max_tokens=512) for _ in range(2))
    for cache in (clean, poisoned):
        cache.activate_past_recording()
        fill(model, cache, prompt(2, 2 * BLOCK + 5))
    for step, tokens in enumerate((1, 1, 3, 20, 1)):
        _poison(poisoned, value)
        if step == 2:
            clean.crop(-9)
            poisoned.crop(-9)
            _poison(poisoned, value)
        ids = prompt(2, tokens, seed=step + 1)
        assert torch.equal(fill(model, poisoned, ids), fill(model, clean, ids)), step


def _lfm2() -> Any:
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"] * 2, pad_token_id=PAD,
    )  # fmt: skip
    model = Lfm2ForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("format_name", ["auto", "int4"])
@pytest.mark.parametrize("name", [*FAMILIES, "conv and attention"])
def test_a_reset_cache_takes_a_batch_of_any_size(name: str, format_name: str) -> None:
    """Case 22. Batches of 4, 2 and 5 rows on one cache."""
    model = _lfm2() if name == "conv and attention" else shared_model(name)
    cache = PagedCache(model, block_size=BLOCK, kv_cache_dtype=format_name)
    for rows, tokens in ((4, BLOCK - 1), (2, 2 * BLOCK), (5, BLOCK + 1)):
        ids = prompt(rows, tokens, seed=rows)
        if format_name == "auto":
            want = reference(model, ids, new=4)
        else:
            want = generate(
                model, ids, PagedCache(model, block_size=BLOCK, kv_cache_dtype=format_name), new=4
            )
        PagedCache(model)
        assert generate(model, ids, cache, new=4).tolist() == want.tolist(), rows
        assert cache.batch_size == rows
        cache.reset()
        assert cache.stats().used_blocks == 0
        cache.check_integrity()


@pytest.mark.parametrize("pads", [(0, 0), (0, 5)])
@pytest.mark.parametrize("chunk", [1, 7, 8, BLOCK, 33, 999])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_in_chunks_of_any_size_gives_the_same(name: str, chunk: int, pads: tuple[int, int]) -> None:
    """Case 23. `prefill_chunk_size`, with and without padding on the left."""
    model, ids = shared_model(name), prompt(2, 2 * BLOCK + 1)
    mask = torch.ones_like(ids)
    for row, count in enumerate(pads):
        ids[row, :count], mask[row, :count] = PAD, 0
    want = reference(model, ids, new=4, attention_mask=mask)
    got = generate(model, ids, paged(name), new=4, attention_mask=mask, prefill_chunk_size=chunk)
    assert got.tolist() == want.tolist()
