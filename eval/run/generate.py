"""Forwards and `generate` with a fresh cache, timed and with their memory watched."""

import contextlib
import inspect
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from eval.caches import CacheEntry, Demand
from eval.core.errors import UsageError
from eval.core.measure import Measures, StepTimer, peak_memory
from eval.core.models import LoadedModel
from hf_paged_cache.host.compat import cache_argument

_WARM_UP_TOKENS = 16


def generate_batch(
    loaded: LoadedModel, inputs: dict[str, torch.Tensor], entry: CacheEntry, new_tokens: int, **options: bool
) -> tuple[list[list[int]], Measures]:
    """Generate with a fresh cache; what `generate` gives, and the cost. Raises `CacheUnavailable`."""
    rows, tokens = inputs["input_ids"].shape
    with measured(loaded, entry, Demand(rows, tokens + new_tokens)) as run:
        answers = generate(loaded, inputs, run.cache, new_tokens, **options)
    return answers, run.measures()


class Measured:
    """A fresh cache of a contender, and what its use has cost so far."""

    def __init__(self, loaded: LoadedModel, entry: CacheEntry, demand: Demand) -> None:
        self._entry, self._rows = entry, demand.rows
        self.memory, self.timer = peak_memory(loaded.device), StepTimer(loaded.model, loaded.device)
        self.cache: Any = None

    def measures(self, *, is_timed: bool = True) -> Measures:
        """The cost; where something else is done between forwards, only the first is timed."""
        steps = tuple(self.timer.step_ms) if is_timed else ()
        kv, memory = self._entry.kv_bytes(self.cache), self.memory
        return Measures(self._rows, (self.timer.prefill_ms,), steps, kv, memory.peak_bytes, memory.rise_bytes)


@contextlib.contextmanager
def measured(loaded: LoadedModel, entry: CacheEntry, demand: Demand) -> Iterator[Measured]:
    """Watch time and memory from the making of a cache on, which raises `CacheUnavailable` if it must."""
    run = Measured(loaded, entry, demand)
    with run.memory, run.timer:
        run.cache = entry.create(loaded.model, demand)
        yield run


def generate(
    loaded: LoadedModel, inputs: dict[str, Any], cache: Any, new_tokens: int, *, is_exact: bool = False
) -> list[list[int]]:
    """Generate greedily; the ids of each row, up to and including the end-of-sequence token.

    `inputs` are `input_ids` and `attention_mask`, both `[batch, tokens]`, padded on the left; the cache may
    hold the beginning. At most `new_tokens` are generated for a row; with `is_exact` so many, always.
    """
    output = loaded.model.generate(
        **inputs,
        **{cache_argument(loaded.model): cache},
        **{"do_sample": False, "temperature": None, "top_p": None, "top_k": None},
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens if is_exact else None,
        pad_token_id=loaded.tokenizer.pad_token_id,
    )
    ends = loaded.model.generation_config.eos_token_id
    stops = {*(ends if isinstance(ends, list) else [ends]), loaded.tokenizer.eos_token_id}
    return [_until_stop(row, stops) for row in output[:, inputs["input_ids"].shape[1] :].tolist()]


def _until_stop(row: list[int], stops: Collection[int | None]) -> list[int]:
    return row[: next((index + 1 for index, token in enumerate(row) if token in stops), None)]


def forward(model: Any, ids: torch.Tensor, cache: Any, **options: Any) -> torch.Tensor:
    """Logits `[batch, tokens, vocabulary]` of a forward that goes on from what the cache holds."""
    argument = {cache_argument(model): cache}
    logits: torch.Tensor = model(ids, use_cache=True, **argument, **options).logits
    return logits


def prefill(loaded: LoadedModel, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Logits `[batch, vocabulary]` behind the last token of a prompt; only those, where the model can."""
    can = "logits_to_keep" in inspect.signature(type(loaded.model).forward).parameters
    return forward(loaded.model, ids, cache, **({"logits_to_keep": 1} if can else {}))[:, -1]


def warm_up(loaded: LoadedModel, entry: CacheEntry) -> None:
    """Generate two tokens after a short prompt; `CacheUnavailable` where the cache cannot run here."""
    ids = torch.ones(1, _WARM_UP_TOKENS, dtype=torch.long, device=loaded.device)
    generate_batch(loaded, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, entry, 2)


def context_tokens(model: Any) -> int | None:
    """The longest sequence that the model was made for, if its config says."""
    limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit


def check_context(model: Any, needed_tokens: int, what: str, way_out: str) -> None:
    """Raise a `UsageError` that says what needs so much, and the way out, where the context is too short."""
    limit = context_tokens(model)
    if limit is not None and needed_tokens > limit:
        wanting = f"{what} need {needed_tokens} tokens; the model's context is {limit}"
        raise UsageError(f"{wanting}: choose a model with a longer context, or {way_out}")


def contexts(
    loaded: LoadedModel, asked: Sequence[int] | None, defaults: Sequence[int], room: int, what: str
) -> Sequence[int]:
    """Lengths asked for, which must fit, else the defaults that do, with `room` tokens more."""
    if asked is not None:
        check_context(loaded.model, max(asked) + room, what, "smaller --contexts")
        return asked
    limit = context_tokens(loaded.model) or max(defaults) + room
    return [tokens for tokens in defaults if tokens + room <= limit] or [max(1, limit - room)]
