"""Rows that were filled with positions that count their padding, and do not go on without it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hf_paged_cache import PagedCache, disable
from hf_paged_cache.errors import CacheMismatchError, PoolExhausted
from hf_paged_cache.padding import Forward, Padding
from tests.models import host_cache, shared_model
from tests.padded import BLOCK, DECODERS, extended, fill, generate, llama, positions, prompt, ragged

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
    before = cache._state.padding
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
