"""Many new tokens over a stored history: the table of cases that every backend's prefill is tested with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hf_paged_cache.kernels.call import Attention, LayerBlocks
from hf_paged_cache.kernels.prefill import attend_with_history
from tests.kernels.cases import Case, build, dense_answer


@dataclass(frozen=True)
class Prefill:
    """The history is the stored range of `case`; the rest is about the fresh tokens."""

    name: str
    case: Case
    fresh: int
    mask: str | None = None
    is_causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


def history_case(**fields: object) -> Case:
    return Case("history", **({"group": 3, "end": 130, "kv_heads": 1} | fields))  # type: ignore[arg-type]


PREFILLS = (
    Prefill("plain", history_case(kv_heads=2), 100),
    Prefill("one_fresh_token", history_case(), 1),
    Prefill("one_history_token", history_case(end=1), 63),
    Prefill("long_history", history_case(end=2500, batch=1, kv_heads=1), 33),
    Prefill("history_begins_inside_a_block", history_case(start=37, end=150), 20),
    Prefill("history_begins_at_a_block", history_case(start=64, end=128), 20),
    Prefill("mha", history_case(group=1, kv_heads=5), 20),
    Prefill("gqa_8_head_dim_128", history_case(group=8, head_dim=128, kv_heads=1), 65),
    Prefill("head_dim_97", history_case(head_dim=97), 20),
    Prefill("v_smaller", history_case(head_dim=96, v_head_dim=64), 20),
    Prefill("v_larger", history_case(head_dim=64, v_head_dim=80), 20),
    Prefill("small_blocks", history_case(block_size=16), 20),
    Prefill("not_causal", history_case(), 20, is_causal=False),
    Prefill("null_blocks", history_case(nulls=((0, 0), (1, 1))), 20),
    Prefill("window_inside_fresh", history_case(), 50, window=8),
    Prefill("window_into_history", history_case(), 50, window=70),
    Prefill("window_longer_than_all", history_case(), 50, window=1000),
    Prefill("window_not_causal", history_case(), 50, window=30, is_causal=False),
    Prefill("softcap", history_case(), 20, softcap=1.5),
    Prefill("sinks", history_case(), 20, sinks=True),
    Prefill("sinks_window", history_case(), 40, sinks=True, window=10),
    Prefill("softcap_window_sinks", history_case(kv_heads=2), 40, softcap=1.5, sinks=True, window=50),
    Prefill("bool", history_case(), 20, mask="bool"),
    Prefill("bool_few_queries", history_case(), 7, mask="bool"),
    Prefill("bool_not_causal", history_case(), 20, mask="bool", is_causal=False),
    Prefill("bool_per_head", history_case(kv_heads=2), 20, mask="bool_per_head"),
    Prefill("bool_2d", history_case(), 20, mask="bool_2d"),
    Prefill("left_padding", history_case(), 20, mask="left_padding"),
    Prefill("left_padding_window", history_case(), 20, mask="left_padding", window=60),
    Prefill("left_padding_beyond_history", history_case(end=16), 40, mask="left_padding"),
    Prefill("sees_only_fresh", history_case(), 20, mask="only_fresh"),
    Prefill("sees_only_history", history_case(), 20, mask="only_history"),
    Prefill("sees_nothing", history_case(), 20, mask="nothing"),
    Prefill("sees_nothing_but_sinks", history_case(), 20, mask="nothing", sinks=True),
    Prefill("bias", history_case(), 20, mask="bias"),
    Prefill("bias_softcap", history_case(), 20, mask="bias", softcap=2.0),
    Prefill("minus_inf", history_case(), 20, mask="minus_inf"),
    Prefill("finfo_min", history_case(), 20, mask="finfo_min"),
    Prefill("offsets", history_case(offsets=(7, 90)), 20),
    Prefill("offsets_small_blocks_window", history_case(offsets=(7, 90), block_size=16), 50, window=70),
    Prefill("offsets_end_in_the_fresh_tokens", history_case(end=16, offsets=(25, 3)), 40),
    Prefill("offsets_end_in_the_fresh_tokens_bias", history_case(end=16, offsets=(25, 0)), 40, mask="bias"),
    Prefill("offsets_few_queries_sinks", history_case(offsets=(64, 140)), 3, sinks=True, softcap=1.5),
    Prefill("offsets_bool", history_case(offsets=(64, 1), start=37), 20, mask="bool"),
    Prefill(
        "mask_and_nulls_and_window", history_case(kv_heads=2, nulls=((0, 0),)), 20, mask="bool", window=100
    ),
)

QUICK_PREFILLS = frozenset((
    *("one_fresh_token", "history_begins_inside_a_block", "v_larger", "not_causal"),
    *("window_into_history", "softcap_window_sinks", "bool_per_head", "left_padding_window"),
    *("sees_only_history", "sees_nothing_but_sinks", "bias_softcap", "offsets_small_blocks_window"),
    *("offsets_end_in_the_fresh_tokens_bias", "mask_and_nulls_and_window"),
))  # fmt: skip
"""Names of those that `make test` runs where one takes long: one for each path."""


def mask_of(p: Prefill, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor | None:
    history, tokens = p.case.end - p.case.start, p.case.end - p.case.start + p.fresh
    shape = (p.case.batch, p.case.q_heads, p.fresh, tokens)
    keep = torch.rand(shape, generator=g) < 0.6
    keep[..., history:] |= torch.eye(p.fresh, dtype=torch.bool)
    padding = torch.arange(tokens) >= torch.arange(p.case.batch)[:, None, None, None] * 25
    bias = torch.randn(p.case.batch, 1, p.fresh, tokens, generator=g)
    match p.mask:
        case None:
            return None
        case "bool":
            return keep
        case "bool_per_head":
            return keep[:1, :, :1] | (torch.arange(tokens) == 0)
        case "bool_2d":
            return keep[0, 0]
        case "left_padding":
            return padding
        case "only_fresh":
            return torch.arange(tokens) >= history
        case "only_history":
            return torch.arange(tokens) < history
        case "nothing":
            keep[0, :, 3:5] = False
            return keep
        case "bias":
            return bias.to(dtype)
        case "minus_inf":
            return bias.masked_fill(~keep[:, :1], -torch.inf).to(dtype)
        case "finfo_min":
            fully_causal = torch.ones(p.fresh, tokens, dtype=torch.bool).tril(history)
            return torch.zeros(bias.shape, dtype=dtype).masked_fill(
                ~(padding & fully_causal), torch.finfo(dtype).min
            )
    raise AssertionError(f"no mask {p.mask}")


def visible_of(p: Prefill, mask: torch.Tensor | None) -> torch.Tensor:
    history, tokens = p.case.end - p.case.start, p.case.end - p.case.start + p.fresh
    visible = torch.ones(p.case.batch, p.case.q_heads, p.fresh, tokens, dtype=torch.bool)
    positions = torch.arange(p.case.start, p.case.start + tokens)
    own = p.case.end + torch.arange(p.fresh)[:, None]
    if p.is_causal:
        visible &= positions <= own
    if p.window is not None:
        visible &= positions > own - p.window
    for row, column in p.case.nulls:
        first = column * p.case.block_size - p.case.start
        visible[row, ..., max(first, 0) : min(first + p.case.block_size, history)] = False
    for row in range(p.case.batch):
        visible[row, ..., : max(p.case.offset(row) - p.case.start, 0)] = False
    if mask is not None:
        visible &= mask if mask.dtype == torch.bool else ~mask.isneginf()
    return visible


def prefill_answer(
    p: Prefill, dtype: torch.dtype, device: torch.device | str = "cpu", *, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, dict[str, object]]:
    """What `attend_with_history` says on a device, the float64 answer, and the arguments it was given."""
    g = torch.Generator().manual_seed(seed + 1)
    problem = build(p.case, dtype, seed=seed)

    def normal(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(p.case.batch, p.fresh, heads, dim, generator=g).to(dtype).transpose(1, 2)

    query = normal(p.case.q_heads, p.case.head_dim)
    keys, values = (normal(p.case.kv_heads, pool.shape[3]) for pool in (problem.keys, problem.values))
    mask = mask_of(p, dtype, g)
    sinks = torch.randn(p.case.q_heads, generator=g).to(dtype) if p.sinks else None
    visible = visible_of(p, mask)
    bias = torch.zeros(1, dtype=torch.float64)
    if mask is not None and mask.dtype != torch.bool:
        bias = mask.double().masked_fill(mask.isneginf(), 0.0)
    all_keys, all_values = torch.cat([problem.keys, keys], 2), torch.cat([problem.values, values], 2)
    scale = p.case.head_dim**-0.5
    want, _ = dense_answer(query, all_keys, all_values, visible, bias, scale, p.softcap, sinks)
    # A new token that nobody sees is padding: its K and V may be anything.
    seen = visible.unflatten(1, (p.case.kv_heads, p.case.group)).any(2).any(2)[..., -p.fresh :, None]
    arguments = {
        "query": query,
        "fresh_keys": keys.masked_fill(~seen, torch.nan),
        "fresh_values": values.masked_fill(~seen, torch.nan),
        "start": p.case.start,
        "end": p.case.end,
        "scale": scale,
        "mask": mask,
        "causal": p.is_causal,
        "window": p.window,
        "softcap": p.softcap,
        "sinks": sinks,
    }
    arguments = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    stored = (x.to(device) for x in (problem.blocks.keys, problem.blocks.values, problem.blocks.table))
    offsets = p.case.offsets_tensor()
    blocks = LayerBlocks(*stored, offsets=None if offsets is None else offsets.to(device))
    return attended(blocks, **arguments), want, arguments


def attended(
    blocks: LayerBlocks, *, query: Any, fresh_keys: Any, fresh_values: Any, **question: Any
) -> torch.Tensor:
    """What `attend_with_history` says to the arguments of `prefill_answer`."""
    a = Attention(query, queries_are_last=False, **question)
    return attend_with_history(blocks, a, fresh_keys, fresh_values)
