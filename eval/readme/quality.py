"""The table of quality by format."""

from __future__ import annotations

from typing import Any

from eval.readme import show
from eval.readme.results import Results

FILE = "quality.json"
_SCHEMES = {
    "auto": ("`auto`", "the model's dtype", "the same"),
    "int8": ("`int8`", "8 bits per token, rotated", "the same"),
    "fp8": ("`fp8`", "e4m3 per token", "the same"),
    "k8v4": ("`k8v4`", "as `int8`", "4 bits per token, rotated"),
    "int4": ("`int4`", "4 bits per channel and block", "as `k8v4`"),
    "int8_block": ("`int8_block`", "8 bits, one scale a block", "the same"),
    "int4_group": ("`int4_group`", "4 bits, groups of 32 channels", "the same"),
    "stock quanto": ("stock `QuantizedCache`, quanto int4", "4 bits, groups of 64", "the same"),
    "stock hqq": ("stock `QuantizedCache`, HQQ int4", "the same", "the same"),
}
"""Scheme -> its name, and how K and V are stored."""
_HEADER = ("`kv_cache_dtype`", "K", "V", "bits per value", "KL", "perplexity", "with a key offset")
_NOTHING = 1e-6


def table(results: Results) -> str:
    """KL and perplexity against full precision by format, and perplexity with a key offset."""
    rows = [[*words, *_numbers(results, scheme)] for scheme, words in _SCHEMES.items()]
    return f"{show.table(_HEADER, rows)}\n\n{show.hardware(results, [FILE])}"


def _numbers(results: Results, scheme: str) -> list[str]:
    plain = results.row(FILE, "quality", scheme=scheme)
    offset = results.row(FILE, "offset", scheme=scheme)
    kl = plain["kl_nats"]
    return [
        "32 or 16" if scheme == "auto" else f"{plain['stored_bits']:.2f}",
        "0" if kl < _NOTHING else f"{kl:.1e}",
        _perplexity(plain),
        _perplexity(offset),
    ]


def _perplexity(row: dict[str, Any]) -> str:
    ratio = row["perplexity_ratio"]
    digits = 4 if ratio < 2 else 2
    shown = "1" if abs(ratio - 1) < _NOTHING else f"{ratio:.{digits}f}"
    return f"{shown} ({row['note']})" if row["note"] else shown
