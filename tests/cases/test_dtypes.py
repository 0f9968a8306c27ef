"""What differs from the stock cache is rounding in attention, and nothing that is stored."""

from __future__ import annotations

import pytest
import torch

from hf_paged_cache import PagedCache, disable
from tests.support.chats import AT_EDGES, BLOCK, FAMILIES, fill, generate, paged, prompt, reference
from tests.support.models import host_cache, shared_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_attention_is_handed_the_same_bits_as_from_the_stock_cache(name: str, dtype: torch.dtype) -> None:
    """Case 9. With the host's own attention every logit is equal to the bit, in half precision too."""
    model = shared_model(name, dtype=dtype)
    for tokens in AT_EDGES:
        stock, cache = host_cache(model), PagedCache(model, block_size=BLOCK)
        disable(model)
        ids = prompt(2, tokens)
        assert torch.equal(fill(model, cache, ids), fill(model, stock, ids))
        for step in range(4):
            ids = prompt(2, 1 + step % 2, seed=step)
            assert torch.equal(fill(model, cache, ids), fill(model, stock, ids)), (tokens, step)


@pytest.mark.parametrize("name", FAMILIES)
def test_float32_tokens_are_those_of_a_run_without_a_cache(name: str) -> None:
    """Case 9. Rounding never shows in the tokens."""
    model, ids = shared_model(name), prompt(2, BLOCK + 1)
    want = reference(model, ids, new=6, use_cache=False)
    assert generate(model, ids, paged(name), new=6).tolist() == want.tolist()
