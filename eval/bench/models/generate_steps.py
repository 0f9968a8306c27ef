"""Decode steps of `generate` over a long context, cache by cache: speed, memory, and logits.

Caches are filled at once. `generate` then continues, and compiles the decode step where the cache allows it.
Every step's token is forced, so that all see the same text and logits can be compared.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, StaticCache

from eval.bench.models import workload
from eval.core.hardware import Device
from eval.core.table import Cell, Column, Row, WrongAnswer, fixed, required, scientific
from hf_paged_cache.host.compat import cache_argument

EAGER = ("dynamic", "paged")  # timed in turns; the others, whose first steps are slow, one by one
COMPILED = ("paged_compiled", "static")
MIN_SPEEDUPS = {(8, 32768): 2.0, (1, 512): 1.0}  # of paged over dynamic on a GPU, by batch and tokens
MAX_LOGITS_ERROR = 0.1  # RMS ratio of bfloat16 logits between two caches
BLOCK_SIZE = 64

COLUMNS = (
    Column("case", "batch x tokens"),
    Column("cache", "cache"),
    Column("step_ms", "ms/step", fixed(2)),
    Column("tokens_per_s", "tokens/s", fixed(1)),
    Column("peak_gib", "peak GiB", fixed(1)),
    Column("over_dynamic", "x dynamic", fixed(2)),
    Column("error", "error", scientific),
)
NOTES = (
    "x: median over rounds of the quotient within a round. error: RMS ratio of the logits of the first and "
    "of the last step against DynamicCache, the larger one.",
)

# What differs from the default of `LlamaConfig`, whose layers and heads are those of 8 billion weights.
SIZES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {"intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256},
    "toy": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
    },
}


@dataclass(frozen=True)
class Case:
    """One context to continue."""

    batch: int  # rows
    tokens: int  # of context in each
    steps: int = 32  # that are timed
    rounds: int = 2  # how often contenders that are timed in turns have theirs
    warm_up: int = 6  # steps before, for compiling and what CUDA graphs want run before they record
    seed: int = 0  # of the tokens that are forced

    @property
    def new_tokens(self) -> int:
        """Tokens that `generate` is asked for."""
        return self.warm_up + self.steps + 1

    def __str__(self) -> str:
        return f"{self.batch}x{self.tokens}"


@dataclass(frozen=True)
class _Run:
    step_s: list[float]
    logits: list[torch.Tensor]
    peak_bytes: int | None
    is_compiled: bool
    backend: str | None


def random_llama(size: str, device: Device) -> Any:
    """A Llama in bfloat16 with random weights, made on the device."""
    config = LlamaConfig(
        **SIZES[size],
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=1,
        pad_token_id=0,
    )
    config.dtype = torch.bfloat16
    with torch.device(device.torch_device):
        model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def new_cache(name: str, model: Any, rows: int, tokens: int) -> Any:
    """An empty cache of that name for `rows` rows of up to `tokens` tokens; the model's attention fits it."""
    from hf_paged_cache import PagedCache

    if name.startswith("paged"):
        blocks = rows * -(-tokens // BLOCK_SIZE)
        compiled: dict[str, Any] = {"compile": True} if name == "paged_compiled" else {}
        return PagedCache(model, block_size=BLOCK_SIZE, max_tokens=blocks * BLOCK_SIZE, **compiled)
    dynamic = workload.new_cache("dynamic", model)
    return dynamic if name == "dynamic" else StaticCache(config=model.config, max_cache_len=tokens)


def measure(names: Sequence[str], model: Any, case: Case, device: Device) -> list[Row]:
    """Time the caches of these names in turns, and check the logits of paged ones."""
    runs: dict[str, list[_Run]] = {name: [] for name in names}
    for _ in range(1 if set(names) & set(COMPILED) else case.rounds):
        for name in names:
            runs[name].append(_generate(name, model, case, device))
    if "paged_compiled" in runs and not runs["paged_compiled"][0].is_compiled:
        raise WrongAnswer("generate did not compile the decode step of a PagedCache")
    dynamic = runs.get("dynamic", [])
    if not dynamic and "paged_compiled" in runs:
        dynamic = [_generate("dynamic", model, case, device)]
    return [_row(name, of_cache, dynamic, case, device) for name, of_cache in runs.items()]


def _row(name: str, of_cache: list[_Run], dynamic: list[_Run], case: Case, device: Device) -> Row:
    medians = [statistics.median(run.step_s) for run in of_cache]
    first, step_s = of_cache[0], statistics.median(medians)
    cells: dict[str, Cell] = {
        "case": str(case),
        "cache": name,
        "step_ms": 1e3 * step_s,
        "tokens_per_s": case.batch / step_s,
        "peak_gib": None if first.peak_bytes is None else first.peak_bytes / 2**30,
        "steps": sum(len(run.step_s) for run in of_cache),
        "is_compiled": first.is_compiled,
        "backend": first.backend,
    }
    if name.startswith("paged"):
        steps = zip(first.logits, dynamic[0].logits, strict=True)
        errors = [workload.check(f"logits with {name}", *step, MAX_LOGITS_ERROR) for step in steps]
        cells["error"] = max(errors)
    if name not in EAGER:
        return Row(cells)
    theirs = [statistics.median(run.step_s) for run in dynamic]
    speedup = statistics.median(a / b for a, b in zip(theirs, medians, strict=True))
    limit = MIN_SPEEDUPS.get((case.batch, case.tokens)) if name == "paged" and device.is_gpu else None
    return Row({**cells, "over_dynamic": speedup}, required("dynamic", speedup, limit))


def _generate(name: str, model: Any, case: Case, device: Device) -> _Run:
    options = device.compile_options() if name in COMPILED else {}
    _forget_compiled(model)
    with device.compiles():
        cache = new_cache(name, model, case.batch, case.tokens + case.new_tokens)
        with torch.no_grad():
            workload.fill_random(cache, model, case.batch, case.tokens - 1)
        device.release()
        device.reset_peak()
        probe = _Probe(device, model.config.vocab_size, case)
        text = torch.full((case.batch, case.tokens), 5, device=device.torch_device)
        model.generate(
            text,
            attention_mask=torch.ones_like(text),
            max_new_tokens=case.new_tokens,
            do_sample=False,
            logits_processor=[probe],
            **{cache_argument(model): cache},
            **options,
        )
    run = _Run(
        step_s=device.seconds_between(probe.marks)[case.warm_up :],
        logits=probe.kept,
        peak_bytes=device.peak_bytes(),
        is_compiled="_compiled_call" in vars(model),
        backend=cache.stats().backend if name.startswith("paged") else None,
    )
    _forget_compiled(model)
    return run


def _forget_compiled(model: Any) -> None:
    """What was compiled for one cache is checked, and found not to fit, at every step of the next."""
    if "_compiled_call" in vars(model):
        torch._dynamo.reset()
        del model._compiled_call


class _Probe:
    """Stands among the logits processors of `generate`: takes the time, keeps logits, decides the tokens."""

    supports_continuous_batching = False

    def __init__(self, device: Device, vocabulary: int, case: Case) -> None:
        self._device = device
        generator = torch.Generator().manual_seed(case.seed)
        self._tokens = torch.randint(3, vocabulary, (case.new_tokens,), generator=generator).tolist()
        self._chosen: torch.Tensor | None = None
        self.marks: list[Any] = []
        self.kept: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores that let only the forced token of this step be chosen."""
        step = len(self.marks)
        self.marks.append(self._device.mark())
        if step in (0, len(self._tokens) - 1):  # the first step is never compiled
            self.kept.append(scores.float().clone())
        if self._chosen is None:
            self._chosen = torch.zeros_like(scores)
        self._chosen.zero_()
        self._chosen[:, self._tokens[step]] = 1.0
        return self._chosen
