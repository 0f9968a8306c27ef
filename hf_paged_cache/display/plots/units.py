"""In which unit bytes are drawn."""

from __future__ import annotations

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def byte_unit(largest_bytes: float) -> tuple[str, int]:
    """The largest unit of which there is at least one, and its bytes; KiB for less."""
    return next((unit for unit in _UNITS if largest_bytes >= unit[1]), _UNITS[-1])
