"""The page for users: a Markdown table of all types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval.zoo import compare, groups, kinds
from eval.zoo.checks import CASES
from eval.zoo.examine import Options, Report

_CASES = {
    "plain": "a batch without padding",
    "padded": "prompts of several lengths, padded on the left",
    "second turn": "the same cache given again with the longer conversation",
    "beams": "beam search",
}


def page(reports: Sequence[Report], options: Options, environment: dict[str, Any]) -> str:
    """The page, with a section for every group.

    Args:
        reports: what was found out.
        options: how.
        environment: as `eval.core.device` describes it.
    """
    versions = environment["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in ("transformers", "torch", "hf-paged-cache"))
    attention = options.attention or "the attention that transformers chooses"
    parts = [
        "# Which models PagedCache serves",
        f"**{groups.headline(reports)}.**",
        f"Written by `python -m eval.zoo` with {packages}, blocks of {options.block_size} tokens, "
        f"{attention}, on a CPU. Every generative class that transformers registers is built tiny, with "
        "random weights, and generates with the default cache and with PagedCache: "
        f"{_listed()}. *equal* means the same tokens and logits in float32 (within {compare.TOLERANCE:g} of "
        "their standard deviation; where two logits lie closer than that, tokens may part). A format is "
        "listed where a prompt of more than two blocks and some steps run in it; what it loses depends on "
        "trained weights, and is not seen here.",
        "Layers are those of the tiny configs (windows are switched on where a type can have them): "
        + "; ".join(f"*{kind}* {meaning}" for kind, meaning in kinds.KINDS.items())
        + ".",
    ]
    for group, members in groups.grouped(reports).items():
        parts += [f"## {groups.GROUPS[group]} ({len(members)})", _table(group, members)]
    return "\n\n".join(parts) + "\n"


def _listed() -> str:
    return "; ".join(f"*{case.name}*, {_CASES[case.name]}" for case in CASES)


def _table(group: str, members: list[Report]) -> str:
    if group in (groups.REFUSED, groups.UNKNOWN):
        head = ["type", "class", "why"]
        rows = [[_code(r.name), _code(r.class_name), groups.checks_in_words(r)] for r in members]
    else:
        head = ["type", "class", "layers", "formats", "checks"]
        rows = [
            [
                _code(report.name),
                _code(report.class_name),
                ", ".join(report.kinds),
                groups.formats_in_words(report),
                groups.checks_in_words(report),
            ]
            for report in members
        ]
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _code(text: str) -> str:
    return f"`{text}`"
