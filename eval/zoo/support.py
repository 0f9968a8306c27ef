"""Reports in groups, in words and in tables: on the screen, and on a page for users."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eval.core.table import markdown
from eval.zoo import checks, kinds, reads, runs
from eval.zoo.checks import CASES, Verdict
from eval.zoo.examine import RUNS, Options, Report

WRONG, UNKNOWN, REFUSED = "wrong", "not looked at", "refused"

# Every group and what it means, in the order of the tables.
GROUPS = {
    WRONG: "PagedCache does not give what the default cache gives. This is a bug",
    reads.BLOCKS: "Attention reads the blocks in place",
    reads.MIXED: "Some layers read the blocks in place, others get dense tensors",
    reads.DENSE: "The model's own code reads K and V, which become dense tensors at every step",
    reads.NONE: "Nothing lies in blocks: what the layers keep is stored by transformers' own classes",
    REFUSED: "Refused with an error when the cache is made or first used",
    UNKNOWN: "Not looked at: it cannot be built or run by itself",
}


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


def headline(reports: Sequence[Report]) -> str:
    """Types, and classes by group, in a line."""
    types = len({report.model_type for report in reports})
    parts = ", ".join(f"{len(members)} {group}" for group, members in grouped(reports).items())
    return f"{types} types, {len(reports)} model classes: {parts}"


def checks_in_words(report: Report) -> str:
    """`equal`, or which cases are not, and why."""
    if (why := report.problem or report.refusal) is not None:
        return why
    verdicts = report.verdicts.items()
    others = [f"{name} {_in_words(found)}" for name, found in verdicts if found.status != checks.EQUAL]
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
    running = [name for name, outcome in report.formats.items() if outcome == RUNS]
    if not running or len(running) == len(report.formats):
        return "all" if running else ""
    others = [f"{name} {outcome}" for name, outcome in report.formats.items() if outcome != RUNS]
    return f"{', '.join(running)}; {'; '.join(others)}"


# --- tables -------------------------------------------------------------------------------------------------

_COLOURS = {WRONG: "red", REFUSED: "yellow", UNKNOWN: "dim"}


def page(reports: Sequence[Report], options: Options, environment: dict[str, Any]) -> str:
    """The page, with a section for every group."""
    versions = environment["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in ("transformers", "torch", "hf-paged-cache"))
    cases = "; ".join(f"*{case.name}*, {case.meaning}" for case in CASES)
    attention = options.attention or "the attention that transformers chooses"
    parts = [
        "# Which models PagedCache serves",
        f"**{headline(reports)}.**",
        f"Written by `python -m eval zoo` with {packages}, blocks of {options.block_size} tokens, "
        f"{attention}, on a CPU. Every generative class that transformers registers is built tiny, with "
        "random weights, and generates with the default cache and with PagedCache: "
        f"{cases}. *equal* means the same tokens and logits in float32 (within {runs.TOLERANCE:g} of "
        "their standard deviation; where two logits lie closer than that, tokens may part). A format is "
        "listed where a prompt of more than two blocks and some steps run in it; what it loses depends on "
        "trained weights, and is not seen here.",
        "Layers are those of the tiny configs (windows are switched on where a type can have them): "
        + "; ".join(f"*{kind}* {meaning}" for kind, meaning in kinds.KINDS.items())
        + ".",
    ]
    for group, members in grouped(reports).items():
        headings = ["type", "class", "layers", "formats", "checks"]
        rows = [[f"`{report.name}`", f"`{report.class_name}`", *_cells(report)] for report in members]
        if group in (REFUSED, UNKNOWN):
            headings, rows = ["type", "class", "why"], [[*row[:2], row[-1]] for row in rows]
        parts += [f"## {GROUPS[group]} ({len(members)})", markdown(headings, rows)]
    return "\n\n".join(parts) + "\n"


def _cells(report: Report) -> list[str]:
    return [", ".join(report.kinds), formats_in_words(report), checks_in_words(report)]


def show(console: Console, reports: Sequence[Report]) -> None:
    """Print one table, group by group."""
    table = Table(title="model types and PagedCache", title_justify="left", title_style="bold")
    for heading in ("type", "K and V", "layers", "formats", "checks"):
        table.add_column(heading, overflow="fold")
    for group, members in grouped(reports).items():
        for report in members:
            table.add_row(*map(escape, (report.name, group, *_cells(report))), style=_COLOURS.get(group))
        table.add_section()
    console.print(table)
    console.print(headline(reports), highlight=False)
