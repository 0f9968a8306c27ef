"""Values of a profile, the ways to look at them, and which layers to store better."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from hf_paged_cache.errors import PagedCacheError
from hf_paged_cache.tools.columns import aligned

from .profile_figure import profile_figure
from .step_errors import LayerErrors, StepErrors

_FULL = "auto"
_HEADER = ("layer", "format", "K own", "K", "V own", "V", "attn own", "attn", "attn cos", "worst head")


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Formats of layers that bring KL under a target.

    ```python
    PagedCache(model, kv_cache_dtype="int4", layer_dtypes=suggestion.layer_dtypes)
    ```

    Attributes:
        layer_dtypes: Layer index -> format, where not `kv_cache_dtype`; those of the profile included.
        kl: KL(full precision || format) measured with them, in nats, mean over rows and decode steps.
        kl_before: Of the profile.
        target_kl: What was asked for; `kl` is at most that.
        bytes_per_token: Bytes of K and V of one token in all layers, as `CacheProfile` counts them.
        bytes_per_token_before: Of the profile.
        runs: How often the tokens were run to find this.
    """

    layer_dtypes: dict[int, str]
    kl: float
    kl_before: float
    target_kl: float
    bytes_per_token: float
    bytes_per_token_before: float
    runs: int

    @property
    def extra_bytes_percent(self) -> float:
        """What it costs: bytes per token more than before, in percent of those."""
        return 100 * (self.bytes_per_token / self.bytes_per_token_before - 1)

    def __str__(self) -> str:
        return (
            f"layer_dtypes={self.layer_dtypes}: KL {self.kl_before:.2e} -> {self.kl:.2e} nats (target "
            f"{self.target_kl:.2e}) for {self.bytes_per_token:,.0f} bytes per token, "
            f"{self.extra_bytes_percent:+.1f} %"
        )


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
        """The `n` worst layers (all by default), the worst first.

        By the RMS ratio of the attention output that is the layer's own doing, RMS over the measured steps:
        by the other one, layers after a bad layer would be named for it.
        """
        totals = dict.fromkeys(self.layer_dtypes, 0.0)
        for errors in (layer for step in self.steps for layer in step.layers):
            totals[errors.layer] += errors.own_attention.rms_ratio**2
        return sorted(totals, key=lambda layer: (-totals[layer], layer))[:n]

    def suggest_layer_dtypes(self, *, target_kl: float) -> Suggestion:
        """Which layers to store better, so that `kl` is at most a target in nats, and what that costs.

        The worst layers move to `int8`, as few as do; if all in `int8` are not enough, the worst of those
        stay in the model's dtype. How many is found by bisection, and every trial is a real run over the
        tokens of this profile (some six for thirty layers), as is what comes back.

        Raises:
            PagedCacheError: The target is no positive number; this profile was read from JSON; or the target
                is missed even with every layer in the model's dtype.
        """
        is_number = isinstance(target_kl, int | float) and not isinstance(target_kl, bool)
        if not is_number or not 0 < target_kl < math.inf:
            raise PagedCacheError(
                f"target_kl must be a positive number of nats, got {target_kl!r}; e.g. 1e-3, the KL of this "
                f"profile is {self.kl:.2e}"
            )
        if self.rerun is None:
            raise PagedCacheError(
                "a profile that was read from JSON cannot run the model again; call "
                "`profile_cache(...).suggest_layer_dtypes(...)`"
            )
        chosen, found, runs = dict(self.asked_layer_dtypes), self, 0
        for layer_dtype in ("int8", _FULL):
            ranked = [x for x in found.worst_layers() if found.layer_dtypes[x] not in (layer_dtype, _FULL)]
            if found.kl <= target_kl or not ranked:
                continue
            before, too_few, enough = chosen, 0, len(ranked)
            chosen = before | dict.fromkeys(ranked, layer_dtype)
            # In the model's dtype there is nothing left to rank.
            found = self.rerun(chosen, layer_dtype != _FULL)
            runs += 1
            # Fewer than what this ends with might do where KL does not fall with every layer.
            while found.kl <= target_kl and enough - too_few > 1:
                middle = (too_few + enough) // 2
                tried = before | dict.fromkeys(ranked[:middle], layer_dtype)
                outcome = self.rerun(tried, False)
                runs += 1
                if outcome.kl <= target_kl:
                    chosen, found, enough = tried, outcome, middle
                else:
                    too_few = middle
        if found.kl > target_kl:
            raise PagedCacheError(
                f"target_kl={target_kl:.2e} is out of reach: KL is {found.kl:.2e} nats even with every layer "
                "in the model's dtype, where only the model's own rounding differs; choose a larger target"
            )
        sizes = found.bytes_per_token, self.bytes_per_token
        return Suggestion(dict(sorted(chosen.items())), found.kl, self.kl, float(target_kl), *sizes, runs)

    def table(self, step: int | None = None) -> str:
        """A text table: KL and top-1 of all measured steps, and the errors of all layers `at` one of them."""
        at = self.at(step)
        share = self.bytes_per_token / self.full_bytes_per_token
        steps = [(str(step.step), _small(step.kl), f"{step.top1:.1%}") for step in self.steps]
        layers = [_table_line(layer, self.layer_dtypes[layer.layer]) for layer in at.layers]
        lines = [
            f"{self.kv_cache_dtype} cache of {self.model_type}: {self.batch} rows, prompt of "
            f"{self.prompt_tokens} tokens, {len(self.kl_by_step)} decode steps",
            f"KL {self.kl:.2e} nats, top-1 {self.top1:.1%} (mean over steps); "
            f"{self.bytes_per_token:,.0f} bytes per token, {share:.2f} of full precision",
            "",
            *aligned([("step", "KL", "top-1"), *steps]),
            "",
            f"RMS ratio after {at.step} steps; own: what the layer itself adds, of K and V that were exact",
            *aligned([_HEADER, *layers]),
            "",
            f"worst layers: {', '.join(map(str, self.worst_layers(5)))}",
        ]
        return "\n".join(lines)

    def at(self, step: int | None = None) -> StepErrors:
        """What was measured after so many decode steps; after the last measured one by default.

        Raises:
            PagedCacheError: That step was not measured.
        """
        found = self.steps[-1] if step is None else next((x for x in self.steps if x.step == step), None)
        if found is None:
            measured = [each.step for each in self.steps]
            raise PagedCacheError(f"step must be one of the measured ones, {measured}, got {step!r}")
        return found

    def plot(self, path: str | Path, *, step: int | None = None) -> Path:
        """Draw the attention error of layers and heads `at` a step, and KL over all steps.

        The ending of the path chooses the kind of picture (`.png`, `.svg`, `.pdf`).

        Raises:
            PagedCacheError: That step was not measured, or matplotlib is not installed.
        """
        at = self.at(step)
        title = (
            f"{self.kv_cache_dtype} cache of {self.model_type}: attention output after {at.step} decode "
            "steps, against full precision"
        )
        profile_figure(title, at, self.kl_by_step).savefig(path)
        return Path(path)

    def to_json(self) -> str:
        """All data as JSON."""
        data = asdict(replace(self, rerun=None))
        del data["rerun"]
        return json.dumps(data, indent=1)

    def save_json(self, path: str | Path) -> Path:
        """Write `to_json()` to a file."""
        path = Path(path)
        path.write_text(self.to_json() + "\n", encoding="utf-8")
        return path

    @classmethod
    def from_json(cls, text: str) -> CacheProfile:
        """A profile from what `to_json` wrote, else PagedCacheError. It cannot run the model again."""
        try:
            data = json.loads(text)
            data["steps"] = tuple(map(StepErrors.from_dict, data["steps"]))
            for name in ("kl_by_step", "top1_by_step"):
                data[name] = tuple(data[name])
            for name in ("asked_layer_dtypes", "layer_dtypes", "bytes_per_token_by_layer"):
                data[name] = {int(layer): value for layer, value in data[name].items()}
            return cls(**data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PagedCacheError(f"this is not the JSON of a CacheProfile: {error!r}") from error


def _table_line(layer: LayerErrors, layer_dtype: str) -> tuple[str, ...]:
    by_head = layer.own_attention.rms_ratio_by_head
    worst = max(range(len(by_head)), key=by_head.__getitem__)
    names = (prefix + side for side in ("keys", "values", "attention") for prefix in ("own_", ""))
    numbers = [_small(getattr(layer, name).rms_ratio) for name in names]
    head = f"{worst} ({_small(by_head[worst])})"
    return (str(layer.layer), layer_dtype, *numbers, f"{layer.attention.cosine:.4f}", head)


def _small(value: float) -> str:
    """Three digits, without an exponent where the eye can do without."""
    return f"{value:.4f}" if value == 0 or value >= 1e-3 else f"{value:.1e}"
