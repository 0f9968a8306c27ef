"""Left padding is not stored, blocks begin at a row's first real token, and nothing else changes."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

from hf_paged_cache import PagedCache, disable
from hf_paged_cache.errors import CacheMismatchError, PoolExhausted
from hf_paged_cache.formats import FORMATS
from hf_paged_cache.store.layer_groups import LayerGroups
from tests.support.models import host_cache, shared_model
from tests.support.padded import (
    BLOCK,
    DECODERS,
    extended,
    fill,
    generate,
    left_padded,
    llama,
    positions,
    prompt,
    ragged,
    stored_columns,
)
from tests.support.quantized import cache_of
from tests.support.tails import few

ALL = ("auto", *FORMATS)
OWN_ATTENTION = ("falcon", "falcon-alibi")
"""They make no mask through this package, so all of their padding is stored."""


# --- what is stored -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_a_padded_batch_stores_the_blocks_it_needs(name: str) -> None:
    model, inputs = llama(), ragged(19, 12, 5, width=100)
    cache = cache_of(model, name)
    fill(model, cache, inputs, position_ids=positions(inputs["attention_mask"]))
    assert cache.stats().used_blocks == 2 + 1 + 1
    cache.reset()
    generate(model, cache, inputs, tokens=21)
    assert cache.get_seq_length() == 120
    assert cache.stats().used_blocks == 3 + 2 + 2  # 39, 32 and 25 tokens
    cache.check_integrity()


@pytest.mark.parametrize(
    ("lengths", "width", "expected"),
    [
        ((33, 18, 17, 2), 33, [3, 2, 2, 1]),
        ((1, 15, 16, 17, 33), 33, [1, 1, 1, 2, 3]),
        ((64, 1), 64, [4, 1]),
        ((48, 16, 15), 48, [3, 1, 1]),
    ],
)
def test_each_row_leaves_out_its_own_padding(
    lengths: tuple[int, ...], width: int, expected: list[int]
) -> None:
    cache = PagedCache(llama(), block_size=BLOCK)
    fill(llama(), cache, ragged(*lengths, width=width))
    assert stored_columns(cache) == [[True] * blocks for blocks in expected]


@pytest.mark.parametrize("chunk", [7, 16, 20, 33, 64])
def test_a_prompt_in_chunks_ends_with_the_same_blocks(chunk: int) -> None:
    model, inputs = llama(), ragged(90, 30, 5)
    cache = PagedCache(model, block_size=BLOCK)
    generate(model, cache, inputs, tokens=1, prefill_chunk_size=chunk)
    assert stored_columns(cache) == [[True] * 6, [True] * 2, [True]]
    cache.check_integrity()


def test_padding_of_a_window_layer_is_not_stored_either() -> None:
    model = shared_model("mistral")
    cache = PagedCache(model, block_size=BLOCK)
    cache._state.rows.record_past = True  # or else the window alone would drop it
    fill(model, cache, ragged(60, 20, 5))
    assert stored_columns(cache) == [[True] * 4, [True] * 2, [True]]


def test_a_pool_that_could_not_hold_the_padding_holds_the_rows() -> None:
    model, inputs = llama(), ragged(19, 12, 5, width=100)
    cache = PagedCache(model, block_size=BLOCK, max_tokens=48)  # and 45 that may be lost at the rows' ends
    fill(model, cache, inputs)
    assert cache.stats().used_blocks == 4
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 13), value=1)
    with pytest.raises(PoolExhausted):
        fill(model, cache, {"input_ids": torch.stack([prompt(13)] * 3), "attention_mask": mask})


def test_rows_without_padding_and_right_padding_are_stored() -> None:
    model = llama()
    inputs = ragged(40, 40)
    inputs["attention_mask"][1, 8:] = 0
    cache = PagedCache(model, block_size=BLOCK)
    fill(model, cache, inputs)
    assert stored_columns(cache) == [[True] * 3] * 2
    assert not cache._state.rows.padding.tokens


def test_a_row_that_is_all_padding_stores_nothing() -> None:
    model = llama()
    inputs = ragged(40, 40)
    inputs["attention_mask"][1] = 0
    cache = PagedCache(model, block_size=BLOCK)
    logits = fill(model, cache, inputs)
    assert stored_columns(cache) == [[True] * 3, []]
    mask = torch.cat((inputs["attention_mask"], torch.ones(2, 1)), 1)
    logits = fill(model, cache, {"input_ids": prompt(2)[:, None], "attention_mask": mask})
    assert not logits.isnan().any()


# --- nothing else changes -----------------------------------------------------------------------------------


def _conversation(
    model: Any, cache: PagedCache, prompts: list[torch.Tensor], more: torch.Tensor
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Logits of what follows a padded prompt, with several turns, crops and steps; and K and V after it."""
    inputs = left_padded(prompts)
    width = inputs["input_ids"].shape[1]
    mask = torch.cat((inputs["attention_mask"], torch.ones(more.shape, dtype=torch.long)), 1)
    first = fill(model, cache, inputs, position_ids=positions(inputs["attention_mask"]))
    found, end = [first[:, -1:]], width
    for count, cut in ((1, 0), (1, 0), (5, 2), (20, 0), (1, 0), (16, 9), (1, 0), (17, 0), (1, 0)):
        span = slice(end, end + count)
        new = {"input_ids": more[:, end - width :][:, :count], "attention_mask": mask[:, : end + count]}
        found.append(fill(model, cache, new, position_ids=positions(mask)[:, span]))
        end += count
        if cut:
            cache.crop(-cut)
            end -= cut
    cache.check_integrity()
    return torch.cat(found, 1), [(layer.keys, layer.values) for layer in cache.layers]


