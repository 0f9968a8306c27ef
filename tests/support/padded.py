"""Batches of prompts that are padded on the left."""

from __future__ import annotations

from typing import Any

import torch

from hf_paged_cache import PagedCache, disable
from tests.support.models import CASES, PAD, VOCAB, cache_kwarg, host_cache, shared_model

BLOCK = 16
DECODERS = [case.name for case in CASES if not case.is_encoder_decoder]


def llama(dtype: torch.dtype = torch.float32) -> Any:
    """The smallest model of `tests.support.models`."""
    return shared_model("llama", dtype=dtype)


def prompt(tokens: int, seed: int = 0) -> torch.Tensor:
    """Random ids `[tokens]`, none of them padding."""
    return torch.randint(3, VOCAB, (tokens,), generator=torch.Generator().manual_seed(seed))


def left_padded(prompts: list[torch.Tensor], width: int = 0) -> dict[str, torch.Tensor]:
    """Ids and mask `[rows, width]`, as a tokenizer gives them; at least as wide as the longest prompt."""
    width = max(width, *map(len, prompts))
    ids = torch.full((len(prompts), width), PAD)
    mask = torch.zeros_like(ids)
    for row, one in enumerate(prompts):
        ids[row, width - len(one) :], mask[row, width - len(one) :] = one, 1
    return {"input_ids": ids, "attention_mask": mask}


def ragged(*lengths: int, width: int = 0, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random prompts of these lengths."""
    return left_padded([prompt(n, seed + row) for row, n in enumerate(lengths)], width)


def positions(mask: torch.Tensor) -> torch.Tensor:
    """As `generate` counts them."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def fill(model: Any, cache: Any, inputs: dict[str, torch.Tensor], **kwargs: Any) -> torch.Tensor:
    """One forward; returns its logits."""
    with torch.no_grad():
        logits: torch.Tensor = model(**inputs, **kwargs, **{cache_kwarg(): cache}).logits
    return logits


def generate(model: Any, cache: Any, inputs: dict[str, torch.Tensor], tokens: int = 20, **kw: Any) -> Any:
    """Greedy tokens, all that is said."""
    options = {"max_new_tokens": tokens, "do_sample": False} | kw
    return model.generate(**inputs, **options, **{cache_kwarg(): cache})


def alone(model: Any, one: torch.Tensor, tokens: int = 20) -> list[int]:
    """What the unpatched model says to one prompt without padding."""
    disable(model)
    said = generate(model, host_cache(model), left_padded([one]), tokens)
    return [int(token) for token in said[0, len(one) :]]


def extended(
    inputs: dict[str, torch.Tensor], said: torch.Tensor, more: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The next turn: all that was said, and more ids `[rows, tokens]`."""
    ids = torch.cat((said, more), 1)
    mask = inputs["attention_mask"]
    mask = torch.cat((mask, mask.new_ones(len(mask), ids.shape[1] - mask.shape[1])), 1)
    return {"input_ids": ids, "attention_mask": mask}


def stored_columns(cache: PagedCache) -> list[list[bool]]:
    """Of every row of the first group, which blocks are stored."""
    return [[block_id >= 0 for block_id in table.ids] for table in cache._state.groups[0].manager.tables]
