"""How a notebook shows a cache: a map of its blocks, its bytes, what was shared. HTML without scripts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from hf_paged_cache.blocks import KINDS, BlockRun

from .stats import CacheStats, GroupStats, MemoryFootprint

MOST_CELLS = 256
"""Cells that are drawn of all groups together."""
_LEAST_CELLS = 32
_LONGEST_RUN = 12
"""Blocks alike that are drawn one by one in a pool that is too large for a cell each."""
_ALWAYS_EXPLAINED = ("free", "open", "sealed", "shared", "cached")

# Told apart by letter and by lightness, so that grey will do.
_LETTERS = {"free": "·", "open": "o", "sealed": "s", "cached": "c", "pending": "p"}
_LOOKS = {
    "free": "background:#fff;color:#666;border-color:#bbb",
    "open": "background:repeating-linear-gradient(135deg,#fff 0 3px,#bcd7e6 3px 5px);color:#000",
    "sealed": "background:#a9c6d8;color:#000",
    "shared": "background:#1d4e6b;color:#fff",
    "cached": "background:#fff;color:#000;border-style:dashed",
    "pending": "background:#e6e6e6;color:#000;border-style:dotted",
}
_CELL = (
    "display:inline-block;min-width:14px;padding:0 1px;margin:1px;border:1px solid #333;"
    "box-sizing:content-box;text-align:center;font:10px/14px monospace;"
)
_MEANS = {
    "free": "free",
    "open": "open: being filled",
    "sealed": "sealed: filled and fixed",
    "shared": "shared: the number is how many hold it",
    "cached": "cached: sealed, held by nobody",
    "pending": "pending: about to be free",
}
_TABLE = "border-collapse:collapse;margin:4px 0"
_NUMBER = "text-align:right;padding:1px 8px"
_TEXT = "text-align:left;padding:1px 8px"


def as_html(name: str, asked: str, num_layers: int, stats: CacheStats, footprint: MemoryFootprint) -> str:
    """The HTML of a cache.

    Args:
        name: Of its class.
        asked: Its `kv_cache_dtype`.
        num_layers: Of the model, those without blocks included.
        stats: Its counts.
        footprint: Its bytes.
    """
    parts = [_head(name, asked, num_layers, stats)]
    if stats.groups:
        limit = max(_LEAST_CELLS, MOST_CELLS // len(stats.groups))
        parts += [_map(group, limit) for group in stats.groups]
        parts.append(_legend(stats))
    elif stats.layer_dtypes:
        parts.append(_line("Empty: blocks are set aside at the first update."))
    parts += [_bytes(stats, footprint), _formats(stats), _reuse(stats)]
    return _box("".join(parts))


def as_message(name: str, text: str) -> str:
    """The HTML of a cache that cannot say more than this."""
    return _box(f"<div><b>{escape(name)}</b>: {escape(text)}</div>")


def _box(content: str) -> str:
    return f'<div style="font-size:13px;line-height:1.5;max-width:700px">{content}</div>'


def _line(text: str) -> str:
    return f"<div>{escape(text)}</div>"


def _head(name: str, asked: str, num_layers: int, stats: CacheStats) -> str:
    facts = [
        _count(num_layers, "layer"),
        f"{_count(stats.batch, 'row')} x {_count(stats.tokens, 'token')}",
        f"blocks of {stats.block_sizes} tokens",
        f"kv_cache_dtype {asked}",
        *([] if stats.backend is None else [f"{stats.backend} kernels"]),
    ]
    return f"<div><b>{escape(name)}</b> &nbsp; {escape(' · '.join(facts))}</div>"


# --- blocks ---------------------------------------------------------------------------------------------


def _map(group: GroupStats, limit: int) -> str:
    kept = "all tokens" if group.window is None else f"a window of {group.window:,} tokens"
    used = sum(run.num_blocks for run in group.runs if run.holders)
    title = (
        f"{_ranges('layer', group.layers)}, {kept}: {used:,} of {_count(group.num_blocks, 'block')} in use"
    )
    cells, rest = _cells(group.runs, group.num_blocks, limit)
    note = "" if not rest else _line(f"Not drawn: {_left_out(rest)}.")
    drawn = "".join(_cell(run, is_one=is_one) for run, is_one in cells)
    return f'{_line(title)}<div style="line-height:0">{drawn}</div>{note}'


def _cells(
    runs: Iterable[BlockRun], num_blocks: int, limit: int
) -> tuple[list[tuple[BlockRun, bool]], list[BlockRun]]:
    """What to draw, as (run, whether it is one block), and what is left over."""
    longest = limit if num_blocks <= limit else _LONGEST_RUN
    cells: list[tuple[BlockRun, bool]] = []
    rest: list[BlockRun] = []
    for run in runs:
        wanted = run.num_blocks if run.num_blocks <= longest else 1
        if rest or len(cells) + wanted > limit:
            rest.append(run)
        elif run.num_blocks > longest:
            cells.append((run, False))
        else:
            cells += [
                (BlockRun(run.first + i, 1, run.state, run.holders), True) for i in range(run.num_blocks)
            ]
    return cells, rest


def _cell(run: BlockRun, *, is_one: bool) -> str:
    is_shared = run.kind == "shared"
    what = f"{run.state.name.lower()}, held {run.holders} times" if is_shared else run.kind
    if is_one:
        title, sign = f"block {run.first}", str(run.holders) if is_shared else _LETTERS[run.kind]
    else:
        title, sign = f"blocks {run.first}-{run.first + run.num_blocks - 1}", f"{run.num_blocks:,} {run.kind}"
        sign += f" by {run.holders}" if is_shared else ""
    title += f": {what}"
    return f'<span title="{escape(title)}" style="{_CELL}{_LOOKS[run.kind]}">{escape(sign)}</span>'


def _left_out(rest: Sequence[BlockRun]) -> str:
    counts = {kind: sum(run.num_blocks for run in rest if run.kind == kind) for kind in KINDS}
    by_kind = ", ".join(f"{count:,} {kind}" for kind, count in counts.items() if count)
    return f"the blocks from {rest[0].first:,} on ({by_kind})"


def _legend(stats: CacheStats) -> str:
    totals = {kind: sum(group.blocks_by_kind[kind] for group in stats.groups) for kind in KINDS}
    shown = [kind for kind in KINDS if totals[kind] or kind in _ALWAYS_EXPLAINED]
    entries = (
        f'<span style="white-space:nowrap;margin-right:14px">'
        f'<span style="{_CELL}{_LOOKS[kind]}">{_LETTERS.get(kind, "2")}</span> '
        f"{escape(_MEANS[kind])} ({totals[kind]:,})</span> "
        for kind in shown
    )
    return f'<div style="margin:4px 0">{"".join(entries)}</div>'


# --- bytes, formats, counts -----------------------------------------------------------------------------


def _bytes(stats: CacheStats, footprint: MemoryFootprint) -> str:
    rows = [
        (f"K and V in {_dtype(name)}", count)
        for name, count in sorted(stats.bytes_by_format.items())
        if count or name == "auto"
    ]
    if len(rows) > 1:
        rows.append(("K and V in use", footprint.used_bytes))
    rows.append(("set aside for K and V", footprint.pool_bytes))
    if footprint.host_bytes:
        rows.append(("states of layers without blocks", footprint.host_bytes))
    return _table((label, f"{count:,} bytes", f"{count / 2**20:,.2f} MiB") for label, count in rows)


def _formats(stats: CacheStats) -> str:
    layers: dict[str, list[int]] = {}
    for index, name in stats.layer_dtypes.items():
        layers.setdefault(name, []).append(index)
    said = [f"{_ranges('layer', found)}: {_dtype(name)}" for name, found in sorted(layers.items())]
    moves: dict[tuple[str, str], list[int]] = {}
    for index, name in stats.moved_layers.items():
        moves.setdefault((name, stats.layer_dtypes[index]), []).append(index)
    guarded = [f"{_ranges('layer', found)} from {a} to {b}" for (a, b), found in moves.items()]
    return _line(f"Stored: {'; '.join(said) or 'no layer has K and V in blocks'}.") + (
        _line(f"Moved by the guard: {'; '.join(guarded)}.") if guarded else ""
    )


def _reuse(stats: CacheStats) -> str:
    counters = stats.counters
    said = [
        f"blocks taken {counters.taken:,}",
        f"given back {counters.given_back:,}",
        f"shared instead of copied {counters.shared:,}",
        f"copied to be written to {counters.copied:,}",
        *([f"cached blocks found again {counters.revived:,}"] if counters.revived else []),
        *([f"evicted {counters.evicted:,}"] if counters.evicted else []),
        f"equal prompt rows {stats.equal_rows:,}",
    ]
    return _line(f"So far: {' · '.join(said)}.")


def _table(rows: Iterable[tuple[str, str, str]]) -> str:
    lines = (
        f'<tr><td style="{_TEXT}">{escape(label)}</td>'
        + "".join(f'<td style="{_NUMBER}">{escape(value)}</td>' for value in values)
        + "</tr>"
        for label, *values in rows
    )
    return f'<table style="{_TABLE}">{"".join(lines)}</table>'


def _dtype(name: str) -> str:
    return "the model's dtype" if name == "auto" else name


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _ranges(noun: str, numbers: Sequence[int]) -> str:
    """`layers 0-3, 7`."""
    spans = [str(a) if a == b else f"{a}-{b}" for a, b in _spans(sorted(numbers))]
    return f"{noun}{'' if len(numbers) == 1 else 's'} {', '.join(spans)}"


def _spans(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first and last of every run of successive numbers."""
    start = 0
    for place, number in enumerate(numbers):
        if place + 1 == len(numbers) or numbers[place + 1] != number + 1:
            yield numbers[start], number
            start = place + 1
