"""`generate` gives the same tokens with `PagedCache` as with the cache that `transformers` itself would use.

Every family of models runs through every way of generating. The reference is the unpatched model with its own
cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from hf_paged_cache import disable
from tests.models import (
    CASES,
    PAD,
    VOCAB,
    ModelCase,
    assistant_for,
    cache_kwarg,
    host_cache,
    paged_cache,
    paged_parts,
    shared_model,
)

NEW_TOKENS = 44
PROMPT_TOKENS = 37
SECOND_TURN_TOKENS = 19


def _ids(rows: int, tokens: int, seed: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def _batch(pads: tuple[int, ...], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random prompts, one row per number of pad tokens on its left."""
    ids = _ids(len(pads), PROMPT_TOKENS, seed)
    mask = torch.ones_like(ids)
    for row, count in enumerate(pads):
        ids[row, :count] = PAD
        mask[row, :count] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _repetitive() -> dict[str, torch.Tensor]:
    """One prompt that says the same again and again, so that prompt lookup finds drafts."""
    ids = _ids(1, 6, seed=3).repeat(1, 7)[:, :PROMPT_TOKENS]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@dataclass(frozen=True)
class Mode:
    """A way of generating: its inputs and the options of `generate`."""

    name: str
    inputs: Callable[[], dict[str, torch.Tensor]]
    options: dict[str, Any] = field(default_factory=dict)
    turns: int = 1
    assistant: bool = False


RAGGED = (0, 5, 18)

MODES = (
    Mode("greedy", lambda: _batch(RAGGED)),
    Mode("greedy-one-row", lambda: _batch((0,))),
    Mode("sampling", lambda: _batch(RAGGED), {"do_sample": True, "top_k": 0}),
    Mode("beams", lambda: _batch((0, 5)), {"num_beams": 4}),
    Mode("prompt-lookup", _repetitive, {"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 1}),
    Mode("assistant", lambda: _batch((0,)), assistant=True),
    Mode("assistant-padded-sampling", lambda: _batch((7,)), {"do_sample": True, "top_k": 0}, assistant=True),
    Mode("chunks-of-7", lambda: _batch((0, 0)), {"prefill_chunk_size": 7}),
    Mode("chunks-of-7-padded", lambda: _batch(RAGGED), {"prefill_chunk_size": 7}),
    Mode("chunks-of-20", lambda: _batch((0, 0)), {"prefill_chunk_size": 20}),
    Mode("chunks-of-20-padded", lambda: _batch(RAGGED), {"prefill_chunk_size": 20}),
    Mode("two-turns", lambda: _batch((0, 0)), turns=2),
    Mode("two-turns-padded", lambda: _batch(RAGGED), turns=2),
)

REFUSED_BY_HOST: dict[tuple[str, str], tuple[type[Exception], str]] = {}
"""(model, mode) -> the error with which `transformers` itself refuses it, with any cache."""


def _generate(case: ModelCase, mode: Mode, cache: Any) -> list[torch.Tensor]:
    """The sequences after each turn."""
    model = shared_model(case.name)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **mode.options, cache_kwarg(): cache}
    if mode.assistant:
        options["assistant_model"] = assistant_for(case)
    inputs = mode.inputs()
    outputs = []
    torch.manual_seed(1)
    for turn in range(mode.turns):
        if turn:
            inputs = _next_turn(case, inputs, outputs[-1])
        outputs.append(model.generate(**inputs, **options))
    return outputs


def _next_turn(
    case: ModelCase, inputs: dict[str, torch.Tensor], output: torch.Tensor
) -> dict[str, torch.Tensor]:
    """What was said so far, and a new question. An encoder-decoder gets both on the decoder's side."""
    said = torch.cat((output, _ids(len(output), SECOND_TURN_TOKENS, seed=5)), dim=1)
    if case.is_encoder_decoder:
        return inputs | {"decoder_input_ids": said}
    mask = inputs["attention_mask"]
    return {
        "input_ids": said,
        "attention_mask": torch.nn.functional.pad(mask, (0, said.shape[1] - mask.shape[1]), value=1),
    }


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tokens_equal_those_of_the_hosts_own_cache(case: ModelCase, mode: Mode) -> None:
    model = shared_model(case.name)
    disable(model)
    expected_cache = host_cache(model)
    refusal = REFUSED_BY_HOST.get((case.name, mode.name))
    if refusal is not None:
        for cache in (expected_cache, paged_cache(model)):
            with pytest.raises(refusal[0], match=refusal[1]):
                _generate(case, mode, cache)
        return
    expected = _generate(case, mode, expected_cache)

    cache = paged_cache(model)
    got = _generate(case, mode, cache)

    for turn, (want, have) in enumerate(zip(expected, got, strict=True)):
        assert have.tolist() == want.tolist(), f"turn {turn}"
    assert cache.get_seq_length() == expected_cache.get_seq_length()
    for part in paged_parts(cache):
        part.check_integrity()
