"""What an examination says: plain data, and its text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was tried.

    Attributes:
        name: What.
        is_ok: Whether it went well.
        detail: How, or what went wrong.
    """

    name: str
    is_ok: bool
    detail: str


@dataclass(frozen=True)
class Report:
    """The state of a machine.

    Attributes:
        versions: Package -> version, None if it is not installed.
        machine: What it is: device, capability, processor, instruction set, memory.
        environment: Variables that are set and change what runs.
        backends: Backend -> whether it runs for blocks on this device, or why not; fastest first.
        compiler: The C++ compiler with its version, or why there is none.
        cache_folder: Where compiled kernels are kept.
        checks: What was tried.
        problems: What is wrong, with ways out; healthy if there is nothing.
        seconds: What the checks took, without compiling.
    """

    versions: dict[str, str | None]
    machine: dict[str, str]
    environment: dict[str, str]
    backends: dict[str, str]
    compiler: str
    cache_folder: str
    checks: tuple[Check, ...]
    problems: tuple[str, ...]
    seconds: float

    @property
    def is_healthy(self) -> bool:
        """Whether the fastest backend of this device runs, and computes what it should."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """As dicts, lists, numbers and strings."""
        return {**asdict(self), "is_healthy": self.is_healthy}

    def __str__(self) -> str:
        checks = {check.name: f"{'ok' if check.is_ok else 'FAILED'}: {check.detail}" for check in self.checks}
        parts = [
            ("versions", {name: version or "not installed" for name, version in self.versions.items()}),
            ("machine", self.machine),
            ("environment", self.environment or {"(nothing set)": ""}),
            ("backends, fastest first", self.backends),
            ("kernels", {"compiler": self.compiler, "cache folder": self.cache_folder}),
            (f"self-test, {self.seconds:.1f} s", checks),
        ]
        lines = [line for title, rows in parts for line in (title, *_aligned(rows), "")]
        if self.is_healthy:
            return "\n".join([*lines, "healthy"])
        return "\n".join([*lines, "NOT HEALTHY", *(f"  - {problem}" for problem in self.problems)])


def _aligned(rows: dict[str, str]) -> list[str]:
    width = max(map(len, rows), default=0)
    return [f"  {name.ljust(width)}  {text}".rstrip() for name, text in rows.items()]
