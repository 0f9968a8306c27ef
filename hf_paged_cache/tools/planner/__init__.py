"""A plan of memory before anything is loaded: the bytes of a cache by format, and how far a memory reaches.

`plan_memory` asks the code that sizes pools, for shapes that the model itself has shown in a forward on the
meta device. So its numbers are those of the real cache, to the byte.
"""

from __future__ import annotations

from .memory_plan import FormatPlan, MemoryPlan
from .planning import plan_memory

__all__ = ["FormatPlan", "MemoryPlan", "plan_memory"]
