"""Rows with hidden tokens go on under masks and at positions that fit what is cached, or are refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_paged_cache import PagedCache, disable
from hf_paged_cache.errors import CacheMismatchError, PoolExhausted
from hf_paged_cache.forward.left_padding import Forward, Padding
from tests.support.models import PAD, by_name, host_cache, shared_model
from tests.support.padded import BLOCK, DECODERS, extended, fill, generate, llama, positions, prompt, ragged

TRAPPED = [name for name in DECODERS if name != "falcon-alibi"]


@pytest.mark.parametrize("lengths", [(9, 5), (40, 20)], ids=["within_a_block", "over_blocks"])
@pytest.mark.parametrize("name", TRAPPED)
def test_a_fill_that_counts_padding_does_not_go_on_in_generate(name: str, lengths: tuple[int, int]) -> None:
    model, inputs = shared_model(name), ragged(*lengths)
    cache = PagedCache(model, block_size=BLOCK)
    fill(model, cache, inputs)
    more = torch.stack([prompt(3, seed=7), prompt(3, seed=8)])
    turn = extended(inputs, inputs["input_ids"], more)
    last, real = max(lengths) - 1, lengths[1]
    with pytest.raises(
        CacheMismatchError,
        match=rf"position_ids: row 1 .* at position {last}, so the next .* at {last + 1}; got {real}\.",
    ):
        generate(model, cache, turn)
    assert cache.get_seq_length() == max(lengths)
    cache.check_integrity()

    disable(model)
    expected = generate(model, host_cache(model), turn).tolist()
    for way in ({}, {"position_ids": positions(inputs["attention_mask"])}):
        cache = PagedCache(model, block_size=BLOCK)
        if way:
            fill(model, cache, inputs, **way)
        assert generate(model, cache, turn).tolist() == expected


@pytest.mark.parametrize("name", TRAPPED)
def test_generate_does_not_go_on_in_a_forward_that_counts_padding(name: str) -> None:
    model, inputs = shared_model(name), ragged(40, 20)
    cache = PagedCache(model, block_size=BLOCK)
    said = generate(model, cache, inputs, tokens=4)
    turn = extended(inputs, said, said[:, :0])
    step = {"input_ids": said[:, -1:], "attention_mask": turn["attention_mask"]}
    with pytest.raises(
        CacheMismatchError, match=r"stands at position 22, so the next one stands at 23; got 43"
    ):
        fill(model, cache, step)
    fill(model, cache, step, position_ids=positions(turn["attention_mask"])[:, -1:])
    assert cache.get_seq_length() == 44


@pytest.mark.parametrize("name", DECODERS)
def test_plain_forwards_all_the_way_are_as_with_the_hosts_own_cache(name: str) -> None:
    model, inputs = shared_model(name), ragged(40, 20)
    disable(model)
    found = []
    for cache in (host_cache(model), PagedCache(model, block_size=BLOCK)):
        logits = [fill(model, cache, inputs)[:, -1:]]
        mask = inputs["attention_mask"]
        for count in (1, 3, 18, 1):
            mask = torch.nn.functional.pad(mask, (0, count), value=1)
            new = torch.stack([prompt(count, seed=1), prompt(count, seed=2)])
            logits.append(fill(model, cache, {"input_ids": new, "attention_mask": mask}))
        found.append(torch.cat(logits, 1))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_positions_do_not_matter_where_nothing_asks_for_them() -> None:
    model, inputs = shared_model("falcon-alibi"), ragged(40, 20)
    disable(model)
    turn = extended(inputs, inputs["input_ids"], torch.stack([prompt(3), prompt(3)]))
    expected = generate(model, host_cache(model), turn).tolist()
    cache = PagedCache(model, block_size=BLOCK)
    fill(model, cache, inputs)
    assert generate(model, cache, turn).tolist() == expected


@pytest.mark.parametrize("removed", [1, 5, 25])
def test_the_trap_is_seen_after_a_crop(removed: int) -> None:
    model, inputs = llama(), ragged(40, 20)
    cache = PagedCache(model, block_size=BLOCK)
    fill(model, cache, inputs)
    cache.crop(-removed)
    if removed > 20:  # no real token of row 1 is left, and none of row 0 is padded
        generate(model, cache, inputs)
        return
    with pytest.raises(
        CacheMismatchError, match=f"so the next one stands at {40 - removed}; got {20 - removed}"
    ):
        generate(model, cache, inputs)


def test_the_trap_is_seen_in_copies_and_forgotten_with_the_rows() -> None:
    model, inputs = llama(), ragged(40, 20)
    turn = extended(inputs, inputs["input_ids"], torch.stack([prompt(3), prompt(3)]))
    cache = PagedCache(model, block_size=BLOCK)
    fill(model, cache, inputs)
    twin = copy.deepcopy(cache)
    with pytest.raises(CacheMismatchError, match="position_ids: row 1"):
        generate(model, twin, turn)
    twin.reorder_cache(torch.tensor([1, 0]))
    with pytest.raises(CacheMismatchError, match="position_ids: row 0"):
        generate(model, twin, {key: x[[1, 0]] for key, x in turn.items()})
    twin.batch_select_indices(torch.tensor([1]))
    generate(model, twin, {key: x[[0]] for key, x in turn.items()})
    cache.reset()
    generate(model, cache, turn)


def test_a_failed_forward_leaves_no_positions_behind() -> None:
    model, inputs = llama(), ragged(40, 20)
    where = positions(inputs["attention_mask"])
    cache = PagedCache(model, block_size=BLOCK, max_tokens=100)
    fill(model, cache, inputs, position_ids=where)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 100), value=1)
    many = {"input_ids": torch.stack([prompt(100)] * 2), "attention_mask": mask}
    with pytest.raises(PoolExhausted):
        fill(model, cache, many, position_ids=positions(mask)[:, 40:])
    before = cache._state.rows.padding
    turn = extended(inputs, inputs["input_ids"], torch.stack([prompt(3), prompt(3)]))
    generate(model, cache, turn, tokens=5)
    assert before.end == 40


@pytest.mark.parametrize("lengths", [(40, 40), (40, 20)], ids=["equal", "padded"])
def test_looking_at_masks_and_positions_asks_a_gpu_nothing_in_a_decode_step(
    lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    after, looks_at = Padding.after, Padding.looks_at

    def counted(self: Padding, forward: Forward, *args: Any, **kwargs: Any) -> Padding:
        asked.append(forward.start)
        return after(self, forward, *args, **kwargs)

    def on_a_gpu(self: Padding, call: Any, tokens: int, device: object, **kwargs: Any) -> bool:
        return looks_at(self, call, tokens, torch.device("cuda"), **kwargs)

    monkeypatch.setattr(Padding, "after", counted)
    monkeypatch.setattr(Padding, "looks_at", on_a_gpu)
    model, inputs = llama(), ragged(*lengths)
    cache = PagedCache(model, block_size=BLOCK)
    said = generate(model, cache, inputs, tokens=10)
    assert asked == [0]
    turn = extended(inputs, said, torch.stack([prompt(3), prompt(3)]))
    said = generate(model, cache, turn, tokens=5)
    assert asked == [0, 49], "and where every call begins"
    turn = extended(inputs, said, said[:, :0])
    generate(model, cache, turn, tokens=5, num_beams=1)
    assert asked == [0, 49, 57], "though it brings one token"
    where = positions(extended(inputs, said, torch.ones(2, 9, dtype=torch.long))["attention_mask"])
    for step in range(4):
        now = turn["attention_mask"].shape[1] + 4 + step
        mask = torch.nn.functional.pad(turn["attention_mask"], (0, 5 + step), value=1)
        fill(
            model,
            cache,
            {"input_ids": turn["input_ids"][:, :1], "attention_mask": mask},
            position_ids=where[:, now : now + 1],
        )
    assert asked == [0, 49, 57, 62], "and plain steps when they begin"


# --- masks that hide other tokens than before ---------------------------------------------------------------

TOKENS = 20
AGAIN = r"attention_mask: row 0 shows token {}, which an earlier mask hid"
UNSTORED = AGAIN.format(5) + r"|attention_mask: rows \[0\] begin with padding, which the first forward"
SHIFTED = r"position_ids: row 0 .*hides {} tokens that the forwards so far have seen"
LATER: dict[str, tuple[list[slice], list[slice], str, str]] = {
    "a gap is shown": ([slice(6, 9)], [], AGAIN.format(6), AGAIN.format(6)),
    "a part of a gap is shown": ([slice(6, 9)], [slice(6, 8)], AGAIN.format(8), AGAIN.format(8)),
    "right padding is shown": ([slice(16, 20)], [], AGAIN.format(16), AGAIN.format(16)),
    "left padding is shown": ([slice(0, 6)], [slice(0, 5)], UNSTORED, UNSTORED),
    "the head is hidden": ([], [slice(0, 3)], SHIFTED.format(3), ""),
    "the middle is hidden": ([], [slice(6, 9)], SHIFTED.format(3), ""),
    "more of a padded row is hidden": ([slice(0, 4)], [slice(0, 6)], SHIFTED.format(2), ""),
    "the end is hidden": ([], [slice(17, 20)], "", ""),
    "the end of a padded row is hidden": ([slice(0, 4)], [slice(0, 4), slice(17, 20)], "", ""),
    "all of a row is hidden": ([], [slice(0, 20)], "", ""),
    "a gap stays hidden": ([slice(6, 9)], [slice(6, 9)], "", ""),
}
"""What row 0 hides at first and later; what `generate` and a plain forward are refused with, if they are."""


def _hiding(spans: list[slice], tokens: int) -> torch.Tensor:
    mask = torch.ones(2, tokens, dtype=torch.long)
    for span in spans:
        mask[0, span] = 0
    return mask


@pytest.mark.parametrize("case", LATER)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "falcon", "gpt-oss"])
def test_a_later_mask_in_generate_is_refused_or_gives_what_a_fresh_run_gives(name: str, case: str) -> None:
    model, (first, later, refusal, _) = shared_model(name), LATER[case]
    ids = torch.stack([prompt(TOKENS + 4, seed=1), prompt(TOKENS + 4, seed=2)])
    mask = _hiding(first, TOKENS)
    turn = {"input_ids": ids, "attention_mask": _hiding(later, TOKENS + 4)}
    cache = PagedCache(model, block_size=BLOCK)
    fill(model, cache, {"input_ids": ids[:, :TOKENS], "attention_mask": mask}, position_ids=positions(mask))
    if refusal:
        before = cache._state.rows.padding
        with pytest.raises(CacheMismatchError, match=refusal):
            generate(model, cache, turn)
        assert (cache.get_seq_length(), cache._state.rows.padding) == (TOKENS, before)
        cache.check_integrity()
        return
    got = generate(model, cache, turn, tokens=8)
    disable(model)
    assert got.tolist() == generate(model, host_cache(model), turn, tokens=8).tolist()


@pytest.mark.parametrize("case", LATER)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "falcon", "falcon-alibi", "gpt-oss"])
def test_a_later_mask_in_plain_forwards_is_refused_or_gives_what_the_hosts_own_cache_gives(
    name: str, case: str
) -> None:
    model, (first, later, _, refusal) = shared_model(name), LATER[case]
    ids = torch.stack([prompt(TOKENS + 4, seed=1), prompt(TOKENS + 4, seed=2)])

    def run(cache: Any, spans: list[slice]) -> torch.Tensor:
        fill(model, cache, {"input_ids": ids[:, :TOKENS], "attention_mask": _hiding(first, TOKENS)})
        found = []
        for start, end in ((TOKENS, TOKENS + 2), (TOKENS + 2, TOKENS + 3), (TOKENS + 3, TOKENS + 4)):
            fed = {"input_ids": ids[:, start:end], "attention_mask": _hiding(spans, end)}
            found.append(fill(model, cache, fed))
        return torch.cat(found, 1)

    cache = PagedCache(model, block_size=BLOCK)
    if refusal:
        with pytest.raises(CacheMismatchError, match=refusal):
            run(cache, later)
        assert cache.get_seq_length() == TOKENS
        return
    got = run(cache, later)
    disable(model)
    torch.testing.assert_close(got, run(host_cache(model), later), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("padding", "is_right"), [(0, True), (4, False)])
def test_a_row_that_ended_early_goes_on_in_the_ways_that_fit_it(padding: int, is_right: bool) -> None:
    model = shared_model("llama")
    ids = torch.stack([prompt(TOKENS + 6, seed=1), prompt(TOKENS + 6, seed=2)])
    first, later = [slice(0, padding)], [slice(0, padding), slice(16, 20)]
    cache = PagedCache(model, block_size=BLOCK)
    mask = _hiding(first, TOKENS)
    fill(model, cache, {"input_ids": ids[:, :TOKENS], "attention_mask": mask}, position_ids=positions(mask))
    new = {"input_ids": ids[:, TOKENS:-3], "attention_mask": _hiding(later, TOKENS + 3)}
    turn = {"input_ids": ids, "attention_mask": _hiding(later, TOKENS + 6)}
    if is_right:  # so far both ways count alike
        got = fill(model, cache, new)
        disable(model)
        fresh = {"input_ids": ids[:, :-3], "attention_mask": new["attention_mask"]}
        want = fill(model, host_cache(model), fresh)[:, TOKENS:]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        with pytest.raises(CacheMismatchError, match=r"position 22, so the next one stands at 23; got 19"):
            generate(model, cache, turn)
    else:
        with pytest.raises(CacheMismatchError, match=r"position 11, so the next one stands at 12; got 20"):
            fill(model, cache, new)
        got = generate(model, cache, turn).tolist()
        disable(model)
        assert got == generate(model, host_cache(model), turn).tolist()


def test_a_mask_that_the_host_infers_from_pad_ids_is_refused_inside_a_text_and_right_after_it() -> None:
    model = shared_model("llama")
    ids = torch.stack([prompt(TOKENS, seed=1), prompt(TOKENS, seed=2)])
    for place, is_right in ((9, False), (TOKENS - 4, True)):
        said = ids.clone()
        said[0, place : (None if is_right else place + 1)] = PAD
        said = torch.cat((said, ids[:, :4]), 1)
        cache = PagedCache(model, block_size=BLOCK)
        fill(model, cache, {"input_ids": said[:, :TOKENS]})
        if is_right:
            got = generate(model, cache, {"input_ids": said}).tolist()
            disable(model)
            assert got == generate(model, host_cache(model), {"input_ids": said}).tolist()
            continue
        with pytest.raises(
            CacheMismatchError, match=r"`generate` takes pad tokens in the prompt for padding"
        ):
            generate(model, cache, {"input_ids": said})
        turn = {"input_ids": said, "attention_mask": torch.ones_like(said)}
        got = generate(model, cache, turn).tolist()
        disable(model)
        assert got == generate(model, host_cache(model), turn).tolist()


def test_a_look_under_another_mask_leaves_no_trace() -> None:
    model = shared_model("llama")
    ids = torch.stack([prompt(TOKENS + 4, seed=1), prompt(TOKENS + 4, seed=2)])
    cache = PagedCache(model, block_size=BLOCK)
    fill(model, cache, {"input_ids": ids[:, :TOKENS]})
    before = cache._state.rows.padding
    hidden = {"input_ids": ids[:, TOKENS:], "attention_mask": _hiding([slice(3, 9)], TOKENS + 4)}
    fill(model, cache, hidden, use_cache=False)
    assert cache.get_seq_length() == TOKENS
    assert cache._state.rows.padding == before
    got = fill(model, cache, {"input_ids": ids[:, TOKENS:]})
    disable(model)
    want = fill(model, host_cache(model), {"input_ids": ids})[:, TOKENS:]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_equal_rows_keep_masks_of_their_own() -> None:
    """With one layer, K and V of a row do not show that its last token is hidden."""
    case = by_name("llama")
    model = replace(case, options=case.options | {"num_hidden_layers": 1}).build()
    ids = torch.stack([prompt(TOKENS + 4)] * 2)
    found = []
    for cache in (PagedCache(model, block_size=BLOCK), host_cache(model)):
        fed = {"input_ids": ids[:, :TOKENS], "attention_mask": _hiding([slice(19, 20)], TOKENS)}
        fill(model, cache, fed)
        later = {"input_ids": ids[:, TOKENS:], "attention_mask": _hiding([slice(19, 20)], TOKENS + 4)}
        found.append(fill(model, cache, later))
        disable(model)
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


def test_what_is_hidden_is_known_after_tokens_were_dropped() -> None:
    model = shared_model("falcon-alibi")
    ids = torch.stack([prompt(TOKENS, seed=1), prompt(TOKENS, seed=2)])
    cache = PagedCache(model, block_size=BLOCK)
    fill(model, cache, {"input_ids": ids, "attention_mask": _hiding([slice(6, 9)], TOKENS)})
    cache.prune(2, 7)
    assert cache._state.rows.padding.runs == (((0, 2, None), (4, 15, None)), ((0, 15, None),))
    with pytest.raises(CacheMismatchError, match=AGAIN.format(2)):
        fill(model, cache, {"input_ids": ids[:, :1], "attention_mask": _hiding([], 16)})
