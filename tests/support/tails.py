"""Long lists of parameters, of which `make test` runs a few and `make test-full` the rest."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def few(values: Iterable[Any], quick: Container[str]) -> list[Any]:
    """The values, those whose name (or text) is not among the quick ones marked as `full`."""
    return [
        value if _name(value) in quick else pytest.param(value, marks=pytest.mark.full) for value in values
    ]


def _name(value: Any) -> str:
    return str(getattr(value, "name", value))
