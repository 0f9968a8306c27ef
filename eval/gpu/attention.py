"""Section c: one decode step of one layer at the shape of Llama-3-8B, against the bandwidth of a copy.

The step writes the new token and attends all tokens. It is timed as Python calls it, and as a CUDA graph of
the same launches, which leaves the time of the kernels alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch

from eval.bench.timing import Timings
from eval.gpu import rivals
from eval.gpu.attention_setup import LLAMA_3_8B, TOY, Case, DenseStack, PagedStack
from eval.gpu.device import Device
from eval.gpu.items import Item, Record, Skip
from eval.gpu.kernels import relative_error
from eval.gpu.settings import Settings
from eval.gpu.timing import in_turns

SIZES = (
    (8, 8192), (8, 32768), (32, 8192), (32, 32768), (1, 2048), (1, 8192), (1, 32768), (8, 131072),
    (32, 131072), (1, 131072), (8, 2048), (32, 2048),
)  # fmt: skip
"""Batch and tokens; what matters most comes first, in case the time runs out."""
DRY_RUN_SIZES = ((1, 70), (2, 130))
COPY_BYTES = 2 << 30
DRY_RUN_COPY_BYTES = 1 << 20
TOLERANCE = 5e-3
"""RMS ratio of the bfloat16 answer; section a has the tight bound."""


def items(settings: Settings) -> list[Item]:
    """The sizes, then what is launched for a layer, then other kernels where they are installed."""
    sizes, shape = (DRY_RUN_SIZES, TOY) if settings.dry_run else (SIZES, LLAMA_3_8B)
    cases = [Case(shape, *size) for size in sizes]
    rival_cases = cases[:1] if settings.dry_run else [cases[0], cases[1]]
    return [
        Item(_key("launches", cases[0]), partial(_launches, cases[0], settings)),
        *(Item(_key("decode", case), partial(_measure, case, settings), 5.0, 60.0) for case in cases),
        *(
            Item(_key(name, case), partial(_rival, name, case, settings), 10.0, 60.0, optional=True)
            for name in ("flex", "flash_attn", "flashinfer")
            for case in rival_cases
        ),
    ]


def _key(what: str, case: Case) -> str:
    return f"{what}/{case.batch}x{case.tokens}"


def _generator(settings: Settings, device: Device) -> torch.Generator:
    return torch.Generator(device.torch_device).manual_seed(settings.seed)


def _launches(case: Case, settings: Settings, record: Record, device: Device) -> None:
    """How many kernels one layer's step takes, and which."""
    stack = PagedStack(case, device, _generator(settings, device))
    stack.step()
    names = device.launches_of(lambda: stack.attend(0))
    record.values |= {"launches": len(names), "kernels": names}


def _measure(case: Case, settings: Settings, record: Record, device: Device) -> None:
    generator = _generator(settings, device)
    _check_room(case, device)
    copy, copy_bytes = _copy(settings, device)
    paged = PagedStack(case, device, generator)
    paged.forget_last_token()
    paged.step()
    _check_answer(record, paged, "eager")
    dense = DenseStack(paged, device, generator)
    paged.forget_last_token()
    paged.masked_step()
    _check_answer(record, paged, "masked")
    steps: dict[str, Callable[[], object]] = {
        "copy": copy,
        "eager": paged.step,
        "masked": paged.masked_step,
        "sdpa": rivals.sdpa(dense),
    }
    _warm_up(record, steps)
    budget_s = 1.5 if device.is_gpu else 0.1
    timings = in_turns(device, steps, budget_s=budget_s)
    _note(record, case, paged.layers, timings, copy_bytes)
    try:
        graph = device.graph_of(paged.step)
    except Skip as skip:
        record.values["graph"] = str(skip)
        return
    record.values["graph"] = "captured"
    paged.forget_last_token()
    graph()
    _check_answer(record, paged, "graph")
    # Only now: a step that may not be captured can leave the process without a device.
    timings = in_turns(device, {"copy": copy, "graph": graph}, budget_s=budget_s)
    _note(record, case, paged.layers, timings, copy_bytes)


