"""Compilation of one variant for one target, and what is read from the binary."""

from __future__ import annotations

import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .payload import payload_places
from .read import Moves, Usage, read_amd, read_amd_usage, read_sass, read_usage
from .targets import TARGETS, Target
from .variants import all_variants


@dataclass(frozen=True, slots=True)
class Binary:
    """What the compiler made of one variant.

    Attributes:
        variant: Its name.
        target: Its name.
        kernel: Name of the kernel.
        warps: Of a program.
        stages: Tiles in flight that the compiler was told.
        usage: Registers and stack.
        shared_bytes: Shared memory of a program.
        piece_bits: Width in which K and V can move at best.
        moves: How they move.
        programs: Programs that fit one multiprocessor.
        seconds: Compile time.
    """

    variant: str
    target: str
    kernel: str
    warps: int
    stages: int
    usage: Usage
    shared_bytes: int
    piece_bits: int
    moves: Moves
    programs: int
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        moves = {kind: dict(getattr(self.moves, kind)) for kind in ("loads", "copies", "stores", "others")}
        return {
            **{item.name: getattr(self, item.name) for item in fields(self)},
            "usage": asdict(self.usage),
            "moves": moves,
        }


def compile_variant(variant_name: str, target_name: str) -> Binary:
    """Compile, without a device.

    Raises:
        Exception: Whatever Triton or its tools raise.
    """
    import triton
    from triton.compiler import ASTSource

    from .capture import gpu_target, specialise

    variant, target = all_variants()[variant_name], TARGETS[target_name]
    began = time.perf_counter()
    special = specialise(variant, target)
    source = ASTSource(special.kernel, special.signature, special.constants, special.attributes)
    compiled = triton.compile(source, target=gpu_target(target), options=special.options)
    usage, moves = _read(compiled.asm, target)
    shared_bytes = int(compiled.metadata.shared)
    programs = target.programs(
        warps=compiled.metadata.num_warps,
        registers=usage.registers,
        shared_bytes=shared_bytes,
        tensor_columns=getattr(compiled.metadata, "tmem_size", 0) if target.has_tensor_memory else 0,
    )
    return Binary(
        variant=variant.name,
        target=target.name,
        kernel=variant.kernel,
        warps=compiled.metadata.num_warps,
        stages=special.options["num_stages"],
        usage=usage,
        shared_bytes=shared_bytes,
        piece_bits=variant.piece_bits,
        moves=moves,
        programs=programs,
        seconds=time.perf_counter() - began,
    )


def _read(asm: dict[str, Any], target: Target) -> tuple[Usage, Moves]:
    if target.backend == "hip":
        return read_amd_usage(asm["amdgcn"]), read_amd(asm["amdgcn"], payload_places())
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(asm["cubin"])
        usage = _output(knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin))
        sass = _output(knobs.nvidia.nvdisasm.path, "-c", "-gi", str(cubin))
    return read_usage(usage), read_sass(sass, payload_places())


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
