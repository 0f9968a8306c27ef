"""Generates every batch of a task with every cache, the contenders interleaved, and gathers what happened."""

from __future__ import annotations

import contextlib
import inspect
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from eval.caches import BASELINE, CacheEntry, CacheUnavailable, KvBytes, restore_attention
from eval.errors import UsageError
from eval.measure import StepTimer, peak_memory
from eval.models import LoadedModel
from eval.settings import Settings
from eval.tasks import Sample, Task


@dataclass(frozen=True)
class BatchResult:
    """One batch generated with one cache.

    Attributes:
        tokens: generated ids of each row, up to and including the end-of-sequence token.
        prefill_ms: the first forward.
        step_ms: each decode step; one step gives one token to every row.
        kv: what the cache held at the end.
        peak_bytes: peak memory, all included.
        rise_bytes: peak memory above what was held before the batch.
    """

    tokens: list[list[int]]
    prefill_ms: float
    step_ms: list[float]
    kv: KvBytes
    peak_bytes: int
    rise_bytes: int


@dataclass
class Contender:
    """A cache on its way through one task; `problem` says why it stopped, and then it has no results."""

    entry: CacheEntry
    batches: list[BatchResult] = field(default_factory=list)
    problem: str | None = None
    failed: bool = False

    @property
    def tokens(self) -> list[list[int]]:
        """The generated ids of every sample, in the order of the samples."""
        return [row for batch in self.batches for row in batch.tokens]


@dataclass(frozen=True)
class Row:
    """One line of the table: a task with a cache. Where `problem` is set the measurements are None.

    Attributes:
        task: name of the task.
        cache: name of the cache.
        metric_names: for people, in the order of `metrics`.
        metrics: percentages against the references.
        identical: share of samples whose tokens equal the default cache's; None where that did not run.
        kv_bytes: keys and values held at the end of a batch, the largest batch.
        kv_allocated_bytes: memory set aside for them, the largest batch.
        kv_details: all that the cache reports, the largest batch.
        peak_bytes: peak memory, all included.
        rise_bytes: largest rise of memory during one batch.
        prefill_ms: median over the batches.
        decode_ms_per_token: median over all decode steps; a step gives one token to every sequence.
        samples: how many.
        problem: why there is nothing to show.
        failed: the problem is an error, not something that is missing on this machine.
        batches: raw timings of each batch.
    """

    task: str
    cache: str
    metric_names: str
    metrics: dict[str, float] | None = None
    identical: float | None = None
    kv_bytes: int | None = None
    kv_allocated_bytes: int | None = None
    kv_details: dict[str, Any] | None = None
    peak_bytes: int | None = None
    rise_bytes: int | None = None
    prefill_ms: float | None = None
    decode_ms_per_token: float | None = None
    samples: int = 0
    problem: str | None = None
    failed: bool = False
    batches: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Prediction:
    """What one cache answered to one sample."""

    task: str
    cache: str
    id: str
    prediction: str
    reference: str
    identical: bool | None


@dataclass(frozen=True)
class TaskResult:
    """The rows of one task, and every answer."""

    rows: list[Row]
    predictions: list[Prediction]


Advance = Callable[[str, int], None]
"""Progress callback: (what is running, units done since the last call)."""


def run_task(
    loaded: LoadedModel,
    task: Task,
    samples: Sequence[Sample],
    entries: Sequence[CacheEntry],
    settings: Settings,
    advance: Advance = lambda label, units: None,
) -> TaskResult:
    """Generate `samples` with every cache of `entries`; batch by batch, in alternating order.

    Raises:
        UsageError: when a prompt and its answer do not fit the model's context.
    """
    contenders = [Contender(entry) for entry in entries]
    answer_tokens = settings.max_new_tokens or task.max_new_tokens
    batches = [samples[i : i + settings.batch_size] for i in range(0, len(samples), settings.batch_size)]
    encoded = [_encode(loaded, [sample.prompt for sample in batch]) for batch in batches]
    _check_context(loaded.model, max(batch["input_ids"].shape[1] for batch in encoded) + answer_tokens)
    with _quiet():
        for contender in contenders:
            # Not measured: it pays for compiling a kernel and for the libraries' own first use.
            _attempt(contender, loaded, encoded[0], 2, settings, keep=False)
            advance(f"{task.name} · {contender.entry.name} · warm-up", 0)
        for index, inputs in enumerate(encoded):
            for contender in contenders if index % 2 == 0 else contenders[::-1]:
                advance(f"{task.name} · {contender.entry.name} · batch {index + 1}/{len(encoded)}", 0)
                _attempt(contender, loaded, inputs, answer_tokens, settings)
                advance(f"{task.name} · {contender.entry.name} · batch {index + 1}/{len(encoded)}", 1)
    restore_attention(loaded.model)
    return _summarise(loaded, task, samples, contenders)


def _attempt(
    contender: Contender,
    loaded: LoadedModel,
    inputs: Any,
    new_tokens: int,
    settings: Settings,
    keep: bool = True,
) -> None:
    if contender.problem is not None:
        return
    try:
        result = generate_batch(loaded, inputs, contender.entry, new_tokens, settings)
    except CacheUnavailable as error:
        contender.problem = str(error)
    # One cache's error is its row in the table; the others' results are not thrown away for it.
    except Exception as error:
        contender.problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        contender.failed = True
    else:
        if keep:
            contender.batches.append(result)


