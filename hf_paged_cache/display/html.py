"""HTML of a cache for notebooks, without scripts: a map of its blocks, its bytes, what was shared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from hf_paged_cache.blocks import KINDS, BlockRun

if TYPE_CHECKING:
    from .stats import CacheStats, GroupStats, MemoryFootprint

MOST_CELLS = 256
"""Cells that are drawn of all groups together."""
_LEAST_CELLS = 32
_LONGEST_RUN = 12
"""Blocks alike that are drawn one by one in a pool that is too large for a cell each."""
_ALWAYS_EXPLAINED = ("free", "open", "sealed", "shared", "cached")

_HATCHED = "repeating-linear-gradient(135deg,#fff 0 3px,#bcd7e6 3px 5px)"
# Letter, style and meaning. Told apart by letter and by lightness, so that grey will do.
_KINDS = {
    "free": ("·", "background:#fff;color:#666;border-color:#bbb", "free"),
    "open": ("o", f"background:{_HATCHED};color:#000", "open: being filled"),
    "sealed": ("s", "background:#a9c6d8;color:#000", "sealed: filled and fixed"),
    "shared": ("2", "background:#1d4e6b;color:#fff", "shared: the number is how many hold it"),
    "cached": ("c", "background:#fff;color:#000;border-style:dashed", "cached: sealed, held by nobody"),
    "pending": ("p", "background:#e6e6e6;color:#000;border-style:dotted", "pending: about to be free"),
}
_CELL = (
    "display:inline-block;min-width:14px;padding:0 1px;margin:1px;border:1px solid #333;"
    "box-sizing:content-box;text-align:center;font:10px/14px monospace;"
)


def as_html(name: str, asked: str, num_layers: int, stats: CacheStats, footprint: MemoryFootprint) -> str:
    """The HTML of a cache, from the name of its class, its `kv_cache_dtype` and all layers of its model."""
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
    cells, rest = _cells(group, limit)
    note = ""
    if rest:
        counts = {kind: sum(run.num_blocks for run in rest if run.kind == kind) for kind in KINDS}
        by_kind = ", ".join(f"{count:,} {kind}" for kind, count in counts.items() if count)
        note = _line(f"Not drawn: the blocks from {rest[0].first:,} on ({by_kind}).")
    return f'{_line(title)}<div style="line-height:0">{"".join(cells)}</div>{note}'


def _cells(group: GroupStats, limit: int) -> tuple[list[str], list[BlockRun]]:
    """Cells of one block or of a long run, and what is left over."""
    longest = limit if group.num_blocks <= limit else _LONGEST_RUN
    cells: list[str] = []
    for number, run in enumerate(group.runs):
        is_whole = run.num_blocks > longest
        if len(cells) + (1 if is_whole else run.num_blocks) > limit:
            return cells, list(group.runs[number:])
        if is_whole:
            by = f" by {run.holders}" if run.kind == "shared" else ""
            last = run.first + run.num_blocks - 1
            cells.append(_cell(run, f"blocks {run.first}-{last}", f"{run.num_blocks:,} {run.kind}{by}"))
        else:
            sign = str(run.holders) if run.kind == "shared" else _KINDS[run.kind][0]
            cells += [_cell(run, f"block {run.first + i}", sign) for i in range(run.num_blocks)]
    return cells, []


def _cell(run: BlockRun, title: str, sign: str) -> str:
    is_shared = run.kind == "shared"
    what = f"{run.state.name.lower()}, held {run.holders} times" if is_shared else run.kind
    style = f"{_CELL}{_KINDS[run.kind][1]}"
    return f'<span title="{escape(f"{title}: {what}")}" style="{style}">{escape(sign)}</span>'


def _legend(stats: CacheStats) -> str:
    entries = []
    for kind in KINDS:
        total = sum(group.blocks_by_kind[kind] for group in stats.groups)
        if total or kind in _ALWAYS_EXPLAINED:
            letter, style, meaning = _KINDS[kind]
            cell = f'<span style="{_CELL}{style}">{letter}</span>'
            words = f"{cell} {escape(meaning)} ({total:,})"
            entries.append(f'<span style="white-space:nowrap;margin-right:14px">{words}</span> ')
    return f'<div style="margin:4px 0">{"".join(entries)}</div>'


# --- bytes, formats, counts -----------------------------------------------------------------------------


def _bytes(stats: CacheStats, footprint: MemoryFootprint) -> str:
    by_format = sorted(stats.bytes_by_format.items())
    amounts = [(f"K and V in {_dtype(name)}", n) for name, n in by_format if n or name == "auto"]
    if len(amounts) > 1:
        amounts.append(("K and V in use", footprint.used_bytes))
    amounts.append(("set aside for K and V", footprint.pool_bytes))
    if footprint.host_bytes:
        amounts.append(("states of layers without blocks", footprint.host_bytes))
    number = '<td style="text-align:right;padding:1px 8px">'
    lines = (
        f'<tr><td style="text-align:left;padding:1px 8px">{escape(label)}</td>'
        f"{number}{count:,} bytes</td>{number}{count / 2**20:,.2f} MiB</td></tr>"
        for label, count in amounts
    )
    return f'<table style="border-collapse:collapse;margin:4px 0">{"".join(lines)}</table>'


def _formats(stats: CacheStats) -> str:
    layers: dict[str, list[int]] = defaultdict(list)
    for index, name in stats.layer_dtypes.items():
        layers[name].append(index)
    stored = [f"{_ranges('layer', found)}: {_dtype(name)}" for name, found in sorted(layers.items())]
    moves: dict[str, list[int]] = defaultdict(list)
    for index, name in stats.moved_layers.items():
        moves[f"from {name} to {stats.layer_dtypes[index]}"].append(index)
    guarded = [f"{_ranges('layer', found)} {move}" for move, found in moves.items()]
    return _line(f"Stored: {'; '.join(stored) or 'no layer has K and V in blocks'}.") + (
        _line(f"Moved by the guard: {'; '.join(guarded)}.") if guarded else ""
    )


def _reuse(stats: CacheStats) -> str:
    counters = stats.counters
    facts = [
        f"blocks taken {counters.taken:,}",
        f"given back {counters.given_back:,}",
        f"shared instead of copied {counters.shared:,}",
        f"copied to be written to {counters.copied:,}",
        *([f"cached blocks found again {counters.revived:,}"] if counters.revived else []),
        *([f"evicted {counters.evicted:,}"] if counters.evicted else []),
        f"equal prompt rows {stats.equal_rows:,}",
    ]
    return _line(f"So far: {' · '.join(facts)}.")


def _dtype(name: str) -> str:
    return "the model's dtype" if name == "auto" else name


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _ranges(noun: str, numbers: Iterable[int]) -> str:
    """`layers 0-3, 7`."""
    found = sorted(numbers)
    runs = (
        [number for _, number in run]
        for _, run in groupby(enumerate(found), key=lambda item: item[1] - item[0])  # alike in a run
    )
    spans = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"{noun}{'' if len(found) == 1 else 's'} {', '.join(spans)}"
