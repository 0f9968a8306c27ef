"""A profile of what a format does to a model, layer by layer, against full precision on the same tokens.

`profile_cache` measures. The `CacheProfile` that it returns is plain data that prints, saves and draws
itself, names the worst layers, and proposes which of them to store better.
"""

from __future__ import annotations

from .cache_profile import CacheProfile, Suggestion
from .profiling import profile_cache
from .step_errors import Errors, LayerErrors, StepErrors

__all__ = ["CacheProfile", "Errors", "LayerErrors", "StepErrors", "Suggestion", "profile_cache"]
