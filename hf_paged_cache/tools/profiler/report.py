"""What a profile says: plain data, and the ways to look at it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hf_paged_cache.errors import PagedCacheError

from .suggest import Suggestion, suggest
from .table import as_text


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


@dataclass(frozen=True)
class CacheProfile:
    """The error of a cache format in one model, on given tokens.

    Plain data but for what `suggest_layer_dtypes` needs: a profile that `profile_cache` returned keeps the
    model alive; one that was read from JSON does not, and compares equal.

    Attributes:
        model_type: The model's kind, as its config calls it.
        kv_cache_dtype: The format that was asked for.
        asked_layer_dtypes: Layer index -> the format that was asked for, where that is another.
        layer_dtypes: Layer index -> the format that it was really stored in at the end.
        batch: Rows.
        prompt_tokens: Tokens per row that were fed at once, before the steps.
        kl_by_step: `[decode steps]` KL(full precision || format) in nats, mean over rows.
        top1_by_step: `[decode steps]` share of rows whose likeliest next token is the same.
        steps: The measured steps in order.
        bytes_per_token_by_layer: Layer index -> bytes of K and V of one token in all heads, codes and scales
            included. First and newest blocks, that a format keeps in the model's dtype, are not counted.
        full_bytes_per_token: The same over all layers in the model's dtype.
    """

    model_type: str
    kv_cache_dtype: str
    asked_layer_dtypes: dict[int, str]
    layer_dtypes: dict[int, str]
    batch: int
    prompt_tokens: int
    kl_by_step: tuple[float, ...]
    top1_by_step: tuple[float, ...]
    steps: tuple[StepErrors, ...]
    bytes_per_token_by_layer: dict[int, float]
    full_bytes_per_token: float
    rerun: Callable[[Mapping[int, str], bool], CacheProfile] | None = field(
        default=None, repr=False, compare=False
    )

    @property
    def kl(self) -> float:
        """KL(full precision || format) in nats, mean over rows and all decode steps."""
        return sum(self.kl_by_step) / len(self.kl_by_step)

    @property
    def top1(self) -> float:
        """Share of next tokens that are likeliest in both, over rows and all decode steps."""
        return sum(self.top1_by_step) / len(self.top1_by_step)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of K and V of one token in all layers, as `bytes_per_token_by_layer` counts them."""
        return sum(self.bytes_per_token_by_layer.values())

    def worst_layers(self, n: int | None = None) -> list[int]:
        """Layer indices, the worst first.

        By the RMS ratio of the attention output that is the layer's own doing, RMS over the measured steps:
        by the other one, layers after a bad layer would be named for it.

        Args:
            n: How many; all by default.
        """
        totals = dict.fromkeys(self.layer_dtypes, 0.0)
        for errors in (layer for step in self.steps for layer in step.layers):
            totals[errors.layer] += errors.own_attention.rms_ratio**2
        return sorted(totals, key=lambda layer: (-totals[layer], layer))[:n]

    def suggest_layer_dtypes(self, *, target_kl: float) -> Suggestion:
        """Which layers to store better, so that `kl` is at most a target.

        The worst layers move to `int8`, as few as do; if all in `int8` are not enough, the worst of those
        stay in the model's dtype. How many is found by bisection, and every trial is a real run over the
        tokens of this profile (some six for thirty layers), as is what comes back.

        Args:
            target_kl: In nats, mean over rows and decode steps.

        Returns:
            The formats, the KL that was measured with them, and what they cost.

        Raises:
            PagedCacheError: The target is no positive number; this profile was read from JSON; or the target
                is missed even with every layer in the model's dtype.
        """
        return suggest(self, target_kl)

    def table(self, step: int | None = None) -> str:
        """A text table: KL and top-1 of the measured steps, and the errors of every layer after one of them.

        Args:
            step: One of the measured steps; the last by default.

        Raises:
            PagedCacheError: That step was not measured.
        """
        return as_text(self, self.at(step))

    def at(self, step: int | None = None) -> StepErrors:
        """What was measured after so many decode steps; after the last measured one by default.

        Raises:
            PagedCacheError: That step was not measured.
        """
        found = self.steps[-1] if step is None else next((x for x in self.steps if x.step == step), None)
        if found is None:
            raise PagedCacheError(
                f"step must be one of the measured ones, {[x.step for x in self.steps]}, got {step!r}"
            )
        return found

    def plot(self, path: str | Path, *, step: int | None = None) -> Path:
        """Draw the attention error of layers and heads after a step, and KL over the steps.

        Args:
            path: Of the picture; its ending chooses the kind (`.png`, `.svg`, `.pdf`).
            step: One of the measured steps; the last by default.

        Returns:
            The path.

        Raises:
            PagedCacheError: That step was not measured, or matplotlib is not installed.
        """
        from .plot import draw

        return draw(self, self.at(step), Path(path))

    def to_json(self) -> str:
        """All data as JSON."""
        return json.dumps(self._data(), indent=1)

    def save_json(self, path: str | Path) -> Path:
        """Write `to_json()` to a file."""
        path = Path(path)
        path.write_text(self.to_json() + "\n", encoding="utf-8")
        return path

    @classmethod
    def from_json(cls, text: str) -> CacheProfile:
        """A profile from what `to_json` wrote. It cannot run the model again.

        Raises:
            PagedCacheError: The text is something else.
        """
        try:
            data = json.loads(text)
            data["steps"] = tuple(_step_from(step) for step in data["steps"])
            for name in ("kl_by_step", "top1_by_step"):
                data[name] = tuple(data[name])
            for name in ("asked_layer_dtypes", "layer_dtypes", "bytes_per_token_by_layer"):
                data[name] = {int(layer): value for layer, value in data[name].items()}
            return cls(**data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PagedCacheError(f"this is not the JSON of a CacheProfile: {error!r}") from error

    def _data(self) -> dict[str, Any]:
        data = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "rerun"}
        return data | {"steps": [asdict(step) for step in self.steps]}


def _step_from(data: dict[str, Any]) -> StepErrors:
    return StepErrors(**data | {"layers": tuple(map(_layer_from, data["layers"]))})


def _layer_from(data: dict[str, Any]) -> LayerErrors:
    measured = {name: _errors_from(value) for name, value in data.items() if name != "layer"}
    return LayerErrors(layer=data["layer"], **measured)


def _errors_from(data: dict[str, Any]) -> Errors:
    by_head = {name: tuple(data[name]) for name in ("rms_ratio_by_head", "cosine_by_head")}
    return Errors(**data | by_head)
