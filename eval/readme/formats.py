"""The table of speed and bytes by format."""

from __future__ import annotations

from eval.readme import show
from eval.readme.results import Results

ATTENTION = "bench_epyc_zen4_2cores_formats.json"
STEPS = "bench_epyc_zen4_2cores_formats_step.json"
TOKENS = 8192
FORMATS = ("auto", "int8", "fp8", "k8v4", "int4")
DECODED = ("auto", "int8", "int4")
"""Formats of the `decode` bench."""


def table(results: Results) -> str:
    """One attention step and one decode step by format, over `DynamicCache` and over the stock cache."""
    rows = [
        _attention(results, "SmolLM2 shape", "SmolLM2-135M"),
        _attention(results, "Llama-3-8B shape", "Llama-3-8B"),
        _over_stock(results, "Llama-3-8B shape, over stock", "Llama-3-8B"),
        _bytes(results),
        _decode(results),
    ]
    header = ["", "`DynamicCache`", *(f"`{name}`" for name in FORMATS)]
    return f"{show.table(header, rows)}\n\n{show.hardware(results, [ATTENTION, STEPS])}"


def _attention(results: Results, title: str, shape: str) -> list[str]:
    rows = [results.row(ATTENTION, "formats", shape=shape, tokens=TOKENS, format=name) for name in FORMATS]
    dynamic = f"{rows[0]['dynamic_us'] / 1e3:.1f} ms"
    return [title, dynamic, *(f"{row['us']:.0f} µs, {show.ratio(row['over_dynamic'])}" for row in rows)]


def _over_stock(results: Results, title: str, shape: str) -> list[str]:
    rows = [results.row(ATTENTION, "formats", shape=shape, tokens=TOKENS, format=name) for name in FORMATS]
    return [title, "", *(show.ratio(row["over_stock"]) for row in rows)]


def _bytes(results: Results) -> list[str]:
    title = "bytes of K and V, of `DynamicCache` in float32 (bfloat16)"
    cells = []
    for name in FORMATS:
        ratios = (
            results.row(STEPS, "bytes", dtype=dtype, format=name)["ratio"]
            for dtype in ("float32", "bfloat16")
        )
        cells.append("{:.3g} ({:.3g})".format(*ratios))
    return [title, "1 (1)", *cells]


def _decode(results: Results) -> list[str]:
    cells = []
    dynamic = ""
    for name in FORMATS:
        if name not in DECODED:
            cells.append("")
            continue
        row = results.row(STEPS, "decode", dtype="float32", tokens=TOKENS, format=name)
        dynamic = f"{row['dynamic_ms']:.0f} ms"
        cells.append(f"{row['paged_ms']:.1f} ms, {show.ratio(row['over_dynamic'])}")
    return ["decode step of the whole SmolLM2-135M", dynamic, *cells]
