"""What is wrong with a binary."""

from __future__ import annotations

from .binary import Binary
from .targets import TARGETS


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
