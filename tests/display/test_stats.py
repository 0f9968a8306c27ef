"""The picture of a cache's counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_paged_cache import PagedCache
from tests.support.models import shared_model
from tests.support.quantized import BLOCK, cache_of, feed, ids

pytest.importorskip("matplotlib")


def texts_of(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_the_picture_has_a_bar_with_its_number_for_every_kind_and_format() -> None:
    model = shared_model("llama")
    cache = cache_of(model, "int4")
    feed(model, cache, ids(5 * BLOCK + 3))
    stats = cache.stats()
    blocks, sizes = stats.plot().axes
    counts = stats.groups[0].blocks_by_kind
    assert [label.get_text() for label in blocks.get_yticklabels()] == ["open", "sealed", "shared"]
    assert texts_of(blocks) == [str(counts[kind]) for kind in ("open", "sealed", "shared")]
    assert f"{counts['free']} of {stats.num_blocks} are free" in blocks.get_title()
    assert [label.get_text() for label in sizes.get_yticklabels()] == ["model's dtype", "int4"]
    kib = [count / 1024 for count in stats.bytes_by_format.values()]
    assert texts_of(sizes) == [f"{value:,.1f}" for value in kib]
    assert sizes.get_xlabel() == "K and V in blocks (KiB)"


def test_groups_of_layers_have_bars_of_their_own_and_a_legend() -> None:
    model = shared_model("gemma3")
    cache = PagedCache(model, block_size=16, max_tokens=256)
    feed(model, cache, ids(40))
    blocks = cache.stats().plot().axes[0]
    labels = [text.get_text() for text in blocks.get_legend().get_texts()]
    assert labels == ["2 layers, window of 8", "1 layer, all tokens"]
    assert len(texts_of(blocks)) == 2 * 3
    hatches = {bar.get_hatch() for container in blocks.containers for bar in container}
    assert len(hatches) == 2  # told apart without colour


def test_an_empty_cache_is_drawn_too(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    PagedCache(shared_model("llama")).stats().plot(path)
    assert path.read_bytes()[:5] == b"<?xml"
