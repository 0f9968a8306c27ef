"""Reports of a run: the table in the terminal, and the files of its folder."""

from __future__ import annotations

from typing import Any

__all__ = ["read", "results_json", "table", "write"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Imported on first use: the command line of the README's tables lies here too, and must not take seconds.
    from eval.report import files, terminal

    return getattr(terminal if name == "table" else files, name)