@pytest.mark.parametrize("backend", few(["cpp", "torch", "reference"], {"cpp", "torch"}))
@pytest.mark.parametrize("name", ALL)
def test_a_row_in_a_padded_batch_equals_the_same_row_alone(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_PAGED_CACHE_BACKEND", backend)
    # In float64 no code tips over because a batch is summed in another order than a row.
    exact = backend != "cpp"
    model = llama(torch.float64 if exact else torch.float32)
    prompts = [prompt(n, seed=row) for row, n in enumerate((70, 20, 3, 50))]
    more = torch.stack([prompt(80, seed=row + 10) for row in range(4)])
    got, stored = _conversation(model, cache_of(model, name, key_error_guard="off"), prompts, more)
    tolerance = 1e-8 if exact else 1e-4 if name == "auto" else 5e-2
    for row, one in enumerate(prompts):
        cache = cache_of(model, name, key_error_guard="off")
        want, own = _conversation(model, cache, [one], more[[row]])
        torch.testing.assert_close(got[row], want[0], rtol=tolerance, atol=tolerance)
        for pair, own_pair in zip(stored, own, strict=True):
            for x, y in zip(pair, own_pair, strict=True):
                before = x.shape[2] - y.shape[2]
                assert not x[row, :, :before].any()
                if exact:
                    torch.testing.assert_close(x[row, :, before:], y[0], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", ["auto", "int4"])
@pytest.mark.parametrize("case", ["mistral", "gemma3"])
def test_a_row_of_a_padded_batch_equals_itself_alone_where_windows_drop(case: str, name: str) -> None:
    model = shared_model(case, dtype=torch.float64)
    prompts = [prompt(n, seed=row) for row, n in enumerate((70, 20, 3))]
    more = torch.stack([prompt(80, seed=row + 10) for row in range(3)])

    def run(rows: list[int]) -> torch.Tensor:
        cache = cache_of(model, name, key_error_guard="off")
        cache.activate_past_recording()
        return _conversation(model, cache, [prompts[row] for row in rows], more[rows])[0]

    got = run([0, 1, 2])
    for row in range(3):
        torch.testing.assert_close(got[row], run([row])[0], rtol=1e-8, atol=1e-8)


def test_the_sink_of_a_padded_row_is_its_own_first_block() -> None:
    model = llama()
    cache = cache_of(model, "int4")
    generate(model, cache, ragged(70, 20, 5), tokens=60)
    dense, tables = cache._state.groups[0].dense, cache._state.groups[0].manager.tables
    assert dense is not None
    assert all(table.ids[0] in dense.dense_ids(cache._state.groups[0].manager) for table in tables)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 10}], ids=str)
