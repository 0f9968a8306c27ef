"""The speeds that are aimed at, and whether they were reached. They do not decide the exit code."""

from __future__ import annotations

from dataclasses import dataclass

from eval.core.table import Bound
from eval.gpu.items import Record

MIN_PERCENT_OF_COPY = 85.0
BATCHES, TOKENS = (8, 32), (8192, 32768, 131072)
"""Where that is aimed at."""
MIN_SPEEDUPS = {"8x32768": 2.0, "1x512": 1.0}
"""Of `PagedCache` over `DynamicCache`, end to end."""


@dataclass(frozen=True)
class Goal:
    """A bound, or why it was not measured."""

    what: str
    bound: Bound | None
    reason: str = ""

    @property
    def state(self) -> str:
        """`reached`, `missed` or `not measured`."""
        if self.bound is None:
            return "not measured"
        return "reached" if self.bound.holds else "missed"

    def __str__(self) -> str:
        if self.bound is None:
            return f"not measured  {self.what} ({self.reason})"
        return f"{self.state:12}  {self.what}: {self.bound.value:.4g}, goal {self.bound.limit:g}"

    def to_dict(self) -> dict[str, object]:
        """Ready for JSON."""
        bound = self.bound
        return {
            "what": self.what,
            "state": self.state,
            "value": None if bound is None else bound.value,
            "limit": None if bound is None else bound.limit,
            "reason": self.reason,
        }


def goals_of(records: dict[str, dict[str, Record]], letters: tuple[str, ...]) -> list[Goal]:
    """The goals of the sections that were asked for."""
    goals: list[Goal] = []
    if "c" in letters:
        for batch in BATCHES:
            for tokens in TOKENS:
                what = f"decode, batch {batch}, {tokens} tokens, % of copy bandwidth"
                record = records.get("c", {}).get(f"decode/{batch}x{tokens}")
                goals.append(_goal(what, record, _percent(record), MIN_PERCENT_OF_COPY))
    if "d" in letters:
        for size, limit in MIN_SPEEDUPS.items():
            batch_size, context = size.split("x")
            what = f"end to end, batch {batch_size}, {context} tokens, x DynamicCache"
            record = records.get("d", {}).get(f"eager/{size}")
            value = None if record is None else record.values.get("paged_over_dynamic")
            goals.append(_goal(what, record, value, limit))
    return goals


def _percent(record: Record | None) -> float | None:
    """Of the kernels alone where a graph was captured, otherwise with the calls in between."""
    if record is None:
        return None
    values = record.values
    share: float | None = values.get("graph_percent_of_copy", values.get("eager_percent_of_copy"))
    return share


def _goal(what: str, record: Record | None, value: float | None, limit: float) -> Goal:
    if value is not None:
        return Goal(what, Bound(what, value, limit))
    return Goal(what, None, "not run" if record is None else f"{record.status}: {record.reason}"[:120])
