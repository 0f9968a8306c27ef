"""The benches by name, in the order they run."""

from eval.bench import blocks, readers
from eval.bench.context import Bench
from eval.bench.layers import attention_step, formats_step
from eval.bench.models import decode_step, kv_bytes, memory, prefill, sealing
from eval.core import errors

BENCHES: dict[str, Bench] = {
    bench.name: bench
    for bench in (
        blocks.BENCH,
        readers.BENCH,
        attention_step.BENCH,
        formats_step.BENCH,
        decode_step.BENCH,
        sealing.BENCH,
        prefill.BENCH,
        kv_bytes.BENCH,
        memory.BENCH,
    )
}


def chosen(only: str | None) -> list[Bench]:
    """The benches named in a comma-separated list, in the order of the registry; all for None."""
    return [BENCHES[name] for name in (BENCHES if only is None else errors.chosen("bench", only, BENCHES))]
