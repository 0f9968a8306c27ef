"""What one run checks; the same for the supervisor and its workers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

DEFAULT_BUDGET_S = 480.0
DRY_RUN_BUDGET_S = 180.0


@dataclass(frozen=True)
class Settings:
    """One run.

    Attributes:
        dry_run: toy sizes on the CPU.
        backend: value of `HF_PAGED_CACHE_BACKEND` in every worker.
        seed: where all random inputs come from.
        budget_s: seconds for everything.
        sections: letters of the sections to run.
        jobs: workers at one time, where nothing is timed.
    """

    dry_run: bool = False
    backend: str = "triton"
    seed: int = 0
    budget_s: float = DEFAULT_BUDGET_S
    sections: tuple[str, ...] = ("a", "b", "c", "d")
    jobs: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Settings:
        """The inverse of `to_dict`."""
        return cls(**fields | {"sections": tuple(fields["sections"])})
