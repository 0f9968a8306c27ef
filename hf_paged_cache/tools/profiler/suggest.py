"""Which layers to store better: bisection over the worst layers, with real runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_paged_cache.errors import PagedCacheError

if TYPE_CHECKING:
    from .report import CacheProfile

_FULL = "auto"
_BETTER = "int8"


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Formats of layers that bring KL under a target.

    ```python
    PagedCache(model, kv_cache_dtype="int4", layer_dtypes=suggestion.layer_dtypes)
    ```

    Attributes:
        layer_dtypes: Layer index -> format, where it is not `kv_cache_dtype`; those that the profile was made
            with included.
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


class _Search:
    """Runs of one profile with some of its layers raised, every one of them kept."""

    def __init__(self, profile: CacheProfile, target_kl: float) -> None:
        if profile.rerun is None:
            raise PagedCacheError(
                "a profile that was read from JSON cannot run the model again; call "
                "`profile_cache(...).suggest_layer_dtypes(...)`"
            )
        self.profile = profile
        self.target_kl = target_kl
        self.runs = 0
        self._rerun = profile.rerun
        self._results: dict[frozenset[tuple[int, str]], CacheProfile] = {}

    def run(self, layer_dtypes: dict[int, str], *, with_layers: bool = False) -> CacheProfile:
        key = frozenset(layer_dtypes.items())
        if key not in self._results:
            self.runs += 1
            self._results[key] = self._rerun(layer_dtypes, with_layers)
        return self._results[key]

    def reaches(self, result: CacheProfile) -> bool:
        return result.kl <= self.target_kl

    def fewest(self, base: dict[int, str], ranked: Sequence[int], layer_dtype: str) -> dict[int, str]:
        """`base` with as few of the ranked layers raised as reach the target. All of them do, none does not.

        Fewer might do where KL does not fall with every layer, but what comes back has been run.
        """
        too_few, enough = 0, len(ranked)
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            if self.reaches(self.run(_raised(base, ranked[:middle], layer_dtype))):
                enough = middle
            else:
                too_few = middle
        return _raised(base, ranked[:enough], layer_dtype)

    def result(self, layer_dtypes: dict[int, str], found: CacheProfile) -> Suggestion:
        return Suggestion(
            layer_dtypes=dict(sorted(layer_dtypes.items())),
            kl=found.kl,
            kl_before=self.profile.kl,
            target_kl=self.target_kl,
            bytes_per_token=found.bytes_per_token,
            bytes_per_token_before=self.profile.bytes_per_token,
            runs=self.runs,
        )


def suggest(profile: CacheProfile, target_kl: float) -> Suggestion:
    """See `CacheProfile.suggest_layer_dtypes`."""
    if isinstance(target_kl, bool) or not isinstance(target_kl, int | float) or not 0 < target_kl < math.inf:
        raise PagedCacheError(
            f"target_kl must be a positive number of nats, got {target_kl!r}; e.g. 1e-3, the KL of this "
            f"profile is {profile.kl:.2e}"
        )
    search = _Search(profile, float(target_kl))
    base, current = dict(profile.asked_layer_dtypes), profile
    if search.reaches(current):
        return search.result(base, current)
    for layer_dtype, no_gain in ((_BETTER, (_BETTER, _FULL)), (_FULL, (_FULL,))):
        ranked = [x for x in current.worst_layers() if current.layer_dtypes[x] not in no_gain]
        if not ranked:
            continue
        raised = _raised(base, ranked, layer_dtype)
        # In the model's dtype there is nothing left to rank.
        outcome = search.run(raised, with_layers=layer_dtype != _FULL)
        if search.reaches(outcome):
            found = search.fewest(base, ranked, layer_dtype)
            return search.result(found, search.run(found))
        base, current = raised, outcome
    raise PagedCacheError(
        f"target_kl={target_kl:.2e} is out of reach: KL is {current.kl:.2e} nats even with every layer in "
        "the model's dtype, where only the model's own rounding differs; choose a larger target"
    )


def _raised(base: dict[int, str], layers: Sequence[int], layer_dtype: str) -> dict[int, str]:
    return base | dict.fromkeys(layers, layer_dtype)
