"""Pictures of a cache. matplotlib is asked for when one is drawn, and not before."""

from __future__ import annotations

from .figure import new_figure
from .stats import draw_stats
from .timeline import draw_timelines

__all__ = ["draw_stats", "draw_timelines", "new_figure"]
