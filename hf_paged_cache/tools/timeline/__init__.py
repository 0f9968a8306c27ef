"""Memory over the course of a generation, for any cache of `transformers`."""

from __future__ import annotations

from .record import MemoryTimeline, Moment

__all__ = ["MemoryTimeline", "Moment"]
