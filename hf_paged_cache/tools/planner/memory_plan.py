"""Values of a plan, as text, HTML and JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from html import escape
from operator import attrgetter
from pathlib import Path
from typing import Any

from hf_paged_cache.tools.columns import aligned

from .amounts import shown

_HEADER = ("format", "tier", "bytes/token", "a request", "the batch", "pools + states")
_LIMITS = ("fits", "max context", "max batch")


@dataclass(frozen=True, slots=True)
class FormatPlan:
    """What a cache takes in one format, and how far the memory reaches with it.

    Attributes:
        kv_cache_dtype: The format.
        tier: Where its blocks lie: `device`, the memory of the device that the layers are on.
        bytes_per_token: Of a token in all layers that is in every window, as stored for good, rounded up.
        growth_bytes_per_token: Of one more token when all windows are full, rounded up; 0 if nothing grows.
        request_bytes: Of one request of the whole context: all its blocks, and states.
        batch_bytes: So many of them.
        pool_bytes: What `PagedCache(..., max_tokens=plan.max_tokens)` preallocates for the batch. For several
            rows a few blocks more than they fill, since rows may be unlike in length.
        state_bytes: Of the batch, beside the pools: recurrent states, convolutions, keys of indexers.
        fits: Whether weights, pools and states fit into the memory; None if that was not given.
        max_context: Tokens per row that fit at this batch; None without a memory, or if any number does.
        max_batch: Rows that fit at this context; None without a memory.
    """

    kv_cache_dtype: str
    tier: str
    bytes_per_token: int
    growth_bytes_per_token: int
    request_bytes: int
    batch_bytes: int
    pool_bytes: int
    state_bytes: int
    fits: bool | None
    max_context: int | None
    max_batch: int | None

    @property
    def cache_bytes(self) -> int:
        """Of the batch: pools and states."""
        return self.pool_bytes + self.state_bytes


@dataclass(frozen=True, repr=False)
class MemoryPlan:
    """What a cache of a model takes, by format, and what fits. Prints as a table, in a notebook too.

    Not counted: activations, working memory of kernels, block tables, and what the framework takes itself.

    What `FormatPlan` says of a format is here too, of the format that was asked for: `bytes_per_token`,
    `request_bytes`, `batch_bytes`, `pool_bytes`, `state_bytes`, `fits`, `max_context`, `max_batch`.

    Attributes:
        model_type: The model's kind, as its config calls it.
        dtype: Of K and V where they are not quantized.
        context: Tokens of every row, prompt and answer.
        batch: Rows.
        kv_cache_dtype: The format that was asked for.
        block_size: Tokens per block.
        max_tokens: What to give to `PagedCache` for this plan.
        max_positions: Longest sequence the model was made for, if its config says.
        memory_bytes: What there is, or None.
        weight_bytes: Of the model's weights; None if unknown and not needed.
        formats: One for each format that can store this model's heads.
        refused: Format -> why it cannot.
        notes: What the numbers take for granted.
    """

    model_type: str
    dtype: str
    context: int
    batch: int
    kv_cache_dtype: str
    block_size: int
    max_tokens: int
    max_positions: int | None
    memory_bytes: int | None
    weight_bytes: int | None
    formats: tuple[FormatPlan, ...]
    refused: dict[str, str]
    notes: tuple[str, ...] = ()

    bytes_per_token = property(attrgetter("chosen.bytes_per_token"))
    request_bytes = property(attrgetter("chosen.request_bytes"))
    batch_bytes = property(attrgetter("chosen.batch_bytes"))
    pool_bytes = property(attrgetter("chosen.pool_bytes"))
    state_bytes = property(attrgetter("chosen.state_bytes"))
    fits = property(attrgetter("chosen.fits"))
    max_context = property(attrgetter("chosen.max_context"))
    max_batch = property(attrgetter("chosen.max_batch"))

    def of(self, kv_cache_dtype: str) -> FormatPlan:
        """The numbers of one format; KeyError if it was not planned, or cannot store this model's heads."""
        for plan in self.formats:
            if plan.kv_cache_dtype == kv_cache_dtype:
                return plan
        raise KeyError(self.refused.get(kv_cache_dtype, kv_cache_dtype))

    @property
    def chosen(self) -> FormatPlan:
        """The numbers of the format that was asked for."""
        return self.of(self.kv_cache_dtype)

    def to_dict(self) -> dict[str, Any]:
        """As dicts, lists, numbers and strings."""
        formats = [{**asdict(plan), "cache_bytes": plan.cache_bytes} for plan in self.formats]
        return {**asdict(self), "formats": formats, "notes": list(self.notes), "verdict": self.verdict()}

    def to_json(self, path: str | Path | None = None) -> str:
        """As JSON; also written to a file if there is a path."""
        text = json.dumps(self.to_dict(), indent=1)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def verdict(self) -> str | None:
        """Whether it fits, and what would if it does not; None without a memory."""
        if self.memory_bytes is None:
            return None
        name, weights = self.kv_cache_dtype, self.weight_bytes or 0
        left = self.memory_bytes - weights - self.chosen.cache_bytes
        if left >= 0:
            return f"{name} fits: {shown(left)} are left for activations and everything else."
        asked = f"{self.context:,} tokens x {self.batch:,}"
        missing = f"{name} does not fit: {asked} and the weights need {shown(-left)} more."
        fitting = [plan.kv_cache_dtype for plan in self.formats if plan.fits]
        if fitting:
            return f"{missing} What fits: {', '.join(fitting)}."
        if weights >= self.memory_bytes:
            return f"Nothing fits: the weights take {shown(weights)} of {shown(self.memory_bytes)}."
        return f"Nothing fits. {missing} What would: {'; '.join(_ways_out(self.formats, weights))}."

    def __str__(self) -> str:
        verdict = self.verdict()
        below = [*([] if verdict is None else ["", verdict]), *_remarks(self)]
        return "\n".join([*_summary(self), "", *aligned(_table(self), left=2), *below])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        header, *lines = _table(self)
        head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines)
        below = [line for line in (self.verdict(), *_remarks(self)) if line]
        return (
            f"<p>{'<br>'.join(map(escape, _summary(self)))}</p>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
            f"<p>{'<br>'.join(map(escape, below))}</p>"
        )


