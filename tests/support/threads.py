"""Several calls at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def in_threads(jobs: list[Callable[[], Any]]) -> list[Any]:
    """What each job returns or raises, all of them started at once."""
    results: list[Any] = [None] * len(jobs)

    def run(index: int) -> None:
        try:
            results[index] = jobs[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
