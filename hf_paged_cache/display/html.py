"""HTML of a cache for notebooks, without scripts: a map of its blocks, its bytes, what was shared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from html import escape
from itertools import groupby

from hf_paged_cache.blocks import BlockRun

from .stats import CacheStats, GroupStats, MemoryFootprint

MOST_CELLS = 256  # that are drawn of all groups together
_LEAST_CELLS = 32
_LONGEST_RUN = 12  # blocks alike that are drawn one by one in a pool that is too large for a cell each

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
    facts = f"{_count(num_layers, 'layer')} · {_count(stats.batch, 'row')} x {_count(stats.tokens, 'token')}"
    facts += f" · blocks of {stats.block_sizes} tokens · kv_cache_dtype {asked}"
    if stats.backend is not None:
        facts += f" · {stats.backend} kernels"
    return f"<div><b>{escape(name)}</b> &nbsp; {escape(facts)}</div>"


def _map(group: GroupStats, limit: int) -> str:
    kept = "all tokens" if group.window is None else f"a window of {group.window:,} tokens"
    used = sum(run.num_blocks for run in group.runs if run.holders)
    where = f"{_ranges('layer', group.layers)}, {kept}"
    title = f"{where}: {used:,} of {_count(group.num_blocks, 'block')} in use"
    longest = limit if group.num_blocks <= limit else _LONGEST_RUN
    cells: list[str] = []
    note = ""
    for number, run in enumerate(group.runs):
        is_whole = run.num_blocks > longest
        if len(cells) + (1 if is_whole else run.num_blocks) > limit:
            rest = replace(group, runs=group.runs[number:]).blocks_by_kind
            by_kind = ", ".join(f"{count:,} {kind}" for kind, count in rest.items() if count)
            note = _line(f"Not drawn: the blocks from {run.first:,} on ({by_kind}).")
            break
        if is_whole:
            by = f" by {run.holders}" if run.kind == "shared" else ""
            last = run.first + run.num_blocks - 1
            cells.append(_cell(run, f"blocks {run.first}-{last}", f"{run.num_blocks:,} {run.kind}{by}"))
        else:
            sign = str(run.holders) if run.kind == "shared" else _KINDS[run.kind][0]
            cells += [_cell(run, f"block {run.first + i}", sign) for i in range(run.num_blocks)]
    return f'{_line(title)}<div style="line-height:0">{"".join(cells)}</div>{note}'


def _cell(run: BlockRun, title: str, sign: str) -> str:
    what = f"{run.state.name.lower()}, held {run.holders} times" if run.kind == "shared" else run.kind
    style = f"{_CELL}{_KINDS[run.kind][1]}"
    return f'<span title="{escape(f"{title}: {what}")}" style="{style}">{escape(sign)}</span>'


def _legend(stats: CacheStats) -> str:
    entries, counts = [], [group.blocks_by_kind for group in stats.groups]
    for kind, (letter, style, meaning) in _KINDS.items():
        total = sum(each[kind] for each in counts)
        if total or kind != "pending":
            cell = f'<span style="{_CELL}{style}">{letter}</span>'
            words = f"{cell} {escape(meaning)} ({total:,})"
            entries.append(f'<span style="white-space:nowrap;margin-right:14px">{words}</span> ')
    return f'<div style="margin:4px 0">{"".join(entries)}</div>'


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
    now = stats.layer_dtypes
    moves = {index: f"from {name} to {now[index]}" for index, name in stats.moved_layers.items()}
    stored = "; ".join(f"{layers}: {_dtype(name)}" for name, layers in sorted(_layers_by(now)))
    guarded = "; ".join(f"{layers} {move}" for move, layers in _layers_by(moves))
    text = _line(f"Stored: {stored or 'no layer has K and V in blocks'}.")
    return text + (_line(f"Moved by the guard: {guarded}.") if guarded else "")


def _layers_by(texts: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    """Texts, each with the layers that it is said of."""
    for text in dict.fromkeys(texts.values()):
        yield text, _ranges("layer", (layer for layer, each in texts.items() if each == text))


def _reuse(stats: CacheStats) -> str:
    counters = stats.counters
    facts = [("blocks taken", counters.taken), ("given back", counters.given_back)]
    facts += [("shared instead of copied", counters.shared), ("copied to be written to", counters.copied)]
    seldom = [("cached blocks found again", counters.revived), ("evicted", counters.evicted)]
    facts += [*((what, count) for what, count in seldom if count), ("equal prompt rows", stats.equal_rows)]
    return _line(f"So far: {' · '.join(f'{what} {count:,}' for what, count in facts)}.")


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
