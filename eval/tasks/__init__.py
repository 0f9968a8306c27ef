"""The tasks and their registry."""

from eval.tasks.base import Sample, Task
from eval.tasks.fidelity import Fidelity
from eval.tasks.latency import Latency
from eval.tasks.perplexity import Perplexity
from eval.tasks.retrieval import Retrieval
from eval.tasks.texts import Summarization, Translation

__all__ = ["TASKS", "Sample", "Task"]

TASKS: dict[str, Task] = {
    task.name: task
    for task in (Summarization(), Translation(), Retrieval(), Perplexity(), Fidelity(), Latency())
}
"""Name -> task, in the order of the table."""
