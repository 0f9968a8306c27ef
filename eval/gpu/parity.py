"""Section b: `generate` says the same with a `PagedCache` as with a `DynamicCache`.

Small models with random weights. In float32 tokens are equal; in bfloat16, where two right kernels round
differently, the logits of a given text are as near to those of the same weights in float32 as the host's own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from eval.core.hardware import Device
from eval.gpu.cases import relative_error, shared
from eval.gpu.plan import Item, Record, Settings

models = shared("support.models")
FAMILIES = ("llama", "mistral", "gemma2")
TIE = 1e-4  # two logits as close as this, relative to the largest, are a tie that rounding decides
MAX_ERROR_OVER_HOST = 1.15  # of the error of bfloat16 logits against float32 ones, the host's cache having 1


@dataclass(frozen=True)
class Mode:
    """A way of generating. `pads` has the number of pad tokens on the left of each row."""

    name: str
    pads: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    block_size: int = 16
    options: dict[str, Any] = field(default_factory=dict)


MODES = (
    Mode("greedy_ragged", (0, 5, 18), 37, 44),
    Mode("beams", (0, 5), 37, 32, options={"num_beams": 4}),
    Mode("long_prompt", (0, 5, 80), 150, 44, block_size=64),
)
DRY_RUN_MODES = (
    Mode("greedy_ragged", (0, 5), 18, 5),
    Mode("beams", (0, 5), 18, 4, options={"num_beams": 2}),
    Mode("long_prompt", (0, 9), 70, 3, block_size=64),
)


def items(settings: Settings) -> list[Item]:
    """Each family in each mode, its logits in bfloat16, and one with a compiled decode step."""
    modes = DRY_RUN_MODES if settings.dry_run else MODES
    seed = settings.seed
    return [
        *(
            Item(f"tokens/float32/{family}/{mode.name}", partial(_tokens, family, mode, seed), limit_s=120.0)
            for mode in modes
            for family in FAMILIES
        ),
        *(
            Item(f"logits/bfloat16/{family}", partial(_logits, family, modes[0], seed), limit_s=120.0)
            for family in FAMILIES
        ),
        *(
            Item(f"compiled/float32/llama/{mode.name}", partial(_compiled, mode, seed), 10.0, 150.0)
            for mode in (modes[0], modes[2])
        ),
    ]


# --- tokens -------------------------------------------------------------------------------------------------


def _tokens(family: str, mode: Mode, seed: int, record: Record, device: Device) -> None:
    model = models.by_name(family).build().to(device.torch_device)
    inputs = _inputs(mode, seed, device)
    with device.poisoned():
        want = _generate(model, mode, inputs, models.host_cache(model))
        cache = models.paged_cache(model, block_size=mode.block_size)
        got = _generate(model, mode, inputs, cache)
    margin = partial(_margin, model, inputs, got, want) if "num_beams" not in mode.options else None
    _check_tokens(record, cache, got, want, mode, margin)
    record.values["backend"] = cache.stats().backend


def _check_tokens(
    record: Record,
    cache: Any,
    got: torch.Tensor,
    want: torch.Tensor,
    mode: Mode,
    margin: Callable[[], float] | None,
) -> None:
    """That tokens are equal, ties of the host's own logits apart where `margin` can tell them."""
    record.check("length", cache.get_seq_length() == want.shape[1] - 1, f"{int(cache.get_seq_length())}")
    record.attempt("blocks and tables agree", cache.check_integrity)
    if not record.check("shape", got.shape == want.shape, f"{tuple(got.shape)}, not {tuple(want.shape)}"):
        return
    differ = (got != want).cpu()
    record.values["tokens"] = differ[:, mode.prompt_tokens :].numel()
    record.values["tokens_that_differ"] = int(differ.sum())
    first = [int(row.nonzero()[0]) - mode.prompt_tokens if row.any() else None for row in differ]
    where = f"new token at which each row first differs: {first}"
    if not differ.any() or margin is None:
        record.check("equal tokens", not differ.any(), where)
        return
    record.values["margin"] = margin()
    record.check("equal tokens up to ties", record.values["margin"] <= TIE, where)