def generate_batch(
    loaded: LoadedModel, inputs: Any, entry: CacheEntry, new_tokens: int, settings: Settings
) -> BatchResult:
    """Generate greedily with a fresh cache, timed and with its memory watched.

    Args:
        loaded: the model; its attention is left as the cache wanted it.
        inputs: `input_ids` and `attention_mask`, both [batch, tokens], padded on the left.
        entry: the contender.
        new_tokens: most tokens to generate for a row.
        settings: handed to the cache's factory.

    Raises:
        CacheUnavailable: when the cache cannot run here.
    """
    model, tokenizer = loaded.model, loaded.tokenizer
    memory, timer = peak_memory(loaded.device), StepTimer(model, loaded.device)
    with memory, timer:
        cache = entry.create(model, settings)
        output = model.generate(
            **inputs,
            **{_cache_argument(model): cache},
            max_new_tokens=new_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            pad_token_id=tokenizer.pad_token_id,
        )
    rows = output[:, inputs["input_ids"].shape[1] :].tolist()
    stops = _stop_ids(model, tokenizer)
    tokens = [_until_stop(row, stops) for row in rows]
    kv = entry.kv_bytes(cache)
    return BatchResult(tokens, timer.prefill_ms, timer.step_ms, kv, memory.peak_bytes, memory.rise_bytes)


def _encode(loaded: LoadedModel, prompts: Sequence[str]) -> Any:
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    template = loaded.tokenizer.apply_chat_template
    texts = [template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    # The template has written the special tokens already.
    encoded = loaded.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    return {key: encoded[key].to(loaded.device) for key in ("input_ids", "attention_mask")}


def _check_context(model: Any, needed_tokens: int) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and needed_tokens > limit:
        raise UsageError(
            f"the longest prompt and its answer need {needed_tokens} tokens; the model's context is {limit}: "
            "choose a model with a longer context, or fewer --max-new-tokens"
        )


def _cache_argument(model: Any) -> str:
    # transformers renamed the argument of models and of generate together.
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def _stop_ids(model: Any, tokenizer: Any) -> set[int]:
    stops = model.generation_config.eos_token_id
    ids = stops if isinstance(stops, list) else [stops]
    return {token for token in [*ids, tokenizer.eos_token_id] if token is not None}


def _until_stop(row: list[int], stops: set[int]) -> list[int]:
    end = next((index for index, token in enumerate(row) if token in stops), len(row) - 1)
    return row[: end + 1]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _summarise(
    loaded: LoadedModel, task: Task, samples: Sequence[Sample], contenders: Sequence[Contender]
) -> TaskResult:
    baseline = next((c.tokens for c in contenders if c.entry.name == BASELINE and c.problem is None), None)
    rows: list[Row] = []
    predictions: list[Prediction] = []
    for contender in contenders:
        name = contender.entry.name
        if contender.problem is not None:
            problem, failed = contender.problem, contender.failed
            rows.append(Row(task.name, name, task.metrics, problem=problem, failed=failed))
            continue
        texts = [
            text.strip()
            for text in loaded.tokenizer.batch_decode(
                contender.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        ]
        same = None
        if baseline is not None:
            same = [mine == default for mine, default in zip(contender.tokens, baseline, strict=True)]
        rows.append(_row(task, contender, samples, texts, same))
        flags: list[bool | None] = [*same] if same is not None else [None] * len(samples)
        predictions += [
            Prediction(task.name, name, sample.id, text, sample.reference, flag)
            for sample, text, flag in zip(samples, texts, flags, strict=True)
        ]
    return TaskResult(rows, predictions)


def _row(
    task: Task, contender: Contender, samples: Sequence[Sample], texts: list[str], same: list[bool] | None
) -> Row:
    batches = contender.batches
    largest = max((batch.kv for batch in batches), key=lambda kv: kv.used_bytes)
    steps = [ms for batch in batches for ms in batch.step_ms]
    raw = [_raw(batch) for batch in batches]
    return Row(
        task=task.name,
        cache=contender.entry.name,
        metric_names=task.metrics,
        metrics=task.score(texts, [sample.reference for sample in samples]),
        identical=sum(same) / len(same) if same is not None else None,
        kv_bytes=largest.used_bytes,
        kv_allocated_bytes=max(batch.kv.allocated_bytes for batch in batches),
        kv_details=largest.details,
        peak_bytes=max(batch.peak_bytes for batch in batches),
        rise_bytes=max(batch.rise_bytes for batch in batches),
        prefill_ms=statistics.median(batch.prefill_ms for batch in batches),
        decode_ms_per_token=statistics.median(steps) if steps else None,
        samples=len(samples),
        batches=raw,
    )


def _raw(batch: BatchResult) -> dict[str, Any]:
    raw = {key: value for key, value in asdict(batch).items() if key != "tokens"}
    # Microseconds are below what the clock of a shared machine can tell.
    rounded = {"prefill_ms": round(batch.prefill_ms, 3), "step_ms": [round(ms, 3) for ms in batch.step_ms]}
    return {**raw, **rounded}
