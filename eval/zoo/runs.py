"""One `generate` call, with the logits of every step."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaModel, LogitsProcessor, LogitsProcessorList

from eval.zoo.inputs import Prompt


@dataclass(frozen=True)
class Run:
    """What came out.

    Attributes:
        sequences: ids `[rows, tokens]`, the prompt included.
        start: tokens of the prompt.
        steps: for every step the ids so far, `[rows x beams, tokens]`, and its logits, `[rows x beams, ids]`.
    """

    sequences: torch.Tensor
    start: int
    steps: list[tuple[torch.Tensor, torch.Tensor]]


class _Recorder(LogitsProcessor):
    def __init__(self) -> None:
        self.steps: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.steps.append((input_ids.clone(), scores.float().clone()))
        return scores


def generate(model: Any, prompt: Prompt, new_tokens: int, *, cache: Any = None, beams: int = 1) -> Run:
    """Generate greedily, or with beams; None stands for the cache that transformers takes."""
    recorder = _Recorder()
    options: dict[str, Any] = {} if cache is None else {cache_argument(model): cache}
    with torch.no_grad():
        sequences = model.generate(
            **prompt.arguments,
            **options,
            max_new_tokens=new_tokens,
            do_sample=False,
            num_beams=beams,
            logits_processor=LogitsProcessorList([recorder]),
        )
    return Run(sequences, recorder.steps[0][0].shape[1], recorder.steps)


def cache_argument(model: Any) -> str:
    """The name under which a model takes a cache."""
    names = inspect.signature(model.forward).parameters
    current = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"
    return "cache_params" if current not in names and "cache_params" in names else current
