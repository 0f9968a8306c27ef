"""A prefix can be forked, copied, pickled and saved, and each goes its own way."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_paged_cache import PagedCache, PagedCacheError
from hf_paged_cache.formats import FORMATS
from tests.support.chats import (
    AT_EDGES,
    BLOCK,
    FAMILIES,
    assert_sound,
    fill,
    generate,
    paged,
    prompt,
    reference,
)
from tests.support.models import shared_model


def _through_state_dict(cache: PagedCache, model: Any, settings: dict[str, Any]) -> PagedCache:
    file = io.BytesIO()
    torch.save(cache.state_dict(), file)
    file.seek(0)
    twin = PagedCache(model, **settings)
    twin.load_state_dict(torch.load(file, weights_only=True))
    return twin


WAYS: dict[str, Callable[[PagedCache, Any, dict[str, Any]], PagedCache]] = {
    "fork": lambda cache, model, settings: cache.fork(),
    "deepcopy": lambda cache, model, settings: copy.deepcopy(cache),
    "pickle": lambda cache, model, settings: pickle.loads(pickle.dumps(cache)),
    "state_dict": _through_state_dict,
}


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("format_name", ["auto", *FORMATS])
def test_writing_to_a_copy_leaves_the_original_and_the_other_way_round(
    format_name: str, way: str, grad: bool
) -> None:
    """Case 78. Every format, under and outside `no_grad`."""
    model, settings = (
        shared_model("llama"),
        {"block_size": BLOCK, "kv_cache_dtype": format_name, "group_size": 8},
    )
    for tokens in AT_EDGES[1:3]:
        cache, alone = (PagedCache(model, **settings) for _ in range(2))
        for one in (cache, alone):
            with torch.set_grad_enabled(grad):
                model(prompt(1, tokens), past_key_values=one)
        twin = WAYS[way](cache, model, settings)
        assert_sound(twin, tokens)
        ids, other = prompt(1, 3, seed=1), prompt(1, 3, seed=2)
        want = fill(model, copy.deepcopy(alone), ids), fill(model, alone, other)
        assert torch.equal(fill(model, twin, other), want[1])
        assert torch.equal(fill(model, cache, ids), want[0])
        del twin
        assert_sound(cache, tokens + 3)
        fill(model, cache, prompt(1, BLOCK, seed=3))
        assert_sound(cache, tokens + 3 + BLOCK)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_several_answers_to_one_prefix_are_those_of_fresh_runs(name: str, way: str) -> None:
    """Case 78. The way to ask many questions about one document."""
    model, document = shared_model(name), prompt(1, 2 * BLOCK + 3)
    settings = {"block_size": BLOCK}
    cache = PagedCache(model, **settings)
    fill(model, cache, document)
    for question in range(2):
        said = torch.cat((document, prompt(1, 4, seed=question + 1)), dim=1)
        want = reference(model, said, new=4)
        twin = WAYS[way](cache, model, settings)
        PagedCache(model)
        assert generate(model, said, twin, new=4).tolist() == want.tolist()
        assert_sound(cache, 2 * BLOCK + 3)


def test_a_fork_takes_blocks_only_for_what_it_writes() -> None:
    """Case 78. Memory is not multiplied, and comes back with the fork."""
    model, cache = shared_model("llama"), paged()
    fill(model, cache, prompt(1, 4 * BLOCK + 3))
    held = cache.stats().used_blocks
    forks = [cache.fork() for _ in range(8)]
    assert cache.stats().used_blocks == held
    for seed, fork in enumerate(forks):
        fill(model, fork, prompt(1, 2, seed=seed))
    assert cache._state.groups[0].manager.pool.num_referenced <= held + 8
    died = [weakref.ref(fork) for fork in forks]
    del fork, forks
    assert [ref() for ref in died] == [None] * 8
    assert cache.stats().used_blocks == held
    assert cache._state.groups[0].manager.pool.num_referenced == held
    cache.check_integrity()


@pytest.mark.parametrize("format_name", ["auto", "int8", "int4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_saved_cache_goes_on_with_the_same_tokens(name: str, format_name: str, tmp_path: Path) -> None:
    """Case 79. Loaded with `weights_only=True`, into a cache with the same settings."""
    model, settings = shared_model(name), {"block_size": BLOCK, "kv_cache_dtype": format_name}
    cache = PagedCache(model, **settings)
    said = generate(model, prompt(2, BLOCK + 3), cache, new=4)
    torch.save(cache.state_dict(), tmp_path / "cache.pt")
    twin = PagedCache(model, **settings)
    twin.load_state_dict(torch.load(tmp_path / "cache.pt", weights_only=True))
    assert_sound(twin, int(cache.get_seq_length()))
    longer = torch.cat((said, prompt(2, 3, seed=5)), dim=1)
    want = generate(model, longer, cache, new=6)
    assert generate(model, longer, twin, new=6).tolist() == want.tolist()


OTHER_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "bits": ({"kv_cache_dtype": "int8"}, "kv_cache_dtype"),
    "block size": ({"block_size": 2 * BLOCK}, "block_size"),
}


@pytest.mark.parametrize("other", [*OTHER_SETTINGS, "model", "version", "no dict"])
def test_what_was_saved_for_another_cache_is_refused_and_changes_nothing(other: str) -> None:
    """Case 79. Never misread."""
    source, model = paged(), shared_model("llama")
    fill(model, source, prompt(1, BLOCK + 3))
    saved: Any = source.state_dict()
    options, message = OTHER_SETTINGS.get(other, ({}, "."))
    name = "gpt-neox" if other == "model" else "llama"
    target = PagedCache(shared_model(name), **{"block_size": BLOCK, **options})
    if other == "version":
        saved = saved | {"version": -1}
    elif other == "no dict":
        saved = list(saved)
    with pytest.raises(PagedCacheError, match=message):
        target.load_state_dict(saved)
    assert_sound(target, 0)


@pytest.mark.parametrize("format_name", ["auto", "int4"])
def test_a_snapshot_that_lacks_any_of_its_parts_is_refused_and_changes_nothing(format_name: str) -> None:
    """Case 79. Cut anywhere."""
    cache, model = paged(kv_cache_dtype=format_name), shared_model("llama")
    fill(model, cache, prompt(1, BLOCK + 3))
    saved = cache.state_dict()
    for part in saved:
        with pytest.raises(PagedCacheError, match="state_dict"):
            cache.load_state_dict({name: value for name, value in saved.items() if name != part})
        assert_sound(cache, BLOCK + 3)


def test_a_file_that_was_cut_is_not_read(tmp_path: Path) -> None:
    """Case 79. The error is that of `torch.load`, before the cache is asked."""
    cache = paged()
    fill(shared_model("llama"), cache, prompt(1, BLOCK + 3))
    torch.save(cache.state_dict(), tmp_path / "cache.pt")
    whole = (tmp_path / "cache.pt").read_bytes()
    for share in (0.3, 0.9):
        (tmp_path / "cut.pt").write_bytes(whole[: int(share * len(whole))])
        with pytest.raises((RuntimeError, EOFError, OSError)):
            torch.load(tmp_path / "cut.pt", weights_only=True)
