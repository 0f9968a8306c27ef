"""Nearness of the next tokens to those of the default cache, one decode step after another.

The default cache goes on from a text; then every cache is fed that and the default's own tokens. So all are
asked the same, and the first step at which a cache would have chosen another token is where they would part.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from eval.caches import CACHES, CacheEntry, Demand
from eval.core.errors import UsageError
from eval.core.models import LoadedModel
from eval.core.statistics import kl_divergence
from eval.data import text
from eval.data.source import Source, read
from eval.run.generate import check_context, forward, measured, prefill
from eval.run.rows import DEFAULT_CACHE
from eval.run.settings import Settings

from .base import Answer, MetricSpec, Outcome, Sample, Task, Unit, mean_of

PROMPT_TOKENS = 1024
STEPS = 64
SAMPLES_PER_TEXT = 8  # what a text counts for: it takes as long as so many short answers
_CATALOGUE = Source(str(text.CATALOGUE), {"input": "text"})


class Fidelity(Task):
    """Texts of 1024 tokens, and the next 64 steps."""

    name = "fidelity"
    title = f"the next {STEPS} tokens after texts of {PROMPT_TOKENS}, beside those of the default cache"
    metrics = (
        MetricSpec("kl", "KL", "nats", mean_of("kl"), higher_is_better=False, resolution=1e-6),
        MetricSpec("top1", "top-1 agreement", "%", mean_of("top1", 100.0)),
        MetricSpec("divergence", "tokens before the first difference", "tokens", mean_of("divergence")),
    )

    def units(self, loaded: LoadedModel, settings: Settings) -> list[Unit]:
        """Batches of texts that do not overlap."""
        needed = PROMPT_TOKENS + STEPS
        check_context(loaded.model, needed, "the texts of the task 'fidelity'", "leave the task away")
        texts = [row["input"] for row in read(_CATALOGUE, ("input",), None, 0)]
        ids = text.token_ids(loaded.tokenizer, "\n\n".join(texts)).to(loaded.device)
        count = min(-(-settings.limit // SAMPLES_PER_TEXT), len(ids) // PROMPT_TOKENS)
        if count == 0:
            raise UsageError(f"the texts of the task 'fidelity' are shorter than {PROMPT_TOKENS} tokens")
        parts = torch.split(ids[: count * PROMPT_TOKENS].view(count, PROMPT_TOKENS), settings.batch_size)
        samples = iter([Sample(f"text {number}", "") for number in range(count)])
        return [
            Unit(index, f"batch {index + 1}/{len(parts)}", tuple(islice(samples, len(part))), part)
            for index, part in enumerate(parts)
        ]

    def reference(self, loaded: LoadedModel, unit: Unit) -> torch.Tensor:
        """The default cache's logits `[rows, steps, vocabulary]`, the likeliest being its tokens."""
        prompts: torch.Tensor = unit.inputs
        with torch.inference_mode():
            cache = CACHES[DEFAULT_CACHE].create(loaded.model, _demand(prompts))
            return torch.stack(list(_steps(loaded, prompts, cache, None)), dim=1)

    def run(self, loaded: LoadedModel, unit: Unit, entry: CacheEntry, reference: torch.Tensor) -> Outcome:
        """Feed one batch and the default's tokens."""
        prompts: torch.Tensor = unit.inputs
        tokens, kl, chosen = reference.argmax(-1), [], []
        with torch.inference_mode(), measured(loaded, entry, _demand(prompts)) as made:
            for step, logits in enumerate(_steps(loaded, prompts, made.cache, tokens)):
                kl.append(kl_divergence(logits, reference[:, step]))
                chosen.append(logits.argmax(-1))
        answers = _answers(unit, tokens, torch.stack(chosen, 1), torch.stack(kl, 1))
        # A step is not timed: comparing distributions lies between two forwards.
        return Outcome(answers, made.measures(is_timed=False))


def _demand(prompts: torch.Tensor) -> Demand:
    return Demand(prompts.shape[0], prompts.shape[1] + STEPS)


def _steps(
    loaded: LoadedModel, prompts: torch.Tensor, cache: Any, tokens: torch.Tensor | None
) -> Iterator[torch.Tensor]:
    """Logits `[rows, vocabulary]` of every step, in float32; without tokens the likeliest are fed."""
    logits = prefill(loaded, prompts, cache).float()
    yield logits
    for step in range(STEPS - 1):
        token = logits.argmax(-1) if tokens is None else tokens[:, step]
        logits = forward(loaded.model, token[:, None], cache)[:, -1].float()
        yield logits


def _answers(
    unit: Unit, expected: torch.Tensor, chosen: torch.Tensor, kl: torch.Tensor
) -> tuple[Answer, ...]:
    same = chosen == expected
    before = same.long().cumprod(1).sum(1)
    numbers = {"kl": kl.mean(1), "top1": same.float().mean(1), "divergence": before}
    values = [{name: float(of_rows[row]) for name, of_rows in numbers.items()} for row in range(len(same))]
    answers = zip(unit.samples, chosen.tolist(), values, strict=True)
    return tuple(Answer(sample.id, tokens=tuple(ids), values=found) for sample, ids, found in answers)
