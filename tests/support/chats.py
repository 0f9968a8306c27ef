"""How people use a cache: prompts, a forward that fills it, greedy generation with one and without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessor

from hf_paged_cache import CacheMismatchError, PagedCache, disable
from tests.support.models import PAD, VOCAB, cache_kwarg, cache_kwargs, shared_model

BLOCK = 16
AT_EDGES = (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK)
"""Lengths just before, at and after the edge of a block."""

EOS = 2
"""Of chats whose rows end early; no prompt contains it."""

FAMILIES = ("llama", "mistral", "gemma3", "gpt2", "falcon-alibi", "gpt-oss")
"""Full attention, windows, both mixed, learnt positions, attention of the model's own, eager with sinks."""


def prompt(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """Random ids without pad tokens."""
    return torch.randint(PAD + 3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def paged(name: str = "llama", **settings: Any) -> PagedCache:
    """A new cache for one of the shared models."""
    return PagedCache(shared_model(name), **{"block_size": BLOCK, "group_size": 8} | settings)


def given(cache: Any) -> dict[str, Any]:
    """The cache under the name that the installed version prefers."""
    return {cache_kwarg(): cache}


def fill(model: Any, cache: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Logits of one forward."""
    with torch.no_grad():
        logits: torch.Tensor = model(ids, **given(cache), **options).logits
    return logits


def generate(model: Any, ids: torch.Tensor | None, cache: Any, new: int = 12, **options: Any) -> Any:
    """Greedy tokens, the prompt included."""
    return model.generate(**_options(ids, new, options), **given(cache))


def answer_elsewhere(answer: Any, model: Any, cache: Any, ids: torch.Tensor) -> None:
    """What a process that was spawned does: the tokens, and what the model attends with."""
    answer.put((model.config._attn_implementation, generate(model, ids, cache).tolist()))


def generate_or_refuse(model: Any, ids: torch.Tensor, cache: PagedCache, **options: Any) -> Any:
    """The same; None if the cache refuses, and is as it was.

    For what older versions of the host hand over in a way that cannot be served.
    """
    held = cache.get_seq_length()
    try:
        return generate(model, ids, cache, **options)
    except CacheMismatchError:
        assert_sound(cache, held)
        return None


def reference(model: Any, ids: torch.Tensor | None, new: int = 12, **options: Any) -> Any:
    """The same from the unpatched model, with the cache that it makes itself."""
    disable(model)
    return model.generate(**_options(ids, new, options))


def _options(ids: torch.Tensor | None, new: int, options: dict[str, Any]) -> dict[str, Any]:
    """Without a mask the host would take pad tokens in an answer for padding."""
    named = {} if ids is None else {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {"max_new_tokens": new, "do_sample": False} | named | options


class Ends(LogitsProcessor):
    """Has row i end with its `ends[i]`-th new token, and not before."""

    def __init__(self, prompt_tokens: int, ends: Sequence[int]) -> None:
        self.prompt_tokens, self.ends = prompt_tokens, ends

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, EOS] = -torch.inf
        for row, end in enumerate(self.ends):
            if input_ids.shape[1] == self.prompt_tokens + end - 1:
                scores[row] = -torch.inf
                scores[row, EOS] = 0
        return scores


Talk = dict[str, torch.Tensor]
"""`input_ids` and `attention_mask` `[rows, tokens]` of a conversation so far."""


def joined(talk: Talk, more: Talk) -> Talk:
    """A conversation with more after it."""
    return {name: torch.cat((talk[name], more[name]), 1) for name in ("input_ids", "attention_mask")}


def answered(
    model: Any, cache: Any, talk: Talk, ends: Sequence[int], *, new_ids_only: bool = False, **options: Any
) -> Talk:
    """A turn in which row i says `ends[i]` tokens; the mask hides what its row is filled up with."""
    ids = talk["input_ids"][:, cache.get_seq_length() if new_ids_only else 0 :]
    said = model.generate(
        input_ids=ids,
        attention_mask=talk["attention_mask"],
        **{"max_new_tokens": max(ends), "do_sample": False, "eos_token_id": EOS, "pad_token_id": PAD},
        logits_processor=[Ends(ids.shape[1], ends)],
        **options,
        **given(cache),
    )
    answer = said[:, ids.shape[1] :]
    heard = torch.arange(answer.shape[1]) < torch.tensor(ends)[:, None]
    return joined(talk, {"input_ids": answer, "attention_mask": heard.long()})


def assert_sound(cache: PagedCache, tokens: int) -> None:
    """So many tokens in every row, and no block lost."""
    assert cache.get_seq_length() == tokens
    cache.check_integrity()


def is_newest() -> bool:
    """Whether the installed transformers is of the newer end of the supported range."""
    return len(cache_kwargs()) > 1