@pytest.mark.parametrize("name", DECODERS)
def test_tokens_are_those_of_the_hosts_own_cache(name: str, options: dict[str, Any]) -> None:
    model, inputs = shared_model(name), ragged(50, 33, 4, seed=3)
    disable(model)
    theirs = host_cache(model)
    first = generate(model, theirs, inputs, **options)
    second = extended(inputs, first, torch.stack([prompt(9, seed=row) for row in range(3)]))
    expected = generate(model, theirs, second, **options) if not options else None

    cache = PagedCache(model, block_size=BLOCK)
    assert generate(model, cache, inputs, **options).tolist() == first.tolist()
    if expected is not None:
        assert generate(model, cache, second, **options).tolist() == expected.tolist()
    if name not in OWN_ATTENTION:
        assert any(table.offset for table in cache._state.groups[0].manager.tables)
    cache.check_integrity()


def test_a_padded_prompt_with_an_assistant() -> None:
    model, inputs = llama(), ragged(21, width=70)
    disable(model)
    lookup = {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1}
    expected = generate(model, host_cache(model), inputs, tokens=40, **lookup)
    cache = PagedCache(model, block_size=BLOCK)
    assert generate(model, cache, inputs, tokens=40, **lookup).tolist() == expected.tolist()
    assert len(stored_columns(cache)[0]) == -(-(cache.get_seq_length() - 49) // BLOCK)
    cache.check_integrity()


@pytest.mark.parametrize("name", ALL)
def test_what_lies_in_other_blocks_never_reaches_a_padded_row(name: str) -> None:
    model, inputs = llama(), ragged(70, 20, 3)
    clean, dirty = cache_of(model, name), cache_of(model, name)
    fill(model, dirty, ragged(90, 90, 90))
    for group in dirty._state.groups:
        for pool in group.pools:
            for tensor in (pool.keys, pool.values):
                tensor.fill_(float("nan"))
            if pool.records is not None:
                pool.records.fill_(255)
    dirty.reset()
    assert generate(model, dirty, inputs).tolist() == generate(model, clean, inputs).tolist()
    step = {"input_ids": prompt(3)[:, None], "attention_mask": torch.ones(3, 90, dtype=torch.long)}
    step["attention_mask"][:, :70] = inputs["attention_mask"]
    assert not fill(model, dirty, step, position_ids=positions(step["attention_mask"])[:, -1:]).isnan().any()


def test_padding_that_is_not_stored_reads_as_zeros() -> None:
    model, inputs = llama(), ragged(40, 20)
    cache = PagedCache(model, block_size=BLOCK)
    fill(model, cache, inputs)
    for layer in cache.layers:
        for stored in (layer.keys, layer.values):
            assert not stored[1, :, :20].any()
            assert stored[1, :, 20:].any(-1).all()
            assert stored[0].any(-1).all()


# --- rows that are copied, cut and chosen -------------------------------------------------------------------


def _goes_on(model: Any, cache: Any, inputs: dict[str, torch.Tensor], seed: int = 50) -> list[list[int]]:
    """Tokens after some more of a conversation."""
    rows = len(inputs["input_ids"])
    more = torch.stack([prompt(5, seed=seed) for _ in range(rows)])
    said = generate(model, cache, extended(inputs, inputs["input_ids"], more))
    return [row.tolist() for row in said]


@pytest.mark.parametrize("name", ["auto", "int8", "int4"])
def test_copies_and_choices_of_rows_keep_their_padding(name: str) -> None:
    model, inputs = llama(), ragged(70, 20, 3)
    where = positions(inputs["attention_mask"])
    expected = {}
    for row in range(3):
        one = cache_of(model, name)
        chosen = {key: x[[row]] for key, x in inputs.items()}
        fill(model, one, chosen, position_ids=where[[row]])
        expected[row] = _goes_on(model, one, chosen)[0]
    cache = cache_of(model, name)
    fill(model, cache, inputs, position_ids=where)
    order = [2, 1, 1, 0, 2]
    several = copy.deepcopy(cache)
    several.reorder_cache(torch.tensor(order))
    several.check_integrity()
    assert _goes_on(model, several, {key: x[order] for key, x in inputs.items()}) == [
        expected[row] for row in order
    ]
    cache.batch_select_indices(torch.tensor([1, 2]))
    kept = copy.deepcopy(cache)
    cache.batch_repeat_interleave(2)
    assert _goes_on(model, cache, {key: x[[1, 1, 2, 2]] for key, x in inputs.items()}) == [
        expected[row] for row in (1, 1, 2, 2)
    ]
    assert _goes_on(model, kept, {key: x[[1, 2]] for key, x in inputs.items()}) == [expected[1], expected[2]]
    for one in (several, cache, kept):
        one.check_integrity()


def _twins(model: Any, cache: PagedCache, name: str) -> dict[str, PagedCache]:
    """Caches with the same contents, by every way there is."""
    saved = io.BytesIO()
    torch.save(cache.state_dict(), saved)
    saved.seek(0)
    loaded = cache_of(model, name)
    loaded.load_state_dict(torch.load(saved, weights_only=True))
    twins = {"fork": cache.fork(), "deepcopy": copy.deepcopy(cache), "state_dict": loaded}
    if name == "auto":
        twins["from_cache"] = PagedCache.from_cache(cache, model, block_size=32)
    return twins


@pytest.mark.parametrize("name", ["auto", "int8", "int4"])
@pytest.mark.parametrize("case", ["llama", "gemma3"])
def test_copies_of_a_cache_keep_its_padding(case: str, name: str) -> None:
    model, inputs = shared_model(case), ragged(40, 70, 3)  # the row without padding is not the first
    where = positions(inputs["attention_mask"])
    cache = cache_of(model, name, key_error_guard="off")
    fill(model, cache, inputs, position_ids=where)
    twins = _twins(model, cache, name)
    expected = _goes_on(model, copy.deepcopy(cache), inputs)
    new = {"input_ids": torch.stack([prompt(2)] * 3)}
    for way, twin in twins.items():
        with pytest.raises(CacheMismatchError, match="begin with padding"):
            fill(model, twin, new, position_ids=where[:, -1:] + torch.tensor([1, 2]))
        twin.check_integrity()
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 2), value=1)
        with pytest.raises(CacheMismatchError, match="position_ids: row 0"):
            fill(model, twin, new | {"attention_mask": mask})
        assert _goes_on(model, twin, inputs) == expected, way
        twin.check_integrity()
    assert _goes_on(model, cache, inputs) == expected
    cache.check_integrity()


