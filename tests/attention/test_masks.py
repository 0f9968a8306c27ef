"""Masks that the host would make for itself."""

from __future__ import annotations

import pytest
import torch
from transformers import masking_utils

from hf_paged_cache import PagedCache
from tests.support.models import BLOCK_SIZE, cache_kwarg, shared_model


@pytest.mark.parametrize("tokens", [3, 20], ids=["inside_the_window", "beyond_the_window"])
@pytest.mark.parametrize("make", ["create_causal_mask", "create_sliding_window_causal_mask"])
def test_mask_of_a_decode_step_asks_the_device_nothing(make: str, tokens: int) -> None:
    model = shared_model("mistral" if "sliding" in make else "llama")
    cache = PagedCache(model, block_size=BLOCK_SIZE)
    with torch.no_grad():
        model(torch.full((2, tokens), 5), **{cache_kwarg(): cache})
    # What a tensor on the meta device holds cannot be asked for.
    mask = getattr(masking_utils, make)(
        config=model.config,
        inputs_embeds=torch.empty(2, 1, 0, device="meta"),
        attention_mask=torch.ones(2, tokens + 1, device="meta"),
        **{cache_kwarg(): cache},
    )
    assert mask.shape[0] == 2
    assert mask.shape[-2:] == (1, min(tokens + 1, 8) if "sliding" in make else tokens + 1)
