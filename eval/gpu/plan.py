"""The plan of a run, item by item, and how its time is shared out; the same for all its processes."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from eval.core.table import Row

if TYPE_CHECKING:
    from eval.core.hardware import Device

DEFAULT_BUDGET_S = 480.0
DRY_RUN_BUDGET_S = 180.0
RESERVE_S = 8.0  # kept back for stopping workers and for the report


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
    run: Callable[[Record, Device], None]  # does it and fills the record, which is kept if it crashes
    needs_s: float = 1.0  # it is not begun with less time than this
    limit_s: float = 60.0  # it is stopped after so long
    optional: bool = False  # see `Record`


@dataclass(frozen=True)
class Settings:
    """One run."""

    dry_run: bool = False  # toy sizes on the CPU
    backend: str = "triton"  # value of `HF_PAGED_CACHE_BACKEND` in every worker
    seed: int = 0  # where all random inputs come from
    budget_s: float = DEFAULT_BUDGET_S  # seconds for everything
    sections: tuple[str, ...] = ("a", "b", "c", "d")  # letters of the sections to run
    jobs: int = 1  # workers at one time, where nothing is timed


@dataclass(frozen=True)
class Section:
    """A part of the run."""

    title: str  # a few words
    phase: str  # sections of one phase run at the same time; only in `CORRECTNESS` several processes do
    modules: tuple[str, ...]  # whose `items` it consists of, as `module` or `module:function`


CORRECTNESS = "correctness"
SECTIONS = {
    "a": Section("kernels against float64", CORRECTNESS, ("kernels", "formats")),
    "b": Section("generate against DynamicCache", CORRECTNESS, ("parity",)),
    "c": Section("decode attention, one layer", "attention", ("benches:attention",)),
    "d": Section("generate over a long context", "end to end", ("benches:end_to_end",)),
}
# Share of the time that each phase may take; what it leaves goes to the next. Interpreted, correctness takes
# longest.
PHASE_WEIGHTS = {CORRECTNESS: 0.32, "attention": 0.25, "end to end": 0.43}
DRY_RUN_PHASE_WEIGHTS = {CORRECTNESS: 0.55, "attention": 0.15, "end to end": 0.3}


def phases_of(settings: Settings) -> dict[str, list[str]]:
    """The phases of a run in their order, and the letters of their sections."""
    phases: dict[str, list[str]] = {}
    for letter in settings.sections:
        phases.setdefault(SECTIONS[letter].phase, []).append(letter)
    return phases


def deadline(settings: Settings, phase: str, ends: float, now: float | None = None) -> float:
    """When a phase that begins now has to end. It and the phases after it share what is left until `ends`."""
    now = time.time() if now is None else now
    weights = DRY_RUN_PHASE_WEIGHTS if settings.dry_run else PHASE_WEIGHTS
    names = list(phases_of(settings))
    share = weights[phase] / sum(weights[name] for name in names[names.index(phase) :])
    return now + share * max(0.0, ends - now)


def items_of(letter: str, settings: Settings) -> list[Item]:
    """The items of a section; what they need is imported now."""
    items: list[Item] = []
    for name in SECTIONS[letter].modules:
        module, _, function = name.partition(":")
        items += getattr(importlib.import_module(f"eval.gpu.{module}"), function or "items")(settings)
    keys = [item.key for item in items]
    assert len(set(keys)) == len(keys), f"two items of section {letter} have one key"
    return items
