"""Errors a user of the harness can cause, and the look-up that raises most of them."""

from collections.abc import Iterable


class UsageError(ValueError):
    """A request that cannot be met; one line with the valid choices; exit code 2."""


def chosen(kind: str, only: str, choices: Iterable[str]) -> list[str]:
    """The names in what `--only` was given, in the order of `choices`; a `UsageError` if one is unknown."""
    names = {name.strip() for name in only.split(",") if name.strip()}
    if not names:
        raise UsageError(f"--only needs at least one name; choose from: {', '.join(sorted(choices))}")
    for name in sorted(names):
        check_choice(kind, name, choices)
    return [name for name in choices if name in names]


def check_choice(kind: str, name: str, choices: Iterable[str]) -> str:
    """Return `name` if it is one of `choices`; else a `UsageError` names `kind`, `name` and the choices."""
    valid = sorted(choices)
    if name not in valid:
        raise UsageError(f"unknown {kind} {name!r}; choose from: {', '.join(valid)}")
    return name
