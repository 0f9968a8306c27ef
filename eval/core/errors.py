"""Errors a user of the harness can cause, and the look-up that raises most of them."""

from __future__ import annotations

from collections.abc import Iterable


class UsageError(ValueError):
    """A request that cannot be met; one line with the valid choices; exit code 2."""


def check_choice(kind: str, name: str, choices: Iterable[str]) -> str:
    """Return `name` if it is one of `choices`; else a `UsageError` names `kind`, `name` and the choices."""
    valid = sorted(choices)
    if name not in valid:
        raise UsageError(f"unknown {kind} {name!r}; choose from: {', '.join(valid)}")
    return name
