"""The devices that the kernels are compiled for, and what one of their multiprocessors has."""

from __future__ import annotations

from dataclasses import dataclass

_WARPS_PER_AMD_SIMD = 8
_AMD_SIMDS = 4


@dataclass(frozen=True, slots=True)
class Target:
    """One architecture.

    Attributes:
        name: As in tables and on the command line.
        backend: Triton's name of the backend.
        arch: Compute capability, or the name of an AMD architecture.
        warp_size: Threads of a warp.
        shared_bytes: Shared memory that one program may take.
        processor_shared_bytes: Shared memory of one multiprocessor.
        reserved_shared_bytes: What the system adds to each program.
        processor_warps: Warps that one multiprocessor holds.
        has_tensor_memory: Whether accumulators may lie in tensor memory, 512 columns per multiprocessor.
    """

    name: str
    backend: str
    arch: int | str
    warp_size: int
    shared_bytes: int
    processor_shared_bytes: int
    reserved_shared_bytes: int
    processor_warps: int
    has_tensor_memory: bool = False

    def programs(self, *, warps: int, registers: int, shared_bytes: int, tensor_columns: int = 0) -> int:
        """Programs that fit one multiprocessor at one time."""
        shared_bytes += self.reserved_shared_bytes
        fits = [
            self.processor_warps // warps,
            self._warps_by_registers(registers) // warps,
            self.processor_shared_bytes // shared_bytes if shared_bytes else self.processor_warps,
        ]
        if tensor_columns:
            fits.append(512 // tensor_columns)
        return min(fits)

    def _warps_by_registers(self, registers: int) -> int:
        if self.backend == "hip":  # 512 registers a lane in each SIMD, given out by eight
            return _AMD_SIMDS * min(_WARPS_PER_AMD_SIMD, 512 // _round_up(max(registers, 1), 8))
        return 65536 // _round_up(max(registers, 1) * self.warp_size, 256)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


_KIB = 1024
TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, 163 * _KIB, 164 * _KIB, _KIB, 64),
        Target("sm_86", "cuda", 86, 32, 99 * _KIB, 100 * _KIB, _KIB, 48),
        Target("sm_89", "cuda", 89, 32, 99 * _KIB, 100 * _KIB, _KIB, 48),
        Target("sm_90", "cuda", 90, 32, 227 * _KIB, 228 * _KIB, _KIB, 64),
        Target("sm_100", "cuda", 100, 32, 227 * _KIB, 228 * _KIB, _KIB, 64, has_tensor_memory=True),
        Target("sm_120", "cuda", 120, 32, 99 * _KIB, 100 * _KIB, _KIB, 48),
        Target("gfx90a", "hip", "gfx90a", 64, 64 * _KIB, 64 * _KIB, 0, _AMD_SIMDS * _WARPS_PER_AMD_SIMD),
        Target("gfx942", "hip", "gfx942", 64, 64 * _KIB, 64 * _KIB, 0, _AMD_SIMDS * _WARPS_PER_AMD_SIMD),
    )
}
"""A100, A10 and RTX 30, L4 and RTX 40, H100 and H200, B200, RTX 50, MI200, MI300.

gfx950 (MI350) runs what is made for gfx942 and has more shared memory; its int4 kernels take so many
registers that one program fits. Others are refused at run time: see `LOWEST_CAPABILITY` and
`AMD_ARCHITECTURES` of `kernels.triton`.
"""