def _margin(model: Any, inputs: dict[str, torch.Tensor], got: torch.Tensor, want: torch.Tensor) -> float:
    """By how much the host preferred its token where a row first differs, relative to its largest logit."""
    from hf_paged_cache import disable

    disable(model)
    logits = step_logits(model, models.host_cache(model), want, inputs)
    margins = [0.0]
    for row in (got != want).any(1).nonzero().flatten().tolist():
        first = int((got[row] != want[row]).nonzero()[0])
        scores = logits[row, first - inputs["input_ids"].shape[1]]
        margins.append(float((scores[want[row, first]] - scores[got[row, first]]) / scores.abs().max()))
    return max(margins)


def _generate(model: Any, mode: Mode, inputs: dict[str, torch.Tensor], cache: Any, **more: Any) -> Any:
    options = {"max_new_tokens": mode.new_tokens, "do_sample": False, **mode.options, **more}
    return model.generate(**inputs, **options, **{models.cache_kwarg(): cache})


def _inputs(mode: Mode, seed: int, device: Device) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, models.VOCAB, (len(mode.pads), mode.prompt_tokens), generator=generator)
    mask = (torch.arange(mode.prompt_tokens) >= torch.tensor(mode.pads)[:, None]).long()
    ids[mask == 0] = models.PAD
    return {"input_ids": ids.to(device.torch_device), "attention_mask": mask.to(device.torch_device)}


# --- the compiled decode step -------------------------------------------------------------------------------


def _compiled(mode: Mode, seed: int, record: Record, device: Device) -> None:
    from hf_paged_cache import PagedCache

    model = models.by_name("llama").build().to(device.torch_device)
    inputs = _inputs(mode, seed, device)
    want = _generate(model, mode, inputs, models.host_cache(model))
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    with device.compiles():
        cache = PagedCache(model, block_size=mode.block_size, compile=True)
        got = _generate(model, mode, inputs, cache, **device.compile_options())
        is_compileable = bool(cache.is_compileable)
    _check_tokens(record, cache, got, want, mode, partial(_margin, model, inputs, got, want))
    compiled = hasattr(model, "_compiled_call") and bool(counters["stats"].get("unique_graphs"))
    record.values |= {
        "is_compileable": is_compileable,
        "is_compiled": compiled,
        "graphs": int(counters["stats"].get("unique_graphs", 0)),
        "graph_breaks": {str(why): int(n) for why, n in counters["graph_break"].items()},
        "cudagraph_skips": int(counters["inductor"].get("cudagraph_skips", 0)),
    }
    record.check("is_compileable", is_compileable)
    record.check("generate compiled the decode step", compiled)


# --- logits in bfloat16 -------------------------------------------------------------------------------------


def _logits(family: str, mode: Mode, seed: int, record: Record, device: Device) -> None:
    model = models.by_name(family).build(dtype=torch.bfloat16).to(device.torch_device)
    exact_model = models.by_name(family).build(dtype=torch.bfloat16).float().to(device.torch_device)
    inputs = _inputs(mode, seed, device)
    text = _generate(model, mode, inputs, models.host_cache(model))
    with device.poisoned():
        exact = step_logits(exact_model, models.host_cache(exact_model), text, inputs)
        host = step_logits(model, models.host_cache(model), text, inputs)
        paged = step_logits(model, models.paged_cache(model, block_size=mode.block_size), text, inputs)
    errors = {name: relative_error(logits, exact) for name, logits in (("host", host), ("paged", paged))}
    ratio = errors["paged"] / errors["host"]
    record.values |= {"host_error": errors["host"], "paged_error": errors["paged"], "over_host": ratio}
    record.bound("error over the host's own", ratio, MAX_ERROR_OVER_HOST)


@torch.no_grad()
def step_logits(model: Any, cache: Any, text: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits `[rows, new tokens, vocabulary]` of a prefill and of one forward for each later token."""
    prompt_tokens = inputs["input_ids"].shape[1]
    new_tokens = text.shape[1] - prompt_tokens
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, new_tokens), value=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits: list[torch.Tensor] = []
    for start, end in pairwise((0, *range(prompt_tokens, prompt_tokens + new_tokens))):
        options = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
        outputs = model(text[:, start:end], **options, **{models.cache_kwarg(): cache})
        logits.append(outputs.logits[:, -1])
    return torch.stack(logits, dim=1).float()