def test_a_copy_with_other_blocks_leaves_padding_out_too() -> None:
    model, inputs = llama(), ragged(40, 20)
    cache = PagedCache(model, block_size=BLOCK)
    fill(model, cache, inputs, position_ids=positions(inputs["attention_mask"]))
    dense = cache.to_dynamic_cache()
    assert not dense.layers[0].keys[1, :, :20].any()
    twin = PagedCache.from_cache(cache, model, block_size=BLOCK)
    assert stored_columns(twin) == [[True] * 3, [True] * 2]
    assert twin._state.rows.padding == cache._state.rows.padding


def test_a_frozen_look_leaves_padding_as_it_was() -> None:
    model, inputs = llama(), ragged(40, 20)
    cache = PagedCache(model, block_size=BLOCK)
    fill(model, cache, inputs, position_ids=positions(inputs["attention_mask"]))
    before = cache._state.rows.padding
    turn = extended(inputs, inputs["input_ids"], torch.stack([prompt(3)] * 2))
    expected = generate(model, copy.deepcopy(cache), turn).tolist()
    where = positions(turn["attention_mask"])[:, 40:]
    new = {"input_ids": turn["input_ids"][:, 40:], "attention_mask": turn["attention_mask"]}
    fill(model, cache, new, position_ids=where, use_cache=False)
    assert cache.get_seq_length() == 40
    assert cache._state.rows.padding == before
    assert generate(model, cache, turn).tolist() == expected