def _check_room(case: Case, device: Device) -> None:
    needed = 2 * case.kv_bytes * case.layers(device.cache_bytes()) + 2 * COPY_BYTES + (4 << 30)
    free = device.free_bytes()
    if free is not None and free < needed:
        raise Skip(f"needs {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free")


def _check_answer(record: Record, paged: PagedStack, what: str) -> None:
    """The last step's new token and answer in one row and kv head of the last layer, against float64."""
    layer, row, kv_head = paged.layers - 1, paged.case.batch - 1, paged.case.shape.kv_heads - 1
    blocks, last = paged.blocks[layer], paged.case.tokens - 1
    block, slot = int(blocks.table[row, last // blocks.block_size]), last % blocks.block_size
    stored = blocks.keys[block, kv_head, slot], blocks.values[block, kv_head, slot]
    new = paged.new_keys[row, kv_head, 0], paged.new_values[row, kv_head, 0]
    written = all(torch.equal(a, b) for a, b in zip(stored, new, strict=True))
    record.check(f"the new token is written, {what}", written)
    group = paged.case.shape.q_heads // paged.case.shape.kv_heads
    got = paged.last_output[row, 0, kv_head * group :].cpu()
    error = relative_error(got, paged.answer_in_float64(layer, row, kv_head).cpu())
    record.values["rms_ratio"] = max(error, record.values.get("rms_ratio", 0.0))
    record.bound(f"RMS ratio, {what}", error, TOLERANCE)


def _copy(settings: Settings, device: Device) -> tuple[Callable[[], object], int]:
    """A copy within the device, and the bytes that it reads and writes."""
    count = DRY_RUN_COPY_BYTES if settings.dry_run else COPY_BYTES
    source = torch.empty(count // 2, dtype=torch.bfloat16, device=device.torch_device).normal_()
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * count


def _warm_up(record: Record, steps: dict[str, Callable[[], object]]) -> None:
    """Run each once; a rival that fails is noted and left out."""
    for name in list(steps):
        try:
            steps[name]()
        except RuntimeError as error:
            if name != "sdpa":
                raise
            record.values["sdpa"] = str(error).splitlines()[0]
            del steps[name]


def _note(record: Record, case: Case, layers: int, timings: Timings, copy_bytes: int) -> None:
    copy_bytes_per_s = [copy_bytes / seconds for seconds in timings.seconds["copy"]]
    record.values["copy_gb_per_s"] = statistics.median(copy_bytes_per_s) / 1e9
    record.values |= {"layers": layers, "kv_bytes": case.kv_bytes}
    for name, seconds in timings.seconds.items():
        if name == "copy":
            continue
        rates = [case.kv_bytes * layers / s for s in seconds]
        share = statistics.median(r / c for r, c in zip(rates, copy_bytes_per_s, strict=True))
        record.values |= {
            f"{name}_us": 1e6 * statistics.median(seconds) / layers,
            f"{name}_gb_per_s": statistics.median(rates) / 1e9,
            f"{name}_percent_of_copy": 100 * share,
            f"{name}_rounds": len(seconds),
        }


def _rival(name: str, case: Case, settings: Settings, record: Record, device: Device) -> None:
    generator = _generator(settings, device)
    _check_room(case, device)
    copy, copy_bytes = _copy(settings, device)
    paged = PagedStack(case, device, generator)
    if name == "flashinfer":
        step = rivals.flashinfer(paged, device)
    elif name == "flash_attn":
        step = rivals.flash_attention(DenseStack(paged, device, generator))
    else:
        step = rivals.flex_attention(DenseStack(paged, device, generator), device)
    for _ in range(2):
        step()
    timings = in_turns(device, {"copy": copy, "rival": step}, budget_s=1.0)
    _note(record, case, paged.layers, timings, copy_bytes)
