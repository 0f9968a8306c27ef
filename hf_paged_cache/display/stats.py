"""Values that a cache gives of itself, counts and exact bytes, and their picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_paged_cache.blocks import KINDS, BlockCounters, BlockRun

from .figures import byte_unit, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Of layer groups: told apart by pattern and by lightness, so that grey will do.
_LOOKS = (
    {"facecolor": "#1d4e6b", "hatch": ""},
    {"facecolor": "#c9dbe6", "hatch": "///"},
    {"facecolor": "#6fa3bf", "hatch": "..."},
    {"facecolor": "#ffffff", "hatch": "xxx"},
)


@dataclass(frozen=True, slots=True)
class MemoryFootprint:
    """Bytes of a cache.

    Attributes:
        pool_bytes: Preallocated pools. On a CPU the part that was never written is not resident.
        used_bytes: The part of the pools in blocks that hold tokens.
        table_bytes: Block tables that kernels read.
        scratch_bytes: Working memory that kernels keep between calls, shared by all caches of the process.
        host_bytes: States of layers that are not paged, kept by the classes of `transformers`.
    """

    pool_bytes: int
    used_bytes: int
    table_bytes: int
    scratch_bytes: int
    host_bytes: int

    @property
    def total_bytes(self) -> int:
        """Everything that is allocated."""
        return self.pool_bytes + self.table_bytes + self.scratch_bytes + self.host_bytes


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Counts of the layers that keep the same tokens and so share block ids.

    Attributes:
        window: Tokens that a query of these layers sees, or None for all.
        layers: Their indices.
        block_size: Tokens per block.
        num_blocks: Blocks of their pool.
        runs: All blocks in the order of their ids, those that are alike put together.
    """

    window: int | None
    layers: tuple[int, ...]
    block_size: int
    num_blocks: int
    runs: tuple[BlockRun, ...] = field(repr=False)

    @property
    def blocks_by_kind(self) -> dict[str, int]:
        """Number of blocks that are `free`, `open`, `sealed`, `shared`, `cached` and `pending`.

        A block counts once: `shared` is every block with several holders, `open` and `sealed` are the others.
        """
        return {kind: sum(run.num_blocks for run in self.runs if run.kind == kind) for kind in KINDS}


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts of a cache, over all layer groups.

    Blocks, bytes and `counters` are those of all caches that share the pools, if some were forked.

    Attributes:
        batch: Rows.
        tokens: Tokens seen per row.
        block_size: Tokens per block, but in layers with a short window: see `GroupStats`.
        num_blocks: Blocks of all groups.
        used_blocks: Blocks that hold tokens, each counted once however many rows share it.
        shared_blocks: Blocks held by more than one row.
        free_blocks: Blocks that can be taken.
        backend: The kernels in use: `cpp`, `triton`, `torch` or `reference`; None before the first update.
        layer_dtypes: Layer index -> the format that the layer is stored in now, which `adaptive` chooses by
            the first forward and the guard may change. `int4_group+k8` is `int4_group` with K in int8.
        moved_layers: Layer index -> the format that was asked for, of layers that the guard gave another.
        bytes_by_format: Format -> bytes of `MemoryFootprint.used_bytes`; `auto` is the model's dtype.
        equal_rows: Rows of prompts that were stored by reference to an equal row, from 0 on in a copy.
        counters: What has happened to blocks since the pools were made.
        groups: The same by layer group.
    """

    batch: int
    tokens: int
    block_size: int
    num_blocks: int
    used_blocks: int
    shared_blocks: int
    free_blocks: int
    backend: str | None
    layer_dtypes: dict[int, str]
    moved_layers: dict[int, str]
    bytes_by_format: dict[str, int]
    equal_rows: int
    counters: BlockCounters
    groups: tuple[GroupStats, ...] = field(repr=False)

    @property
    def block_sizes(self) -> str:
        """Tokens per block of all groups, in words: layers with a short window have smaller blocks."""
        sizes = {group.block_size for group in self.groups} or {self.block_size}
        return " and ".join(map(str, sorted(sizes, reverse=True)))

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw blocks by what they are, and bytes by format: a figure of matplotlib, which a notebook shows.

        It is written to `path` too, whose ending chooses the kind (`.png`, `.svg`, `.pdf`).

        Raises:
            PagedCacheError: matplotlib is not installed.
        """
        figure = new_figure(10.0, 3.2, instead="`cache.stats()` itself")
        blocks, sizes = figure.subplots(1, 2)
        _draw_blocks(blocks, self)
        _draw_bytes(sizes, self.bytes_by_format)
        rows = f"{self.batch} row{'s' * (self.batch != 1)} x {self.tokens} tokens"
        figure.suptitle(f"{rows}, blocks of {self.block_sizes} tokens", fontsize="medium")
        if path is not None:
            figure.savefig(path)
        return figure


def _draw_blocks(axes: Any, stats: CacheStats) -> None:
    counts = [group.blocks_by_kind for group in stats.groups]
    seldom = [kind for kind in ("cached", "pending") if any(each[kind] for each in counts)]
    kinds = ["open", "sealed", "shared", *seldom]
    for number, (group, each) in enumerate(zip(stats.groups, counts, strict=True)):
        kept = "all tokens" if group.window is None else f"window of {group.window}"
        label = f"{len(group.layers)} layer{'s' * (len(group.layers) != 1)}, {kept}"
        _draw_bars(axes, [each[kind] for kind in kinds], "{:,}", number, len(counts), label=label)
    free = sum(each["free"] for each in counts)
    axes.set(xlabel="blocks", title=f"blocks in use; {free:,} of {stats.num_blocks:,} are free")
    axes.xaxis.get_major_locator().set_params(integer=True)
    _finish(axes, kinds, max((each[kind] for each in counts for kind in kinds), default=0))
    if len(counts) > 1:
        axes.legend(fontsize="small", loc="best")


def _draw_bytes(axes: Any, bytes_by_format: dict[str, int]) -> None:
    by_format = dict(sorted(bytes_by_format.items())) or {"auto": 0}
    unit, size = byte_unit(max(by_format.values()))
    values = [count / size for count in by_format.values()]
    _draw_bars(axes, values, "{:,.1f}")
    axes.set(xlabel=f"K and V in blocks ({unit})", title=f"bytes by format; {sum(values):,.1f} {unit} in all")
    _finish(axes, ["model's dtype" if name == "auto" else name for name in by_format], max(values))


def _draw_bars(
    axes: Any, values: Sequence[float], template: str, number: int = 0, groups: int = 1, label: str = ""
) -> None:
    """One bar of every entry of the axis, beside those of other groups."""
    height = 0.8 / groups
    centres = [entry - 0.4 + height * (number + 0.5) for entry in range(len(values))]
    bars = axes.barh(centres, values, height, edgecolor="black", label=label, **_LOOKS[number % len(_LOOKS)])
    axes.bar_label(bars, labels=[template.format(value) for value in values], padding=3, fontsize="small")


def _finish(axes: Any, names: Sequence[str], largest: float) -> None:
    axes.set_xlim(0, 1.25 * (largest or 1))  # the numbers stand beside the bars
    axes.set_yticks(range(len(names)), names)
    around = 1.0 if len(names) == 1 else 0.6  # so that a single bar is no wall
    axes.set_ylim(len(names) - 1 + around, -around)
    axes.spines[["top", "right"]].set_visible(False)