def _summary(plan: MemoryPlan) -> list[str]:
    limit = "" if plan.max_positions is None else f" (made for {plan.max_positions:,})"
    requests = f"{plan.batch:,} {'request' if plan.batch == 1 else 'requests'}"
    what = f"{plan.model_type} in {plan.dtype}: {plan.context:,} tokens{limit} x {requests}"
    sizes = (("weights", plan.weight_bytes), ("memory", plan.memory_bytes))
    known = ", ".join(f"{name} {shown(count)}" for name, count in sizes if count is not None)
    return [f"{what}, blocks of {plan.block_size} tokens", *([known] if known else [])]


def _remarks(plan: MemoryPlan) -> list[str]:
    return [
        *(f"{name}: {why}" for name, why in plan.refused.items()),
        *plan.notes,
        f"PagedCache(model, kv_cache_dtype={plan.kv_cache_dtype!r}, max_tokens={plan.max_tokens})",
    ]


def _table(plan: MemoryPlan) -> list[tuple[str, ...]]:
    """The header, and a line for every format."""
    lines: list[tuple[str, ...]] = [_HEADER if plan.memory_bytes is None else (*_HEADER, *_LIMITS)]
    for one in plan.formats:
        mark = "*" if one.kv_cache_dtype == plan.kv_cache_dtype else ""
        sizes = map(shown, (one.request_bytes, one.batch_bytes, one.cache_bytes))
        line = (f"{one.kv_cache_dtype}{mark}", one.tier, f"{one.bytes_per_token:,}", *sizes)
        context = "any" if one.max_context is None else f"{one.max_context:,}"
        limits = ("yes" if one.fits else "no", context, f"{one.max_batch or 0:,}")
        lines.append(line if plan.memory_bytes is None else (*line, *limits))
    return lines


def _ways_out(formats: tuple[FormatPlan, ...], weights: int) -> list[str]:
    smallest = min(formats, key=lambda one: one.cache_bytes)
    widest = max(formats, key=lambda one: one.max_batch or 0)
    longest = max(formats, key=lambda one: one.max_context or 0)
    needed = weights + smallest.cache_bytes
    ways = []
    if widest.max_batch:
        ways.append(f"a batch of {widest.max_batch:,} in {widest.kv_cache_dtype}")
    if longest.max_context:
        ways.append(f"a context of {longest.max_context:,} in {longest.kv_cache_dtype}")
    return [*ways, f"a memory of {shown(needed)} ({needed:,} bytes) with {smallest.kv_cache_dtype}"]
