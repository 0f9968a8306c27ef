"""A plan as text and as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from .amounts import shown

if TYPE_CHECKING:
    from .plan import FormatPlan, MemoryPlan

_HEADER = ("format", "tier", "bytes/token", "a request", "the batch", "pools + states")
_LIMITS = ("fits", "max context", "max batch")


def as_text(plan: MemoryPlan) -> str:
    """The plan's summary, and a line for every format."""
    lines = [*_summary(plan), "", *_aligned(_rows(plan))]
    verdict = plan.verdict()
    if verdict is not None:
        lines += ["", verdict]
    return "\n".join([*lines, *_remarks(plan)])


def as_html(plan: MemoryPlan) -> str:
    """The same for a notebook."""
    header, *rows = _rows(plan)
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    below = [line for line in (plan.verdict(), *_remarks(plan)) if line]
    return (
        f"<p>{'<br>'.join(escape(line) for line in _summary(plan))}</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        f"<p>{'<br>'.join(escape(line) for line in below)}</p>"
    )


def verdict(plan: MemoryPlan) -> str:
    """Whether the plan fits, and what would if it does not."""
    chosen, memory, weights = plan.chosen, plan.memory_bytes or 0, plan.weight_bytes or 0
    asked = f"{plan.context:,} tokens x {plan.batch:,}"
    left = memory - weights - chosen.cache_bytes
    if left >= 0:
        return f"{chosen.kv_cache_dtype} fits: {shown(left)} are left for activations and everything else."
    missing = f"{chosen.kv_cache_dtype} does not fit: {asked} and the weights need {shown(-left)} more."
    fitting = [one.kv_cache_dtype for one in plan.formats if one.fits]
    if fitting:
        return f"{missing} What fits: {', '.join(fitting)}."
    if weights >= memory:
        return f"Nothing fits: the weights take {shown(weights)} of {shown(memory)}."
    return f"Nothing fits. {missing} What would: {'; '.join(_ways_out(plan, weights))}."


def _ways_out(plan: MemoryPlan, weights: int) -> list[str]:
    smallest = min(plan.formats, key=lambda one: one.cache_bytes)
    widest = max(plan.formats, key=lambda one: one.max_batch or 0)
    longest = max(plan.formats, key=lambda one: one.max_context or 0)
    found = []
    if widest.max_batch:
        found.append(f"a batch of {widest.max_batch:,} in {widest.kv_cache_dtype}")
    if longest.max_context:
        found.append(f"a context of {longest.max_context:,} in {longest.kv_cache_dtype}")
    needed = weights + smallest.cache_bytes
    return [*found, f"a memory of {shown(needed)} ({needed:,} bytes) with {smallest.kv_cache_dtype}"]


def _summary(plan: MemoryPlan) -> list[str]:
    limit = "" if plan.max_positions is None else f" (made for {plan.max_positions:,})"
    lines = [
        f"{plan.model_type} in {plan.dtype}: {plan.context:,} tokens{limit} x {plan.batch:,} "
        f"{'request' if plan.batch == 1 else 'requests'}, blocks of {plan.block_size} tokens"
    ]
    sizes = []
    if plan.weight_bytes is not None:
        sizes.append(f"weights {shown(plan.weight_bytes)}")
    if plan.memory_bytes is not None:
        sizes.append(f"memory {shown(plan.memory_bytes)}")
    return [*lines, ", ".join(sizes)] if sizes else lines


def _remarks(plan: MemoryPlan) -> list[str]:
    return [
        *(f"{name}: {why}" for name, why in plan.refused.items()),
        *plan.notes,
        f"PagedCache(model, kv_cache_dtype={plan.kv_cache_dtype!r}, max_tokens={plan.max_tokens})",
    ]


def _rows(plan: MemoryPlan) -> list[Sequence[str]]:
    has_limits = plan.memory_bytes is not None
    header = (*_HEADER, *(_LIMITS if has_limits else ()))
    return [header, *(_row(plan, one, has_limits=has_limits) for one in plan.formats)]


def _row(plan: MemoryPlan, one: FormatPlan, *, has_limits: bool) -> Sequence[str]:
    mark = "*" if one.kv_cache_dtype == plan.kv_cache_dtype else ""
    sizes = (one.request_bytes, one.batch_bytes, one.cache_bytes)
    row = (f"{one.kv_cache_dtype}{mark}", one.tier, f"{one.bytes_per_token:,}", *map(shown, sizes))
    if not has_limits:
        return row
    context = "any" if one.max_context is None else f"{one.max_context:,}"
    return (*row, "yes" if one.fits else "no", context, f"{one.max_batch or 0:,}")


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place < 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
