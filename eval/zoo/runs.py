"""One `generate` call with the logits of every step, and whether two of them gave the same."""

import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import LlamaModel

from eval.zoo.inputs import Prompt

TOLERANCE = 1e-3
"""Largest difference of logits in float32, as a share of their standard deviation (or 1, if more). Most are
below 1e-5; states that are scanned in chunks in one run and step by step in the other come to 3e-4."""


@dataclass(frozen=True)
class Run:
    """What came out."""

    sequences: torch.Tensor  # ids `[rows, tokens]`, the prompt included
    start: int  # tokens of the prompt
    # for every step the ids so far, `[rows x beams, tokens]`, and its logits, `[rows x beams, ids]`
    steps: list[tuple[torch.Tensor, torch.Tensor]]


def generate(model: Any, prompt: Prompt, new_tokens: int, *, cache: Any = None, beams: int = 1) -> Run:
    """Generate greedily, or with beams; None stands for the cache that transformers takes."""
    steps: list[tuple[torch.Tensor, torch.Tensor]] = []

    def record(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        steps.append((input_ids.clone(), scores.float().clone()))
        return scores

    options: dict[str, Any] = {} if cache is None else {cache_argument(model): cache}
    options |= {"max_new_tokens": new_tokens, "do_sample": False, "num_beams": beams}
    with torch.no_grad():
        sequences = model.generate(**prompt.arguments, **options, logits_processor=[record])
    return Run(sequences, steps[0][0].shape[1], steps)


def cache_argument(model: Any) -> str:
    """The name under which a model takes a cache."""
    names = inspect.signature(model.forward).parameters
    current = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"
    return "cache_params" if current not in names and "cache_params" in names else current


class Difference(NamedTuple):
    """How two runs differ."""

    logits: float  # in standard deviations; infinity where one is finite and the other is not
    compared: int  # rows of steps with the same ids up to there: behind another token nothing can be

    @property
    def is_none(self) -> bool:
        """Whether logits agree where they can be compared: tokens that part then lie within the tolerance."""
        return self.compared > 0 and self.logits <= TOLERANCE


def difference(reference: Run, other: Run, beams: int = 1) -> Difference:
    """How `other` differs; beams are matched by what they generated, as equal scores may swap them."""
    distances = []
    first = reference.steps[0][1]
    spread = max(1.0, float(first[torch.isfinite(first)].std()))
    for (ids, logits), (other_ids, other_logits) in zip(reference.steps, other.steps, strict=False):
        places = {_key(row, ids, reference.start, beams): row for row in range(len(ids))}
        for row in range(len(other_ids)):
            place = places.get(_key(row, other_ids, other.start, beams))
            if place is not None:
                distances.append(_distance(logits[place], other_logits[row]) / spread)
    return Difference(max(distances, default=0.0), len(distances))


def _key(row: int, ids: torch.Tensor, start: int, beams: int) -> tuple[int, ...]:
    return (row // beams, *ids[row, start:].tolist())


def _distance(logits: torch.Tensor, others: torch.Tensor) -> float:
    finite = torch.isfinite(logits)
    if not torch.equal(finite, torch.isfinite(others)) or not finite.any():
        return float("inf")
    return float((logits[finite] - others[finite]).abs().max())
