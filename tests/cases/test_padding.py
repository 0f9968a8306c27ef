"""What people reported of padded batches, as tests. Row numbers are those of the table of cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged_cache import PagedCache, disable
from hf_paged_cache.errors import CacheMismatchError
from hf_paged_cache.formats import FORMATS
from tests.support.models import CASES, PAD, host_cache, shared_model
from tests.support.padded import BLOCK, alone, extended, fill, generate, left_padded, positions, prompt
from tests.support.quantized import cache_of

DECODERS = [case.name for case in CASES if not case.is_encoder_decoder]
ALL = ("auto", *FORMATS)


def _with_suffixes(prefix: dict[str, torch.Tensor], suffixes: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A prefix for each row, and after it suffixes that are padded on their left."""
    after = left_padded(suffixes)
    return {key: torch.cat((prefix[key], after[key]), 1) for key in prefix}


def _new(said: torch.Tensor, inputs: dict[str, torch.Tensor]) -> list[list[int]]:
    return [row.tolist() for row in said[:, inputs["input_ids"].shape[1] :]]


def _counts_pads(model: Any) -> bool:
    """Whether rows differ from single runs with the host's own cache, too: windows and ALiBi count pads."""
    config = model.config
    types = getattr(config, "layer_types", None) or ()
    return bool("sliding_attention" in types or getattr(config, "alibi", False) or _has_window_only(config))


def _has_window_only(config: Any) -> bool:
    return config.model_type == "mistral"


@pytest.mark.parametrize("tokens", [6, 15, 16, 17, 33])
@pytest.mark.parametrize("name", DECODERS)
def test_ragged_suffixes_after_a_shared_prefix_are_rows_of_their_own(name: str, tokens: int) -> None:
    """Case 14. Pads lie between prefix and suffix."""
    model, shared = shared_model(name), prompt(tokens, seed=1)
    suffixes = [prompt(2, seed=2), prompt(5, seed=3)]
    expected = [alone(model, torch.cat((shared, suffix))) for suffix in suffixes]
    inputs = _with_suffixes(left_padded([shared, shared]), suffixes)
    disable(model)
    theirs = host_cache(model)
    fill(model, theirs, left_padded([shared]))
    theirs.batch_repeat_interleave(2)
    by_host = _new(generate(model, theirs, inputs), inputs)

    cache = PagedCache(model, block_size=BLOCK)
    fill(model, cache, left_padded([shared]))
    stored = cache.stats().used_blocks
    cache.batch_repeat_interleave(2)
    assert cache.stats().used_blocks == stored
    got = _new(generate(model, cache, inputs), inputs)

    assert got == by_host
    if not _counts_pads(model):
        assert got == expected
    cache.check_integrity()


@pytest.mark.parametrize("name", ALL)
def test_ragged_suffixes_in_every_format(name: str) -> None:
    """Case 14. Each row stores what it stores alone, so a prefix of whole blocks gives the same tokens."""
    model, shared = shared_model("llama"), prompt(32, seed=1)
    suffixes = [prompt(2, seed=2), prompt(5, seed=3)]
    inputs = _with_suffixes(left_padded([shared, shared]), suffixes)
    cache = cache_of(model, name, key_error_guard="off")
    fill(model, cache, left_padded([shared]))
    cache.batch_repeat_interleave(2)
    got = _new(generate(model, cache, inputs), inputs)
    for row, suffix in enumerate(suffixes):
        single = cache_of(model, name, key_error_guard="off")
        one = _with_suffixes(left_padded([shared]), [suffix])
        fill(model, single, left_padded([shared]))
        said = _new(generate(model, single, one), one)[0]
        if name in ("auto", "int8", "fp8", "k8v4") or len(suffix) == 5:
            assert got[row] == said, "pads lie in the block that is filled next, whose scales they share"
        assert len(got[row]) == 20
    cache.check_integrity()


@pytest.mark.parametrize("lengths", [(6, 3), (40, 20), (33, 1), (20, 40)])
@pytest.mark.parametrize("name", DECODERS)
def test_a_left_padded_prefix_goes_on_with_ragged_suffixes(name: str, lengths: tuple[int, int]) -> None:
    """Case 14. With positions of its mask it is right, without them it is refused."""
    model = shared_model(name)
    prefixes = [prompt(n, seed=row) for row, n in enumerate(lengths)]
    prefix = left_padded(prefixes)
    suffixes = [prompt(2, seed=2), prompt(5, seed=3)]
    inputs = _with_suffixes(prefix, suffixes)
    disable(model)
    theirs = host_cache(model)
    fill(model, theirs, prefix, position_ids=positions(prefix["attention_mask"]))
    by_host = _new(generate(model, theirs, inputs), inputs)
    expected = [alone(model, torch.cat(pair)) for pair in zip(prefixes, suffixes, strict=True)]

    cache = PagedCache(model, block_size=BLOCK)
    fill(model, cache, prefix, position_ids=positions(prefix["attention_mask"]))
    got = _new(generate(model, cache, inputs), inputs)
    assert got == by_host
    if not _counts_pads(model):
        assert got == expected

    cache.reset()
    fill(model, cache, prefix)
    if name == "falcon-alibi":  # nothing asks for positions there
        return
    with pytest.raises(CacheMismatchError, match="position_ids: row"):
        generate(model, cache, inputs)


