"""The tasks, one file each, and their registry."""

from __future__ import annotations

from eval.tasks.base import Sample, Task
from eval.tasks.summarization import Summarization
from eval.tasks.translation import Translation

__all__ = ["TASKS", "Sample", "Task"]

TASKS: dict[str, Task] = {task.name: task for task in (Summarization(), Translation())}
"""Name -> task."""
