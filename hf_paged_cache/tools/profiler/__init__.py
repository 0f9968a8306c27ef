"""A profile of what a format does to a model, layer by layer, against full precision on the same tokens."""

from __future__ import annotations

from .cache_profile import CacheProfile, Suggestion
from .profiling import profile_cache
from .step_errors import Errors, LayerErrors, StepErrors

__all__ = ["CacheProfile", "Errors", "LayerErrors", "StepErrors", "Suggestion", "profile_cache"]
