"""Errors of a format against full precision, by step, layer and head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self


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
    too: later layers look worse. The `own_` fields have the layer store the K and V of the full-precision
    run, and let that run's queries attend to them, so they hold what this layer's format does and nothing
    else.

    Attributes:
        layer: Its index.
        keys: Stored K, over the kv heads; all tokens that the layer keeps.
        values: Stored V, the same.
        attention: Output of attention before the output projection, over the query heads; the decode steps
            since the last measured one.
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
            measured = {name: _errors_from(value) for name, value in layer.items() if name != "layer"}
            layers.append(LayerErrors(layer["layer"], **measured))
        return cls(**data | {"layers": tuple(layers)})


def _errors_from(data: dict[str, Any]) -> Errors:
    by_head = {name: tuple(data[name]) for name in ("rms_ratio_by_head", "cosine_by_head")}
    return Errors(**data | by_head)
