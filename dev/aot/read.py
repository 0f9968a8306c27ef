"""Readers of what compilers write: resource usage, NVIDIA machine code, AMD assembly."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

Place = tuple[str, int]
"""File name without folders, and line."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one program takes.

    Attributes:
        registers: Per thread.
        spill_bytes: Stack of each thread: Triton has no other use for one than spilled registers.
        shared_bytes: Shared memory known to the binary alone, without what a launch adds.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int = 0


@dataclass(slots=True)
class Moves:
    """Instructions that move K and V between global memory and the multiprocessor, by width in bits.

    Attributes:
        loads: Into registers.
        copies: Into shared memory, past the registers.
        stores: Back to global memory.
        others: Loads and stores of everything else.
    """

    loads: Counter[int] = field(default_factory=Counter)
    copies: Counter[int] = field(default_factory=Counter)
    stores: Counter[int] = field(default_factory=Counter)
    others: Counter[int] = field(default_factory=Counter)

    def narrowest_bits(self) -> int | None:
        """Width of the narrowest piece of K or V; None where none moves."""
        return min([*self.loads, *self.copies, *self.stores], default=None)


_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_SASS_PLACE = re.compile(r'//## File "([^"]+)", line (\d+)( inlined at)?')
_SASS = re.compile(
    r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(LDGSTS|LDG|LD|STG|ST|UTMALDG|UTMASTG|UBLKCP)(\.\S+)?\s"
)
_SASS_WIDTHS = {".U8": 8, ".S8": 8, ".U16": 16, ".S16": 16, ".64": 64, ".128": 128, ".256": 256}
_AMD_PLACE = re.compile(r"^\s*\.loc\s.*;\s*([^\s:]+):(\d+):")
_AMD = re.compile(
    r"^\s*(?:buffer|global|flat)_(load|store)_(?:lds_)?([us]?byte|[us]?short|dword(?:x[234])?)\w*\s(.*)"
)
_AMD_WIDTHS = {"byte": 8, "short": 16, "dword": 32, "dwordx2": 64, "dwordx3": 96, "dwordx4": 128}
BULK_BITS = 1024
"""Copies of whole boxes by one instruction (TMA)."""


def read_usage(text: str) -> Usage:
    """From `cuobjdump -res-usage`.

    Raises:
        ValueError: No usage in it, or that of several kernels.
    """
    found = _USAGE.findall(text)
    if len(found) != 1:
        raise ValueError(f"expected the usage of one kernel, got {len(found)} in: {text.strip()!r}")
    registers, stack, shared, local = map(int, found[0])
    return Usage(registers, stack + local, shared)


def read_amd_usage(assembly: str) -> Usage:
    """From the metadata at the end of AMD assembly; vector registers, the accumulation registers included.

    Spilled scalar registers do not count: they go to lanes of vector registers and not to memory.
    """
    numbers = {
        key: int(value) for key, value in re.findall(r"^\s*\.(\w+):\s+(\d+)\s*$", assembly, re.MULTILINE)
    }
    missing = {"vgpr_count", "private_segment_fixed_size", "vgpr_spill_count"} - set(numbers)
    if missing:
        raise ValueError(f"expected metadata of a kernel, got none for {sorted(missing)}")
    spilled = max(4 * numbers["vgpr_spill_count"], numbers["private_segment_fixed_size"])
    return Usage(numbers["vgpr_count"], spilled)


def read_sass(text: str, payload: frozenset[Place]) -> Moves:
    """Global loads and stores of `nvdisasm -c -gi`.

    Args:
        text: The listing, with the source lines of each instruction before it, the innermost first.
        payload: The source lines that move K and V.
    """
    moves = Moves()
    place: Place | None = None
    outer = False
    for line in text.splitlines():
        if found := _SASS_PLACE.search(line):
            if not outer:
                place = found[1].rsplit("/", 1)[-1], int(found[2])
            outer = bool(found[3])
        elif found := _SASS.search(line):
            opcode, suffixes = found[1], found[2] or ""
            bits = next((bits for suffix, bits in _SASS_WIDTHS.items() if suffix in _parts(suffixes)), 32)
            if opcode.startswith("U"):
                bits = BULK_BITS
            is_store = opcode in ("STG", "ST", "UTMASTG")
            is_copy = opcode in ("LDGSTS", "UTMALDG", "UBLKCP")
            _count(moves, place in payload, bits, is_store=is_store, is_copy=is_copy)
    return moves


def read_amd(assembly: str, payload: frozenset[Place]) -> Moves:
    """Global loads and stores of AMD assembly; arguments as in `read_sass`."""
    moves = Moves()
    place: Place | None = None
    for line in assembly.splitlines():
        if found := _AMD_PLACE.search(line):
            place = found[1].rsplit("/", 1)[-1], int(found[2])
        elif found := _AMD.search(line):
            bits = _AMD_WIDTHS[re.sub(r"^[us](?=byte|short)", "", found[2])]
            is_copy = "_lds_" in line or bool(re.search(r"\blds\b", found[3]))
            _count(moves, place in payload, bits, is_store=found[1] == "store", is_copy=is_copy)
    return moves


def _parts(suffixes: str) -> set[str]:
    return {f".{part}" for part in suffixes.split(".") if part}


def _count(moves: Moves, is_payload: bool, bits: int, *, is_store: bool, is_copy: bool) -> None:
    if not is_payload:
        moves.others[bits] += 1
    elif is_store:
        moves.stores[bits] += 1
    elif is_copy:
        moves.copies[bits] += 1
    else:
        moves.loads[bits] += 1