def test_dropped_tokens_take_their_padding_with_them() -> None:
    model, inputs = shared_model("falcon-alibi"), ragged(60, 20)
    cache = PagedCache(model, block_size=BLOCK)
    fill(model, cache, inputs)
    assert cache._state.rows.padding.tokens == (0, 40)
    cache.prune(10, 30)
    assert cache._state.rows.padding.tokens == (0, 20)
    cache.prune(15, 25)
    assert cache._state.rows.padding.tokens == (0, 15)
    cache.check_integrity()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40, 48, 49, 69])
@pytest.mark.parametrize("name", ALL)
def test_a_row_cut_in_the_middle_of_its_padding_goes_on(name: str, length: int) -> None:
    model = llama(torch.float64) if name != "auto" else llama()
    inputs = ragged(70, 20, 3)
    cache = cache_of(model, name, key_error_guard="off")
    poison = ragged(90, 90, 90)
    fill(model, cache, poison)
    for group in cache._state.groups:
        for pool in group.pools:
            for tensor in (pool.keys, pool.values):
                tensor.fill_(float("nan"))
    cache.reset()
    fill(model, cache, inputs, position_ids=positions(inputs["attention_mask"]))
    cache.crop(length - 70)
    cache.check_integrity()
    cut = {key: x[:, :length] for key, x in inputs.items()}
    got = _goes_on(model, cache, cut)
    cache.check_integrity()
    fresh = cache_of(model, name, key_error_guard="off")
    fill(model, fresh, cut, position_ids=positions(cut["attention_mask"]))
    # Row 0 goes on in a block that has become bytes, where a format has those of whole blocks.
    compared = slice(1 if name in ("int4", "int4_group", "int8_block") else 0, None)
    assert got[compared] == _goes_on(model, fresh, cut)[compared]
    assert not any(layer.keys.isnan().any() for layer in cache.layers)


# --- a mask that does not hide it ---------------------------------------------------------------------------


def _masks(cached: torch.Tensor) -> dict[str, torch.Tensor | None]:
    whole = torch.nn.functional.pad(cached, (0, 2), value=1)
    shown = whole.clone()
    shown[1, 15] = 1
    return {"none": None, "all ones": torch.ones_like(whole), "one token shown": shown}


@pytest.mark.parametrize("attention", ["llama", "llama-eager", "mistral", "gemma3"])
@pytest.mark.parametrize("which", ["none", "all ones", "one token shown"])
def test_a_mask_that_shows_what_is_not_stored_is_refused(which: str, attention: str) -> None:
    model, inputs = shared_model(attention), ragged(40, 20)
    cache = PagedCache(model, block_size=BLOCK)
    where = positions(inputs["attention_mask"])
    fill(model, cache, inputs, position_ids=where)
    after = where[:, -1:] + torch.tensor([1, 2])
    new = torch.stack([prompt(2), prompt(2)])
    wrong = {"input_ids": new, "attention_mask": _masks(inputs["attention_mask"])[which]}
    with pytest.raises(CacheMismatchError, match=r"attention_mask: rows \[1\] begin with padding.*\[20\]"):
        fill(model, cache, wrong, position_ids=after)
    assert cache.get_seq_length() == 40
    cache.check_integrity()
    right = {
        "input_ids": new,
        "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (0, 2), value=1),
    }
    untouched = PagedCache(model, block_size=BLOCK)
    fill(model, untouched, inputs, position_ids=where)
    expected = fill(model, untouched, right, position_ids=after)
    assert torch.equal(fill(model, cache, right, position_ids=after), expected)


