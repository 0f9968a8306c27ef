"""Figures that show themselves in notebooks, and the units of bytes in them."""

from __future__ import annotations

from typing import Any

import pytest

from hf_paged_cache import PagedCache
from hf_paged_cache.display.figures import byte_unit
from hf_paged_cache.errors import PagedCacheError
from tests.support.models import shared_model

pytest.importorskip("matplotlib")


def test_a_notebook_shows_the_figure_without_pyplot() -> None:
    figure: Any = PagedCache(shared_model("llama")).stats().plot()
    assert figure._repr_png_()[:4] == b"\x89PNG"


def test_without_matplotlib_the_way_to_get_it_is_named(without_matplotlib: None) -> None:
    with pytest.raises(PagedCacheError, match=r'pip install "hf-paged-cache\[plots\]"'):
        PagedCache(shared_model("llama")).stats().plot()


@pytest.mark.parametrize(
    ("count", "unit"), [(0, "KiB"), (1023, "KiB"), (2**20 - 1, "KiB"), (2**20, "MiB"), (2**40, "GiB")]
)
def test_bytes_are_drawn_in_the_largest_unit_that_fits(count: int, unit: str) -> None:
    assert byte_unit(count)[0] == unit
