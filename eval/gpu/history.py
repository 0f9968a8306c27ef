"""Section a, continued: prefill over stored history, against dense attention in float64.

The cases, their masks and what they let be seen are those of the tests; the inputs are drawn afresh.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from eval.gpu import moved
from eval.gpu.device import Device
from eval.gpu.items import Item, Record
from eval.gpu.settings import Settings
from eval.gpu.shared_cases import attention_cases, prefill_cases, tolerance
from hf_paged_cache.kernels.call import Attention
from hf_paged_cache.kernels.prefill import attend_with_history

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DRY_RUN_PREFILLS = ("history_begins_inside_a_block", "softcap_window_sinks", "left_padding")


def items(settings: Settings) -> list[Item]:
    """Every prefill in every dtype."""
    return [
        Item(
            f"history/{str(dtype).removeprefix('torch.')}/{prefill.name}",
            partial(_run, prefill, dtype, settings.seed),
        )
        for prefill in prefill_cases().PREFILLS
        if not settings.dry_run or prefill.name in DRY_RUN_PREFILLS
        for dtype in DTYPES
    ]


def _run(prefill: Any, dtype: torch.dtype, seed: int, record: Record, device: Device) -> None:
    case = prefill.case
    problem = attention_cases().build(case, dtype, seed=seed)
    tensors = _fresh_inputs(prefill, problem, dtype, torch.Generator().manual_seed(seed + 1))
    want = _dense(prefill, problem, tensors)
    blocks = moved.blocks_on(problem.blocks, device.torch_device)
    given: dict[str, Any] = {
        name: None if x is None else moved.moved(x, device.torch_device) for name, x in tensors.items()
    }
    with device.poisoned():
        fresh = given.pop("fresh_keys"), given.pop("fresh_values")
        a = Attention(
            **given,
            start=case.start,
            end=case.end,
            scale=case.head_dim**-0.5,
            causal=prefill.is_causal,
            window=prefill.window,
            softcap=prefill.softcap,
            queries_are_last=False,
        )
        got = attend_with_history(blocks, a, *fresh).cpu()
    error = float(attention_cases().rms_ratio(got, want)) if got.isfinite().all() else float("inf")
    record.values["rms_ratio"] = error
    record.bound("RMS ratio", error, tolerance(dtype))
    record.check("zeros where a query sees nothing", bool((got[want == 0] == 0).all()))


def _fresh_inputs(
    prefill: Any, problem: Any, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, torch.Tensor | None]:
    """The tensors of the call. K and V of a new token that nobody sees are NaN."""
    case = prefill.case

    def normal(heads: int, dim: int) -> torch.Tensor:
        drawn = torch.randn(case.batch, prefill.fresh, heads, dim, generator=generator)
        return drawn.to(dtype).transpose(1, 2)

    query = normal(case.q_heads, case.head_dim)
    keys, values = (normal(case.kv_heads, stored.shape[3]) for stored in (problem.keys, problem.values))
    mask = prefill_cases().mask_of(prefill, dtype, generator)
    visible = prefill_cases().visible_of(prefill, mask)
    seen = visible.unflatten(1, (case.kv_heads, case.group)).any(2).any(2)[..., -prefill.fresh :, None]
    return {
        "query": query,
        "fresh_keys": keys.masked_fill(~seen, torch.nan),
        "fresh_values": values.masked_fill(~seen, torch.nan),
        "mask": mask,
        "sinks": torch.randn(case.q_heads, generator=generator).to(dtype) if prefill.sinks else None,
    }


def _dense(prefill: Any, problem: Any, tensors: dict[str, torch.Tensor | None]) -> torch.Tensor:
    """The float64 answer `[batch, fresh, q_heads, v_head_dim]`."""
    mask, fresh_keys, fresh_values = (tensors[name] for name in ("mask", "fresh_keys", "fresh_values"))
    assert fresh_keys is not None, "every prefill has new K"
    assert fresh_values is not None, "and new V"
    bias = torch.zeros(1, dtype=torch.float64)
    if mask is not None and mask.dtype != torch.bool:
        bias = mask.double().masked_fill(mask.isneginf(), 0.0)
    want: torch.Tensor
    want, _ = attention_cases().dense_answer(
        tensors["query"],
        torch.cat((problem.keys, fresh_keys.nan_to_num(0.0)), dim=2),
        torch.cat((problem.values, fresh_values.nan_to_num(0.0)), dim=2),
        prefill_cases().visible_of(prefill, mask),
        bias,
        prefill.case.head_dim**-0.5,
        prefill.softcap,
        tensors["sinks"],
    )
    return want
