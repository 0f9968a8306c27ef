"""The table of speed and memory beside the caches of transformers."""

from __future__ import annotations

from eval.readme import show
from eval.readme.results import Results

STEPS = "bench_epyc_zen4_2cores.json"
MEMORY = "bench_epyc_zen4_2cores_prefill_memory.json"
TOKENS = 8192
_ATTENTION = (
    ("attention step of one layer with its write, SmolLM2 shape, float32", "SmolLM2-135M", "float32"),
    ("the same, bfloat16", "SmolLM2-135M", "bfloat16"),
    ("Llama-3-8B shape, float32", "Llama-3-8B", "float32"),
    ("the same, bfloat16", "Llama-3-8B", "bfloat16"),
)
_DECODE = (
    ("decode step of the whole SmolLM2-135M, float32", "float32"),
    ("the same, bfloat16", "bfloat16"),
)


def table(results: Results) -> str:
    """Times and bytes at 8192 tokens for three caches, and how many times faster `PagedCache` is."""
    rows = [
        *(_attention(results, *case) for case in _ATTENTION),
        *(_decode(results, *case) for case in _DECODE),
        _memory(results),
    ]
    header = [f"at {TOKENS} tokens of context", "`DynamicCache`", "`StaticCache`", "`PagedCache`", ""]
    return f"{show.table(header, rows)}\n\n{show.hardware(results, [STEPS, MEMORY])}"


def _attention(results: Results, title: str, shape: str, dtype: str) -> list[str]:
    row = results.row(STEPS, "attention", shape=shape, dtype=dtype, tokens=TOKENS, batch=1)
    seconds = (row[f"{name}_us"] / 1e6 for name in ("dynamic", "static", "paged"))
    return [title, *show.times(*seconds), show.ratio(row["over_dynamic"])]


def _decode(results: Results, title: str, dtype: str) -> list[str]:
    row = results.row(STEPS, "decode", dtype=dtype, tokens=TOKENS)
    dynamic, paged = show.times(row["dynamic_ms"] / 1e3, row["paged_ms"] / 1e3)
    return [title, dynamic, "", paged, show.ratio(row["over_dynamic"])]


def _memory(results: Results) -> list[str]:
    case = f"{TOKENS} tokens, prompt in chunks of 512"
    dynamic, paged = (
        results.row(MEMORY, "memory", case=case, cache=cache)["rise_mb"] for cache in ("dynamic", "paged")
    )
    title = "memory that one `generate` adds, float32"
    return [title, f"{dynamic:.0f} MB", "", f"{paged:.0f} MB", show.ratio(paged / dynamic)]
