"""Figures without pyplot: nothing is registered anywhere, no window opens; matplotlib is asked for late."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_paged_cache.errors import PagedCacheError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 120
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def new_figure(width_inches: float, height_inches: float, *, instead: str) -> Figure:
    """An empty figure that a notebook shows. PagedCacheError without matplotlib names what to use instead."""
    try:
        import matplotlib  # noqa: F401  # here, so that nothing but its absence is told as that

        from .shown_figure import ShownFigure
    except ImportError as error:
        raise PagedCacheError(
            f'pictures need matplotlib; `pip install "hf-paged-cache[plots]"`, or use {instead}'
        ) from error
    return ShownFigure(figsize=(width_inches, height_inches), dpi=_DPI, layout="constrained")


def byte_unit(largest_bytes: float) -> tuple[str, int]:
    """The largest unit of which there is at least one, and its bytes; KiB for less."""
    return next((unit for unit in _UNITS if largest_bytes >= unit[1]), _UNITS[-1])
