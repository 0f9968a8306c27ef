"""A plan of memory before anything is loaded: bytes of a cache by format, and how far a memory reaches."""

from __future__ import annotations

from .memory_plan import FormatPlan, MemoryPlan
from .planning import plan_memory

__all__ = ["FormatPlan", "MemoryPlan", "plan_memory"]
