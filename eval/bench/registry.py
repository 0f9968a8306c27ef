"""The benches by name, in the order they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from eval.bench import (
    attention_step,
    bandwidth,
    blocks,
    decode_step,
    formats_step,
    kv_bytes,
    memory,
    prefill,
    sealing,
)
from eval.bench.context import Context
from eval.core.errors import UsageError, check_choice
from eval.core.table import Result


@dataclass(frozen=True)
class Bench:
    """Something to measure.

    Attributes:
        name: what `--only` calls it.
        about: one line for the help.
        run: measures; raises `WrongAnswer` instead of reporting the speed of something wrong.
    """

    name: str
    about: str
    run: Callable[[Context], Result]


_BENCHES = (
    Bench("blocks", "bookkeeping of one block", blocks.run),
    Bench("bandwidth", "the machine's read bandwidth", bandwidth.run),
    Bench("attention", "one attention step of one layer", attention_step.run),
    Bench("formats", "the same for quantized formats", formats_step.run),
    Bench("decode", "whole decode steps of SmolLM2-135M", decode_step.run),
    Bench("sealing", "encoding a full block", sealing.run),
    Bench("prefill", "prompts of SmolLM2-135M", prefill.run),
    Bench("bytes", "bytes of K and V by format", kv_bytes.run),
    Bench("memory", "peak memory of a long generate call", memory.run),
)

BENCHES: dict[str, Bench] = {bench.name: bench for bench in _BENCHES}
"""Name -> bench."""


def chosen(only: str | None) -> list[Bench]:
    """The benches named in a comma-separated list, in the order of the registry; all for None.

    Raises:
        UsageError: an unknown name, or no name at all.
    """
    if only is None:
        return list(BENCHES.values())
    names = {name.strip() for name in only.split(",") if name.strip()}
    if not names:
        raise UsageError(f"--only needs at least one name; choose from: {', '.join(sorted(BENCHES))}")
    for name in sorted(names):
        check_choice("bench", name, BENCHES)
    return [bench for bench in BENCHES.values() if bench.name in names]
