"""Reports in groups, and in words: what both the table on the screen and the page for users say."""

from __future__ import annotations

from collections.abc import Sequence

from eval.zoo import checks, reads
from eval.zoo.checks import Verdict
from eval.zoo.examine import RUNS, Report

WRONG = "wrong"
UNKNOWN = "not looked at"
REFUSED = "refused"

GROUPS = {
    WRONG: "PagedCache does not give what the default cache gives. This is a bug",
    reads.BLOCKS: "Attention reads the blocks in place",
    reads.MIXED: "Some layers read the blocks in place, others get dense tensors",
    reads.DENSE: "The model's own code reads K and V, which become dense tensors at every step",
    reads.NONE: "Nothing lies in blocks: what the layers keep is stored by transformers' own classes",
    REFUSED: "Refused with an error when the cache is made or first used",
    UNKNOWN: "Not looked at: it cannot be built or run by itself",
}
"""Every group and what it means, in the order of the tables."""


def group_of(report: Report) -> str:
    """The group that a report belongs to."""
    if report.is_wrong:
        return WRONG
    if report.refusal is not None:
        return REFUSED
    statuses = {verdict.status for verdict in report.verdicts.values()}
    return report.reads if checks.EQUAL in statuses else UNKNOWN


def grouped(reports: Sequence[Report]) -> dict[str, list[Report]]:
    """Reports by group, those without any left out, each sorted by name."""
    by_name = sorted(reports, key=lambda report: report.name)
    found = {group: [report for report in by_name if group_of(report) == group] for group in GROUPS}
    return {group: members for group, members in found.items() if members}


def counts(reports: Sequence[Report]) -> dict[str, int]:
    """How many reports each group has."""
    return {group: len(members) for group, members in grouped(reports).items()}


def headline(reports: Sequence[Report]) -> str:
    """The counts as a line: types, and classes by group."""
    types = len({report.model_type for report in reports})
    parts = ", ".join(f"{count} {group}" for group, count in counts(reports).items())
    return f"{types} types, {len(reports)} model classes: {parts}"


def checks_in_words(report: Report) -> str:
    """`equal`, or which cases are not, and why."""
    if report.problem is not None:
        return report.problem
    if report.refusal is not None:
        return report.refusal
    others = [
        f"{name} {_in_words(verdict)}"
        for name, verdict in report.verdicts.items()
        if verdict.status != checks.EQUAL
    ]
    return "; ".join(([checks.EQUAL] if len(others) < len(report.verdicts) else []) + others)


def _in_words(verdict: Verdict) -> str:
    reason = f" ({verdict.reason})" if verdict.reason else ""
    if verdict.default is None or verdict.status == checks.AS_DEFAULT:
        return f"{verdict.status}{reason}"
    if verdict.default == verdict.status:
        return f"{verdict.status} with the default cache too{reason}"
    return f"{verdict.status}, default cache {verdict.default}{reason}"


def formats_in_words(report: Report) -> str:
    """`all`, or those that run, and why others do not."""
    runs = [name for name, outcome in report.formats.items() if outcome == RUNS]
    if not report.formats or not runs:
        return ""
    if len(runs) == len(report.formats):
        return "all"
    others = [f"{name} {outcome}" for name, outcome in report.formats.items() if outcome != RUNS]
    return f"{', '.join(runs)}; {'; '.join(others)}"
