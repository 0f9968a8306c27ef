"""A cache that lives through several turns of a chat, and is cropped, says what a fresh run over it says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given as hypothesis_given
from hypothesis import settings
from hypothesis import strategies as st

from hf_paged_cache import CacheMismatchError, PagedCache, disable
from hf_paged_cache.formats import FORMATS
from tests.support import padded
from tests.support.chats import (
    AT_EDGES,
    BLOCK,
    EOS,
    FAMILIES,
    Talk,
    answered,
    assert_sound,
    fill,
    generate,
    given,
    is_newest,
    joined,
    paged,
    prompt,
    reference,
)
from tests.support.error_bounds import error_bound
from tests.support.models import cache_kwargs, host_cache, shared_model
from tests.support.padded import left_padded, positions
from tests.support.quantized import cache_of, states, update_all

CHATS = [("llama", size, size + past) for size in (16, 64) for past in (-1, 0, 1, size)] + [
    (name, BLOCK, BLOCK + 1) for name in FAMILIES
]


@pytest.mark.parametrize(("name", "block_size", "tokens"), CHATS)
def test_the_chat_loop_of_the_docs_runs(name: str, block_size: int, tokens: int) -> None:
    """Case 1. Whole conversations go in, turn by turn."""
    model = shared_model(name)
    cache, said = paged(name, block_size=block_size), prompt(1, tokens)
    for turn in range(3):
        want = reference(model, said, new=8)
        got = generate(model, said, cache, new=8)
        assert got.tolist() == want.tolist(), turn
        assert_sound(cache, got.shape[1] - 1)
        said = torch.cat((got, prompt(1, 5, seed=turn + 1)), dim=1)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tokens", AT_EDGES)
def test_an_answer_rendered_anew_is_right_after_a_crop_to_what_is_common(name: str, tokens: int) -> None:
    """Case 1. The chat template leaves out the end of the answer."""
    model, cache = shared_model(name), paged(name)
    cache.activate_past_recording()
    said = generate(model, prompt(1, tokens), cache)
    rendered = torch.cat((said[:, :-3], prompt(1, 5, seed=2)), dim=1)
    cache.crop(-2)  # the last token of the answer was never fed
    assert generate(model, rendered, cache, new=6).tolist() == reference(model, rendered, new=6).tolist()
    cache.check_integrity()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tokens", AT_EDGES)
def test_new_ids_alone_are_right_with_the_mask_of_all_and_refused_without(name: str, tokens: int) -> None:
    """Case 2. Nothing but the new ids is passed."""
    model, cache = shared_model(name), paged(name)
    said = torch.cat((generate(model, prompt(1, tokens), cache), prompt(1, 5, seed=2)), dim=1)
    want, held = reference(model, said), cache.get_seq_length()
    tail = said[:, held:]
    PagedCache(model)  # switches paged attention on again
    with pytest.raises(
        CacheMismatchError,
        match=r"another text than what is cached|prompt has 6 tokens, but the cache already holds",
    ):
        generate(model, tail, cache, attention_mask=None)
    assert_sound(cache, held)
    got = generate(model, tail, cache, attention_mask=torch.ones_like(said))
    assert got[:, tail.shape[1] :].tolist() == want[:, said.shape[1] :].tolist()
    assert_sound(cache, want.shape[1] - 1)


@pytest.mark.parametrize("format_name", ["auto", "int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon-alibi"])
def test_a_cache_rebuilt_from_keys_and_values_goes_on_with_the_mask_of_all(
    name: str, format_name: str
) -> None:
    """Case 4. Somebody hands over the K and V of another cache."""
    model = shared_model(name)
    for tokens in AT_EDGES:
        ids = prompt(2, tokens + 1)
        source, rebuilt = paged(name, kv_cache_dtype=format_name), paged(name)
        fill(model, source, ids[:, :-1])
        for index, layer in enumerate(source.layers):
            rebuilt.update(layer.keys, layer.values, index)
        mask = torch.ones_like(ids)
        got = fill(model, rebuilt, ids[:, -1:], attention_mask=mask)
        if format_name == "auto":
            want = fill(model, None, ids)[:, -1:]
        else:  # in bits the new token is stored as bytes too
            unquantized = paged(name)
            fill(model, unquantized, ids[:, :-1])
            want = fill(model, unquantized, ids[:, -1:])
        assert (got - want).abs().max() <= (1e-4 if format_name == "auto" else 0.15) * want.abs().max()
        assert_sound(rebuilt, tokens + 1)


@pytest.mark.parametrize("attribute", cache_kwargs())
@pytest.mark.parametrize("name", FAMILIES)
def test_the_cache_that_generate_returns_serves_the_next_turn(name: str, attribute: str) -> None:
    """Case 5. Under every name that the output has."""
    model, cache = shared_model(name), paged(name)
    out = generate(model, prompt(1, 9), cache, return_dict_in_generate=True)
    assert getattr(out, attribute) is cache
    said = torch.cat((out.sequences, prompt(1, 5, seed=2)), dim=1)
    want = reference(model, said)
    assert generate(model, said, getattr(out, attribute)).tolist() == want.tolist()


def test_a_prompt_in_two_parts_ends_in_the_logits_of_one_wherever_it_is_split() -> None:
    """Case 8. Several new tokens on a warm cache."""
    model, ids = shared_model("llama"), prompt(1, 40)
    want = fill(model, None, ids, use_cache=False)[:, -1]
    for split in range(1, 40):
        cache = paged()
        fill(model, cache, ids[:, :split])
        got = fill(model, cache, ids[:, split:])[:, -1]
        assert (got - want).abs().max() <= 2e-4 * want.abs().max(), split


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_in_two_parts_ends_in_the_logits_of_one(name: str, block_size: int) -> None:
    """Case 8. In every family."""
    model, ids = shared_model(name), prompt(1, 40)
    want = fill(model, None, ids, use_cache=False)[:, -1]
    for split in (*AT_EDGES, 1, 7, 8, 9, 39):
        cache = paged(name, block_size=block_size)
        fill(model, cache, ids[:, :split])
        got = fill(model, cache, ids[:, split:])[:, -1]
        assert (got - want).abs().max() <= 2e-4 * want.abs().max(), split


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tokens", [9, 16])
def test_embeddings_instead_of_ids_give_the_same_in_both_turns(name: str, tokens: int) -> None:
    """Case 10. `inputs_embeds` with a cache."""
    model, cache = shared_model(name), paged(name)
    embed = model.get_input_embeddings()
    first = prompt(1, tokens)
    want = reference(model, None, inputs_embeds=embed(first))
    got = generate(model, None, paged(name), inputs_embeds=embed(first))
    assert got.tolist() == want.tolist()

    said = torch.cat((generate(model, first, cache), prompt(1, 5, seed=2)), dim=1)
    want = reference(model, None, inputs_embeds=embed(said))
    assert generate(model, None, cache, inputs_embeds=embed(said)).tolist() == want.tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_cache_that_was_passed_is_the_one_that_is_filled_and_returned(name: str) -> None:
    """Case 11. Five hand-written steps say what `generate` says."""
    model, cache, ids = shared_model(name), paged(name), prompt(1, 9)
    want = reference(model, ids, new=5)
    PagedCache(model)
    said = ids
    for step in range(5):
        with torch.no_grad():
            out = model(said[:, -1:] if step else ids, **given(cache), use_cache=True)
        assert out.past_key_values is cache
        assert_sound(cache, 9 + step)
        said = torch.cat((said, out.logits[:, -1:].argmax(-1)), dim=1)
    assert said.tolist() == want.tolist()


# --- rows that end before the others ------------------------------------------------------------------------


def _ragged(*lengths: int, seed: int = 0) -> Talk:
    return left_padded([padded.prompt(n, seed + row) for row, n in enumerate(lengths)])


START = _ragged(24, 18, 3)
ENDS = [(12, 4, 7), (1, 6, 3), (5, 5, 2)]
MORE = [_ragged(5, 5, 5, seed=10), _ragged(2, 6, 1, seed=20)]


def _chat(model: Any, cache: Any, again: Callable[[Any], Any], **options: Any) -> list[list[list[int]]]:
    """What three turns say, row by row; `again` gives the cache for the next turn."""
    talk = answered(model, cache, START, ENDS[0], **options)
    turns = [talk["input_ids"].tolist()]
    for more, ends in zip(MORE, ENDS[1:], strict=True):
        cache = again(cache)
        talk = answered(model, cache, joined(talk, more), ends, **options)
        turns.append(talk["input_ids"][:, -max(ends) :].tolist())
    return turns


def _reloaded(cache: PagedCache) -> PagedCache:
    other = paged()
    other.load_state_dict(cache.state_dict())
    return other


@pytest.mark.parametrize(
    ("name", "again", "options"),
    [
        *((name, lambda cache: cache, {}) for name in (*FAMILIES, "falcon")),
        ("llama", lambda cache: cache, {"prefill_chunk_size": 4}),
        ("llama", PagedCache.fork, {}),
        ("llama", copy.deepcopy, {}),
        ("llama", _reloaded, {}),
    ],
)
def test_rows_that_ended_early_go_on(
    name: str, again: Callable[[PagedCache], PagedCache], options: dict[str, Any]
) -> None:
    model = shared_model(name)
    disable(model)
    want = _chat(model, host_cache(model), lambda _: host_cache(model))
    if options and not is_newest():  # fed in chunks, the whole text would go in once more
        with pytest.raises(CacheMismatchError, match="attention_mask covers 4 tokens"):
            _chat(model, paged(name), again, **options)
        return
    assert _chat(model, paged(name), again, **options) == want
    if not options:
        assert _chat(model, paged(name), again, new_ids_only=True)[1:] == want[1:]


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}], ids=str
)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_rows_that_ended_early_go_on_as_several(name: str, options: dict[str, Any]) -> None:
    model, said = shared_model(name), []
    disable(model)
    for cache in (host_cache(model), paged(name)):
        talk = joined(answered(model, cache, START, ENDS[0]), MORE[0])
        cache.batch_repeat_interleave(3)
        torch.manual_seed(0)
        said.append(padded.generate(model, cache, talk, tokens=6, eos_token_id=None, **options).tolist())
    assert said[1] == said[0]


def _assert_as_alone(model: Any, new: Callable[[], Any], turns: list[tuple[Talk, Talk]], ends: Any) -> None:
    """Each row says what it says when its tokens are fed alone, the filler too.

    Args:
        model: The model.
        new: Makes a cache.
        turns: Of every turn, what was there and what was there after it.
        ends: Of every turn and row, how many tokens it says.
    """
    for row in range(len(turns[0][0]["input_ids"])):
        cache = new()
        for (before, after), counts in zip(turns, ends, strict=True):
            ids, mask, length = (
                after["input_ids"][[row]],
                before["attention_mask"][[row]],
                mask_length(before),
            )
            mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - length), value=1)
            where, held = positions(mask) * mask, cache.get_seq_length()  # as `generate` counts
            for start, end in ((held, length), *((n, n + 1) for n in range(length, ids.shape[1] - 1))):
                fed = {"input_ids": ids[:, start:end], "attention_mask": mask[:, :end]}
                logits = padded.fill(model, cache, fed, position_ids=where[:, start:end])[0, -1]
                logits[EOS] = -torch.inf
                if end < length + counts[row] - 1:
                    assert logits.argmax() == ids[0, end], (row, end)


def mask_length(talk: Talk) -> int:
    return talk["attention_mask"].shape[1]


@pytest.mark.parametrize("format_name", ["auto", *FORMATS])
def test_rows_that_ended_early_are_as_alone_in_every_format(format_name: str) -> None:
    _talk_as_alone(format_name, START, MORE, ENDS)


def _talk_as_alone(format_name: str, start: Talk, more: list[Talk], ends: Any) -> None:
    model = padded.llama()

    def new() -> PagedCache:
        return cache_of(model, format_name, key_error_guard="off")

    cache, talk, turns = new(), start, []
    for turn, counts in enumerate(ends):
        before = joined(talk, more[turn - 1]) if turn else start
        talk = answered(model, cache, before, counts)
        turns.append((before, talk))
        cache.check_integrity()
    _assert_as_alone(model, new, turns, ends)
    if format_name == "auto":
        disable(model)
        _assert_as_alone(model, lambda: host_cache(model), turns, ends)
        for row in range(len(start["input_ids"])):  # and where there never was any filler
            for (before, after), counts in zip(turns, ends, strict=True):
                one = before["input_ids"][row][before["attention_mask"][row].bool()]
                said = answered(model, host_cache(model), left_padded([one]), [counts[row]])["input_ids"]
                assert (
                    said[0, -counts[row] :].tolist()
                    == after["input_ids"][row, mask_length(before) :][: counts[row]].tolist()
                )


@settings(max_examples=6, deadline=None)
@hypothesis_given(data=st.data())
def test_batches_of_any_padding_and_any_ends_are_as_alone(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 3), label="rows")

    def draw(least: int, most: int, label: str) -> list[int]:
        return data.draw(st.lists(st.integers(least, most), min_size=rows, max_size=rows), label=label)

    format_name = data.draw(st.sampled_from(["auto", *FORMATS]), label="format_name")
    start = _ragged(*draw(1, 40, "prompt"))
    more = [_ragged(*draw(1, 6, "more"), seed=10 * turn) for turn in (1, 2)]
    _talk_as_alone(format_name, start, more, [draw(1, 6, "ends") for _ in range(3)])


# --- what is cropped is gone, from the tokens and from everything that is kept beside them ------------------

TOKENS = 2 * BLOCK + 4
REMOVED = (0, 3, 4, 5, BLOCK, BLOCK + 4, TOKENS, TOKENS + 5)


@pytest.mark.parametrize("removed", REMOVED)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_cropped_cache_that_grows_again_equals_a_fresh_one(name: str, removed: int) -> None:
    """Case 30. Nothing, a little, all, and more than there is; over the edges of blocks."""
    model, cache, fresh = shared_model(name), paged(name), paged(name)
    for one in (cache, fresh):
        one.activate_past_recording()
    fill(model, cache, prompt(2, TOKENS))
    cache.crop(-removed)
    kept = max(0, TOKENS - removed)
    assert_sound(cache, kept)
    if kept:
        fill(model, fresh, prompt(2, TOKENS)[:, :kept])
        fresh.crop(0)
    assert cache.stats().used_blocks == fresh.stats().used_blocks
    for step, tokens in enumerate((3, BLOCK, 1)):
        ids = prompt(2, tokens, seed=step + 1)
        got, want = fill(model, cache, ids), fill(model, fresh, ids)
        assert (got - want).abs().max() <= 2e-4 * want.abs().max(), step
    assert_sound(cache, kept + 4 + BLOCK)


@pytest.mark.parametrize("removed", [1, 4, 5, BLOCK + 3, BLOCK + 4])
@pytest.mark.parametrize("format_name", ["auto", *FORMATS])
def test_nothing_of_the_cropped_tokens_is_left_in_bytes_scales_or_dense_blocks(
    format_name: str, removed: int
) -> None:
    """Case 31. Regrown with other tokens, of which no scale or zero point may know the old ones."""
    cache = paged(kv_cache_dtype=format_name, key_error_guard="off")
    keys, values = states(TOKENS, rows=2)
    # Tokens that would spoil every scale they leave behind.
    keys[:, :, -removed:], values[:, :, -removed:] = 500.0, -500.0
    update_all(cache, keys, values)
    cache.crop(-removed)
    kept = TOKENS - removed
    assert_sound(cache, kept)
    group = cache._state.groups[0]
    assert {len(table.ids) for table in group.manager.tables} == {-(-kept // BLOCK)}
    assert {layer.keys.shape[2] for layer in cache.layers} == {kept}
    new_keys, new_values = states(2 * BLOCK + 1, rows=2, seed=1)
    update_all(cache, new_keys[:, :, :1], new_values[:, :, :1])
    update_all(cache, new_keys[:, :, 1:], new_values[:, :, 1:])
    for given_, new, side in ((keys, new_keys, "keys"), (values, new_values, "values")):
        want = torch.cat((given_[:, :, :kept], new), dim=2)
        for layer in cache.layers:
            got = getattr(layer, side).clone()
            assert got.shape == want.shape
            error = (got - want)[:, :, kept:].norm() / new.norm()
            assert error <= (0.0 if format_name == "auto" else 0.2), (side, float(error))
    assert_sound(cache, kept + 2 * BLOCK + 1)


@pytest.mark.parametrize("format_name", FORMATS)
def test_what_a_crop_back_into_a_block_moves_is_bounded_and_a_fork_moves_nothing(format_name: str) -> None:
    """A question, its crop, another question: tokens before both were rounded beside the first one's."""
    kept = BLOCK + 6
    before, first, second = (states(tokens, seed=seed) for tokens, seed in ((kept, 0), (40, 1), (40, 2)))
    cache, fresh = (paged(kv_cache_dtype=format_name, key_error_guard="off") for _ in range(2))
    for one in (cache, fresh):
        update_all(one, *before)
    update_all(fresh, *second)
    asked = cache.fork()
    update_all(asked, *first)
    asked.crop(-40)
    rounded_once = [getattr(asked.layers[0], side) + 0 for side in ("keys", "values")]
    for one in (asked, cache):
        update_all(one, *second)

    codecs = asked._state.groups[0].formats[0]
    block, tail = slice(BLOCK, 2 * BLOCK), slice(BLOCK, kept)
    for index, side in enumerate(("keys", "values")):
        codec = getattr(codecs, side)
        assert torch.equal(getattr(cache.layers[0], side) + 0, getattr(fresh.layers[0], side) + 0)
        bound = sum(
            error_bound(codec, side_block).expand_as(side_block)
            for side_block in (
                torch.cat((before[index], first[index]), 2)[:, :, block],
                torch.cat((rounded_once[index], second[index]), 2)[:, :, block],
            )
        )
        error = (getattr(asked.layers[0], side)[:, :, tail] - before[index][:, :, tail]).abs()
        assert (error <= bound[:, :, : kept - BLOCK] + 1e-5).all(), side


@pytest.mark.parametrize("tokens", AT_EDGES)
def test_freed_blocks_go_back_to_the_pool(tokens: int) -> None:
    """Case 30. Blocks of a cropped row serve the next one."""
    model, cache = shared_model("llama"), paged(max_tokens=4 * BLOCK)
    for turn in range(6):
        fill(model, cache, prompt(1, tokens, seed=turn))
        fill(model, cache, prompt(1, 4 * BLOCK - tokens, seed=turn))
        cache.crop(-(4 * BLOCK))
        assert cache.stats().used_blocks == 0
        cache.check_integrity()
