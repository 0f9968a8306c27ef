"""A profile as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .report import CacheProfile, LayerErrors, StepErrors

_HEADER = ("layer", "format", "K own", "K", "V own", "V", "attn own", "attn", "attn cos", "worst head")


def as_text(profile: CacheProfile, step: StepErrors) -> str:
    """The profile's summary, and a line for every layer after a measured step."""
    share = profile.bytes_per_token / profile.full_bytes_per_token
    summary = [
        f"{profile.kv_cache_dtype} cache of {profile.model_type}: {profile.batch} rows, prompt of "
        f"{profile.prompt_tokens} tokens, {len(profile.kl_by_step)} decode steps",
        f"KL {profile.kl:.2e} nats, top-1 {profile.top1:.1%} (mean over steps); "
        f"{profile.bytes_per_token:,.0f} bytes per token, {share:.2f} of full precision",
        "",
        *_lines(
            [("step", "KL", "top-1"), *((str(x.step), _small(x.kl), f"{x.top1:.1%}") for x in profile.steps)]
        ),
        "",
        f"RMS ratio after {step.step} steps; own: what the layer itself adds, of K and V that were exact",
        *_lines([_HEADER, *(_row(layer, profile.layer_dtypes[layer.layer]) for layer in step.layers)]),
        "",
        f"worst layers: {', '.join(map(str, profile.worst_layers(5)))}",
    ]
    return "\n".join(summary)


def _row(layer: LayerErrors, layer_dtype: str) -> tuple[str, ...]:
    by_head = layer.own_attention.rms_ratio_by_head
    worst = max(range(len(by_head)), key=by_head.__getitem__)
    pairs = (
        (layer.own_keys, layer.keys),
        (layer.own_values, layer.values),
        (layer.own_attention, layer.attention),
    )
    numbers = [_small(errors.rms_ratio) for pair in pairs for errors in pair]
    return (
        str(layer.layer),
        layer_dtype,
        *numbers,
        f"{layer.attention.cosine:.4f}",
        f"{worst} ({_small(by_head[worst])})",
    )


def _small(value: float) -> str:
    """Three digits, without an exponent where the eye can do without."""
    return f"{value:.4f}" if value == 0 or value >= 1e-3 else f"{value:.1e}"


def _lines(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
