"""Binaries as an aligned table, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence

from .binary import Binary
from .read import BULK_BITS
from .targets import TARGETS

_HEADER = ("variant", "target", "warps", "stages", "regs", "spill B", "shared KiB", "K/V bits", "fit", "")


def render(binaries: Sequence[Binary]) -> str:
    """One line for each binary; `fit` is how many programs fit one multiprocessor."""
    rows = [_HEADER, *(_row(binary) for binary in binaries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = (
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def summary(binaries: Sequence[Binary], seconds: float) -> str:
    """The last line: how many, and the worst of each."""
    if not binaries:
        return f"0 binaries, {seconds:.0f} s"
    return (
        f"{len(binaries)} binaries, at worst {max(b.usage.registers for b in binaries)} registers, "
        f"{max(b.usage.spill_bytes for b in binaries)} bytes spilled, "
        f"{max(b.shared_bytes for b in binaries) / 1024:.1f} KiB shared, "
        f"{min(b.programs for b in binaries)} programs a multiprocessor, "
        f"{sum(bool(faults(b)) for b in binaries)} at fault, {seconds:.0f} s"
    )


def _row(binary: Binary) -> tuple[str, ...]:
    return (
        binary.variant,
        binary.target,
        str(binary.warps),
        str(binary.stages),
        str(binary.usage.registers),
        str(binary.usage.spill_bytes),
        f"{binary.shared_bytes / 1024:.1f}",
        _width(binary),
        str(binary.programs),
        "FAULT" if faults(binary) else "",
    )


def _width(binary: Binary) -> str:
    """Narrowest piece of K and V.

    `async` where they go straight to shared memory, `odd rows` where 128 bits do not divide the rows.
    """
    narrowest = binary.moves.narrowest_bits()
    if narrowest is None:
        return "-"
    words = ["TMA" if narrowest == BULK_BITS else str(narrowest)]
    if binary.moves.copies and not binary.moves.loads:
        words.insert(0, "async")
    if binary.piece_bits < 128:
        words.insert(0, "odd rows")
    return " ".join(words)


def faults(binary: Binary) -> list[str]:
    """Reasons not to ship it, in words; none if it is fine."""
    found = []
    if binary.usage.spill_bytes:
        found.append(f"spills {binary.usage.spill_bytes} bytes a thread")
    limit = TARGETS[binary.target].shared_bytes
    if binary.shared_bytes > limit:
        found.append(
            f"takes {_kib(binary.shared_bytes)} KiB of shared memory, {binary.target} has {_kib(limit)}"
        )
    elif not binary.programs:
        found.append("takes more registers than a multiprocessor has")
    if binary.kernel.startswith("merge_"):
        return found
    narrowest = binary.moves.narrowest_bits()
    if narrowest is None:
        found.append("no load of K or V was found in it")
    elif narrowest < binary.piece_bits:
        found.append(f"moves K or V in pieces of {narrowest} bits, {binary.piece_bits} are possible")
    return found


def _kib(size_bytes: int) -> str:
    return f"{size_bytes / 1024:.1f}"