@pytest.mark.parametrize("which", ["none", "all ones", "one token shown"])
def test_it_is_refused_where_masks_are_the_hosts_too(which: str) -> None:
    model, inputs = llama(), ragged(40, 20)
    cache = PagedCache(model, block_size=BLOCK)
    where = positions(inputs["attention_mask"])
    fill(model, cache, inputs, position_ids=where)
    after = where[:, -1:] + torch.tensor([1, 2])
    disable(model)
    mask = _masks(inputs["attention_mask"])[which]
    new = {"input_ids": torch.stack([prompt(2), prompt(2)]), "attention_mask": mask}
    with pytest.raises(CacheMismatchError, match="begin with padding"):
        fill(model, cache, new, position_ids=after)
    if mask is not None:
        four = mask[:, None, None].bool().expand(-1, 1, 2, -1)
        with pytest.raises(CacheMismatchError, match="begin with padding"):
            fill(model, cache, new | {"attention_mask": four}, position_ids=after)
    right = torch.nn.functional.pad(inputs["attention_mask"], (0, 2), value=1)
    theirs = host_cache(model)
    fill(model, theirs, inputs, position_ids=where)
    expected = fill(model, theirs, new | {"attention_mask": right}, position_ids=after)
    got = fill(model, cache, new | {"attention_mask": right}, position_ids=after)
    torch.testing.assert_close(got, expected)


def test_it_is_refused_where_all_padding_is_stored_too() -> None:
    model, inputs = shared_model("falcon-alibi"), ragged(15, 5)
    disable(model)
    cache = PagedCache(model, block_size=BLOCK)
    fill(model, cache, inputs)
    assert stored_columns(cache) == [[True]] * 2
    with pytest.raises(CacheMismatchError, match=r"attention_mask: row 1 shows token 0.*10 such tokens"):
        fill(model, cache, {"input_ids": torch.stack([prompt(2), prompt(2)])})
    assert cache.get_seq_length() == 15


# --- prompts of which nothing is known ----------------------------------------------------------------------


def test_a_loop_without_a_model_stores_all() -> None:
    cache = PagedCache(llama(), block_size=BLOCK)
    states = torch.randn(2, 2, 40, 16)
    for layer_idx in range(3):
        cache.update(states, states, layer_idx)
    assert stored_columns(cache) == [[True] * 3] * 2
    assert not cache._state.rows.padding.tokens


def test_the_mask_of_a_refused_forward_is_not_that_of_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the next one is as long, and shows its mask to nobody."""
    model = llama()
    cache, stock = cache_of(model, "auto"), host_cache(model)

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(LayerGroups, "reserve", fail)
        with pytest.raises(MemoryError):
            fill(model, cache, ragged(20, 37))
    text = ragged(37, 37)["input_ids"]
    inputs = {"input_ids": text, "attention_mask": torch.ones(1, 1, 37, 37, dtype=torch.bool).tril()}
    more = {"input_ids": text[:, :2], "attention_mask": torch.ones(2, 39, dtype=torch.long)}
    for one in (inputs, more):
        got, want = (fill(model, each, one) for each in (cache, stock))
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def test_a_mask_of_four_dimensions_leaves_nothing_out() -> None:
    model, inputs = llama(), ragged(40, 20)
    causal = torch.ones(40, 40, dtype=torch.bool).tril()
    mask = causal & inputs["attention_mask"][:, None, None].bool()
    cache = PagedCache(model, block_size=BLOCK)
    fill(model, cache, inputs | {"attention_mask": mask})
    assert stored_columns(cache) == [[True] * 3] * 2


def test_left_padding_beside_a_full_row_equals_no_padding_at_all() -> None:
    model = llama()
    one = prompt(20, seed=4)
    both = left_padded([prompt(60, seed=5), one])
    got = fill(
        model, PagedCache(model, block_size=BLOCK), both, position_ids=positions(both["attention_mask"])
    )
    want = fill(model, PagedCache(model, block_size=BLOCK), left_padded([one]))
    torch.testing.assert_close(got[1, 40:], want[0], rtol=1e-4, atol=1e-4)
