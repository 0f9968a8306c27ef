"""Prefill and decode at several contexts, the caches in turn within every round."""

import statistics
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch

from eval.caches import CacheEntry
from eval.core.measure import Measures
from eval.core.models import LoadedModel
from eval.core.statistics import spread
from eval.data import text
from eval.run.generate import contexts, generate_batch
from eval.run.rows import AtContext
from eval.run.settings import Settings

from .base import Answer, Outcome, Sample, Task, Unit

STEPS = 24
ROUNDS = 2
_DEFAULT_CONTEXTS = (256, 1024, 4096)


class Latency(Task):
    """One sequence of real text at a time: its prompt, then 24 tokens."""

    name = "latency"
    title = f"a prompt and {STEPS} tokens, {ROUNDS} rounds at each context"
    is_timed = True

    def units(self, loaded: LoadedModel, settings: Settings) -> list[Unit]:
        """Every context, in every round."""
        lengths = _contexts(loaded, settings)
        ids = text.token_ids(loaded.tokenizer, text.shipped()).to(loaded.device)
        units = []
        for index, (turn, tokens) in enumerate(product(range(ROUNDS), lengths)):
            label = f"{tokens} tokens, round {turn + 1}"
            sample = Sample(label, "", facts={"context_tokens": float(tokens)})
            units.append(Unit(index, f"{label}/{ROUNDS}", (sample,), ids[:tokens][None]))
        return units

    def run(self, loaded: LoadedModel, unit: Unit, entry: CacheEntry, reference: Any) -> Outcome:
        """One prompt and its steps."""
        prompt: torch.Tensor = unit.inputs  # [1, tokens]
        inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
        rows, measures = generate_batch(loaded, inputs, entry, STEPS + 1, is_exact=True)
        sample = unit.samples[0]
        return Outcome((Answer(sample.id, tokens=tuple(rows[0]), values=sample.facts),), measures)

    def details(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        """The rounds of each context taken together."""
        rounds: dict[int, list[Measures]] = {}
        for outcome in outcomes:
            assert outcome.measures is not None, "a finished unit has measures"
            rounds.setdefault(int(outcome.answers[0].values["context_tokens"]), []).append(outcome.measures)
        return {"contexts": tuple(_at(tokens, measures) for tokens, measures in sorted(rounds.items()))}


def _contexts(loaded: LoadedModel, settings: Settings) -> Sequence[int]:
    what = "the prompts and answers of the task 'latency'"
    return contexts(loaded, settings.contexts, _DEFAULT_CONTEXTS, STEPS + 1, what)


def _at(tokens: int, measures: Sequence[Measures]) -> AtContext:
    steps = spread([ms for each in measures for ms in each.step_ms])
    return AtContext(
        context_tokens=tokens,
        prefill_ms=spread([ms for each in measures for ms in each.prefill_ms]),
        decode_ms=steps,
        tokens_per_s=1000 * measures[0].rows / steps.median,
        kv_bytes=max(each.kv.used_bytes for each in measures),
        kv_allocated_bytes=max(each.kv.allocated_bytes for each in measures),
        rise_bytes=round(statistics.median(each.rise_bytes for each in measures)),
    )