@pytest.mark.parametrize("name", DECODERS)
def test_padded_rows_are_those_of_single_runs_in_both_turns(name: str) -> None:
    """Case 15. Rows of 5, 9 and 40 tokens; falcon's alibi is within rounding of its own."""
    model = shared_model(name)
    prompts = [prompt(n, seed=n) for n in (5, 9, 40)]
    more = torch.stack([prompt(7, seed=row) for row in range(3)])
    inputs, cache = left_padded(prompts), PagedCache(model, block_size=BLOCK)
    first = generate(model, cache, inputs)
    turn = extended(inputs, first, more)
    second = generate(model, cache, turn)
    for row, one in enumerate(prompts):
        said = alone(model, one)
        assert _new(first, inputs)[row] == said
        talk = torch.cat((one, torch.tensor(said), more[row]))
        assert _new(second, turn)[row] == alone(model, talk)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_a_row_does_not_depend_on_its_neighbours(name: str) -> None:
    """Case 17."""
    model, one = shared_model(name), prompt(11, seed=1)
    expected = alone(model, one)
    for others in ((3,), (11, 30), (40, 17, 2, 64)):
        prompts = [one, *(prompt(n, seed=n) for n in others)]
        inputs = left_padded(prompts)
        said = generate(model, PagedCache(model, block_size=BLOCK), inputs)
        assert _new(said, inputs)[0] == expected


def _hand_made(
    model: Any, cache: PagedCache, inputs: dict[str, torch.Tensor], tokens: int
) -> list[list[int]]:
    """Greedy tokens of rows in a cache that holds all but the last token of their prompts."""
    said = inputs
    for _ in range(tokens):
        mask = said["attention_mask"]
        step = {"input_ids": said["input_ids"][:, -1:], "attention_mask": mask}
        logits = fill(model, cache, step, position_ids=positions(mask)[:, -1:])
        said = extended(said, said["input_ids"], logits[:, -1].argmax(-1, keepdim=True))
    return _new(said["input_ids"], inputs)


@pytest.mark.parametrize("name", ALL)
def test_rows_go_on_when_the_longest_is_dropped(name: str) -> None:
    """Case 19. The two that stay go on for 20 tokens, as single runs from the same stored blocks do."""
    model = shared_model("llama")
    prompts = [prompt(n, seed=n) for n in (60, 20, 5)]
    inputs = left_padded(prompts)
    held = {key: x[:, :-1] for key, x in inputs.items()}
    where = positions(held["attention_mask"])
    cache = cache_of(model, name, key_error_guard="off")
    fill(model, cache, held, position_ids=where)
    cache.batch_select_indices(torch.tensor([1, 2]))
    got = _hand_made(model, cache, {key: x[1:] for key, x in inputs.items()}, 20)
    cache.check_integrity()
    for row in (1, 2):
        single = cache_of(model, name, key_error_guard="off")
        fill(model, single, {key: x[[row]] for key, x in held.items()}, position_ids=where[[row]])
        assert got[row - 1] == _hand_made(model, single, {key: x[[row]] for key, x in inputs.items()}, 20)[0]
        if name == "auto":
            assert got[row - 1] == alone(model, prompts[row])


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "mistral", "gemma3", "falcon"])
def test_rows_that_end_around_a_blocks_edge(name: str) -> None:
    """Case 21."""
    model = shared_model(name)
    prompts = [prompt(n, seed=n) for n in (1, 15, 16, 17, 33)]
    inputs, cache = left_padded(prompts), PagedCache(model, block_size=BLOCK)
    said = _new(generate(model, cache, inputs), inputs)
    for row, one in enumerate(prompts):
        assert said[row] == alone(model, one), f"{len(one)} tokens"
    cache.check_integrity()


def test_the_prompts_of_these_tests_hold_no_padding() -> None:
    assert not any((prompt(64, seed=seed) == PAD).any() for seed in range(70))
