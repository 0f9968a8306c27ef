"""Peak memory of one long `generate` call, each cache in a process of its own.

One process for several would use again what it has freed.
"""

from dataclasses import dataclass
from typing import Any

import torch

from eval.bench.context import Bench, Context
from eval.bench.models import workload
from eval.core import measure
from eval.core.isolation import Workers
from eval.core.table import Cell, Column, Row, WrongAnswer, fixed, plain, required
from hf_paged_cache.host.compat import cache_argument

COLUMNS = (
    *plain("case", "cache"),
    Column("peak_mb", "peak MB", fixed(1)),
    Column("rise_mb", "over baseline MB", fixed(1)),
    Column("rise_ratio", "x Dynamic", fixed(2)),
    Column("kv_mb", "K and V MB", fixed(1)),
    Column("over_kv_mb", "rise - K and V MB", fixed(1)),
    Column("pool_bytes", "pool bytes", "{:,}".format),
    Column("formula_bytes", "formula bytes", "{:,}".format),
)


@dataclass(frozen=True)
class Case:
    """One call of `generate`."""

    total_tokens: int
    new_tokens: int
    chunk: int  # tokens of the prompt at a time; 0: all at once
    required: tuple[str, ...]  # caches that must stay below DynamicCache

    def __str__(self) -> str:
        prompt = f"in chunks of {self.chunk}" if self.chunk else "at once"
        return f"{self.total_tokens} tokens, prompt {prompt}"


FORMATS = ("int8", "int4")
CACHES = ("dynamic", "paged", *FORMATS)
_CASES = (
    Case(8192, 64, 512, required=("paged", *FORMATS)),
    Case(4097, 1, 0, required=FORMATS),
    Case(2048, 16, 0, required=()),
)
_QUICK_CASES = (Case(2048, 16, 512, required=("paged", *FORMATS)),)
_WARM_UP_TOKENS = 64


def _measure(context: Context) -> tuple[list[Row], tuple[str, ...]]:
    rows: list[Row] = []
    method = ""
    for case in _QUICK_CASES if context.quick else _CASES:
        measured = {}
        for name in CACHES:
            context.progress(f"memory: {name}, {case}")
            measured[name] = _in_own_process(name, case)
        if measured["dynamic"]["tokens"] != measured["paged"]["tokens"]:
            raise WrongAnswer(f"memory, {case}: the paged cache generated other tokens than DynamicCache")
        rows += [_row(case, name, measured) for name in measured]
        method = measured["paged"]["method"]
    return rows, (
        f"{method}; baseline: after loading the model and one short generate; x: rise over that of "
        "DynamicCache. MB = 10^6 bytes.",
        "K and V: in the model's dtype; of a format as it holds them. formula: 2 * layers * kv_heads * "
        "head_dim * dtype_bytes * blocks * block_size, of a pool in the model's dtype, whose tokens are "
        "those of DynamicCache.",
        "A prompt at once peaks in its own activations, which no cache changes: there they differ "
        "by how well the C library re-uses freed memory: tens of MB, this way or that, from run to run.",
    )


BENCH = Bench("memory", "peak of one generate call, SmolLM2-135M float32, batch 1", COLUMNS, _measure)


def _row(case: Case, name: str, measured: dict[str, dict[str, Any]]) -> Row:
    taken, dynamic = measured[name], measured["dynamic"]
    peak, rise, kv = taken["peak_bytes"], taken["rise_bytes"], taken["kv_bytes"]
    pool, formula = taken.get("pool_bytes"), taken.get("formula_bytes")
    if name == "paged" and (pool is None or pool != formula):
        raise WrongAnswer(f"memory, {case}: the pool has {pool} bytes, and the formula gives {formula}")
    cells: dict[str, Cell] = {
        "case": str(case),
        "cache": name,
        "peak_mb": peak / 1e6,
        "rise_mb": rise / 1e6,
        "rise_ratio": rise / dynamic["rise_bytes"] if dynamic["rise_bytes"] else None,
        "kv_mb": kv / 1e6,
        "over_kv_mb": (rise - kv) / 1e6,
        "pool_bytes": pool,
        "formula_bytes": formula,
    }
    limit = dynamic["peak_bytes"] / 1e6 if name in case.required else None
    return Row(cells, required("peak", peak / 1e6, limit, at_least=False, unit=" MB"))


def _in_own_process(name: str, case: Case) -> dict[str, Any]:
    outcome = Workers(peak_of).one(name, case)
    if outcome.problem is not None:
        raise RuntimeError(f"measuring the {name} cache: {outcome.problem}\n{outcome.log}")
    return dict(outcome.value)


# --- in that process ----------------------------------------------------------------------------------------


def peak_of(name: str, case: Case) -> dict[str, Any]:
    """Peak and rise of memory, bytes of the cache, and the tokens, when a cache of this name generates."""
    model, _ = workload.load_model(torch.float32)
    generator = torch.Generator().manual_seed(workload.SEED)
    prompt_tokens = case.total_tokens - case.new_tokens
    prompt = torch.randint(1, model.config.vocab_size, (1, prompt_tokens), generator=generator)
    # Kernels are compiled and libraries make their buffers at the first call; that is no cache's doing.
    _generate(model, name, prompt[:, :_WARM_UP_TOKENS], 4, min(case.chunk, _WARM_UP_TOKENS // 2))
    with measure.peak_memory(torch.device("cpu")) as memory:
        cache, tokens = _generate(model, name, prompt, case.new_tokens, case.chunk)
    found = {
        "peak_bytes": memory.peak_bytes,
        "rise_bytes": memory.rise_bytes,
        "method": memory.method,
        "tokens": tokens[0, prompt_tokens:].tolist(),
        "kv_bytes": _kv_bytes(model.config, cache.get_seq_length()),
    }
    if name == "dynamic":
        return found
    footprint, stats = cache.memory_footprint(), cache.stats()
    found["pool_bytes"] = footprint.pool_bytes
    if name == "paged":
        return {**found, "formula_bytes": _kv_bytes(model.config, stats.num_blocks * stats.block_size)}
    return {**found, "kv_bytes": footprint.used_bytes}


def _generate(
    model: Any, name: str, prompt: torch.Tensor, new_tokens: int, chunk: int
) -> tuple[Any, torch.Tensor]:
    cache = workload.new_cache(name, model)
    tokens: torch.Tensor = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        prefill_chunk_size=chunk or None,
        **{cache_argument(model): cache},
    )
    return cache, tokens


def _kv_bytes(config: Any, tokens: int) -> int:
    head_dim = config.hidden_size // config.num_attention_heads
    return 2 * int(config.num_hidden_layers * config.num_key_value_heads * head_dim) * 4 * tokens
