"""Pictures of a cache. matplotlib is asked for when one is drawn, and not before."""

from __future__ import annotations

from .figure import new_figure
from .stats import draw_stats

__all__ = ["draw_stats", "new_figure"]
