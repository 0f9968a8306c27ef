"""The unit of work: an item is run in a worker and leaves a record, whatever happens to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from eval.core.table import Row

if TYPE_CHECKING:
    from eval.core.hardware import Device


@dataclass(frozen=True)
class Check:
    """A statement that has to hold for the code to be right."""

    what: str
    holds: bool
    detail: str = ""


@dataclass
class Record:
    """What came of an item."""

    key: str  # the item's
    values: dict[str, Any] = field(default_factory=dict)  # numbers and texts, ready for JSON
    checks: list[Check] = field(default_factory=list)  # what had to hold
    rows: list[Row] = field(default_factory=list)  # of a bench
    skipped: str | None = None  # why it did not run, or None
    crash: str | None = None  # a traceback or how the worker died, or None
    optional: bool = False  # nothing of ours fails with it (another library's kernel, say)
    seconds: float = 0.0  # how long it took

    @property
    def status(self) -> str:
        """`ok`, `wrong`, `crashed`, `unavailable` (an optional item crashed), `skipped`."""
        if self.crash is not None:
            return "unavailable" if self.optional else "crashed"
        if self.skipped is not None:
            return "skipped"
        return "ok" if all(check.holds for check in self.checks) else "wrong"

    @property
    def is_failure(self) -> bool:
        """Whether something of ours is wrong. An item that crashed after a failed check counts too."""
        return self.status in ("wrong", "crashed") or not all(check.holds for check in self.checks)

    @property
    def reason(self) -> str:
        """One line on what is not as it should be; empty if all is well."""
        failed = [f"{check.what} {check.detail}".strip() for check in self.checks if not check.holds]
        if not failed and self.crash is not None:
            return (self.crash.strip().splitlines() or ["?"])[-1]
        return "; ".join(failed) or " ".join((self.skipped or "").split())

    def check(self, what: str, holds: bool, detail: str = "") -> bool:
        """Note a check; returns whether it holds. `detail` says what is wrong if it does not."""
        self.checks.append(Check(what, bool(holds), "" if holds else detail))
        return bool(holds)

    def bound(self, what: str, value: float, limit: float) -> bool:
        """Note that a number has to be at most `limit`; NaN never is."""
        return self.check(what, value <= limit, f"{value:.2e}, allowed {limit:.2g}")

    def attempt(self, what: str, statement: Callable[[], object]) -> bool:
        """Note whether a function of assertions passes; it must not launch anything on the device."""
        try:
            statement()
        except AssertionError as error:
            return self.check(what, False, str(error))
        return self.check(what, True)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; the rows are in the tables of benches."""
        fields = asdict(self)
        del fields["rows"]
        return {**fields, "status": self.status}


@dataclass(frozen=True)
class Item:
    """Something to run."""

    key: str  # unique in its section; parts are separated by `/`
    # does it and fills the record. What it has filled in before it crashes is kept
    run: Callable[[Record, Device], None]
    needs_s: float = 1.0  # it is not begun with less time than this
    limit_s: float = 60.0  # it is stopped after so long
    optional: bool = False  # see `Record`
