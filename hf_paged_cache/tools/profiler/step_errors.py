"""Errors of a format against full precision, by step, layer and head, and the sums that they come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch

_TINY = 1e-30


@dataclass(frozen=True, slots=True)
class Errors:
    """How far something is from what it is in full precision.

    Attributes:
        rms_ratio: RMS of the difference over RMS of what it should be, over all heads; 0 is exact. Unlike the
            cosine it sees a wrong scale.
        cosine: Cosine with what it should be, mean over rows, tokens and heads; 1 is the same direction.
        rms_ratio_by_head: `[heads]`, the same for each head.
        cosine_by_head: `[heads]`.
    """

    rms_ratio: float
    cosine: float
    rms_ratio_by_head: tuple[float, ...]
    cosine_by_head: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LayerErrors:
    """The errors of one layer, each measured twice.

    The plain fields compare two runs of the model, so they hold what earlier layers and steps have brought,
    too: later layers look worse. For the `own_` fields the layer stores the K and V of the full-precision
    run, whose queries attend to them, so they hold what this layer's format does and nothing else.

    Attributes:
        layer: Its index.
        keys: Stored K, over the kv heads; all tokens that the layer keeps.
        values: Stored V, the same.
        attention: Its output before the projection, over query heads and steps since the last measured one.
        own_keys: Error of K from storing it.
        own_values: Error of V from storing it.
        own_attention: Error of the attention output from storing this layer's K and V.
    """

    layer: int
    keys: Errors
    values: Errors
    attention: Errors
    own_keys: Errors
    own_values: Errors
    own_attention: Errors


@dataclass(frozen=True, slots=True)
class StepErrors:
    """What was measured after so many decode steps.

    Attributes:
        step: Decode steps since the prompt.
        kl: KL(full precision || format) of the next token at this step in nats, mean over rows.
        top1: Share of rows whose likeliest next token is the same at this step.
        layers: Its layers that keep K and V, in order.
    """

    step: int
    kl: float
    top1: float
    layers: tuple[LayerErrors, ...]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """What `dataclasses.asdict` made a dict of, and JSON lists of tuples."""
        layers = []
        for layer in data["layers"]:
            measured = {name: value for name, value in layer.items() if name != "layer"}
            for name, errors in measured.items():
                by_head = {side: tuple(errors[side]) for side in ("rms_ratio_by_head", "cosine_by_head")}
                measured[name] = Errors(**errors | by_head)
            layers.append(LayerErrors(layer["layer"], **measured))
        return cls(**data | {"layers": tuple(layers)})


class HeadSums:
    """Sums over vectors, from which errors follow; in float64 on the CPU, so for any number of steps."""

    def __init__(self) -> None:
        self._sums = torch.zeros(3, 1, dtype=torch.float64)  # squared errors, squared norms, cosines; by head
        self._count = 0

    def add(self, got: torch.Tensor, want: torch.Tensor) -> None:
        """Take in vectors `[batch, heads, tokens, dim]`, and what they are in full precision."""
        got, want = got.float(), want.float()
        squares = want.square().sum(-1)
        lengths = (squares * got.square().sum(-1)).sqrt()
        # Two zero vectors agree, and a zero vector agrees with no other.
        both_zero = (lengths == 0) & (got == want).all(-1)
        cosines = (got * want).sum(-1) / lengths.clamp(min=_TINY) + both_zero
        terms = ((got - want).square().sum(-1), squares, cosines)
        self._sums = self._sums + torch.stack([x.sum((0, 2)) for x in terms]).to("cpu", torch.float64)
        self._count += got.shape[0] * got.shape[2]

    def errors(self) -> Errors:
        """The errors over everything that was taken in."""
        error, norm, cosine = self._sums
        cosine = cosine / max(self._count, 1)
        ratio = (error.sum() / norm.sum().clamp(min=_TINY)).sqrt()
        by_head = (error / norm.clamp(min=_TINY)).sqrt()
        return Errors(float(ratio), float(cosine.mean()), tuple(by_head.tolist()), tuple(cosine.tolist()))


def errors_of(got: torch.Tensor, want: torch.Tensor) -> Errors:
    """The errors of one tensor `[batch, heads, tokens, dim]`."""
    sums = HeadSums()
    sums.add(got, want)
    return sums.errors()


def kl_divergence(logits: torch.Tensor, full_logits: torch.Tensor) -> torch.Tensor:
    """KL(full precision || format) of each next token in nats, from logits `[..., vocabulary]`."""
    got, want = (x.to("cpu", torch.float64).log_softmax(-1) for x in (logits, full_logits))
    # A token that full precision rules out entirely adds nothing.
    terms = torch.where(want.isneginf(), 0.0, want.exp() * (want - got))
    return terms.sum(-1).clamp(min=0.0)


def top1_agreement(logits: torch.Tensor, full_logits: torch.Tensor) -> torch.Tensor:
    """Whether the likeliest next token is the same, `[...]`."""
    return logits.argmax(-1) == full_logits.argmax(-1)
