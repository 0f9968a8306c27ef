"""The tables of cases and models that the tests use, loaded when they are needed.

They are not part of a package and not checked as strictly as this one, hence the loose types.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

ROOM_FOR_THE_DRAW = 1.5
"""Right kernels were seen at 1.03 times the bound of the tests, whose inputs are always the same."""


def attention_cases() -> Any:
    """`tests.kernels.cases`: `CASES`, `build`, `assert_answers`, `dense_answer`, `rms_ratio`, tolerances."""
    return importlib.import_module("tests.kernels.cases")


def quantized_cases() -> Any:
    """`tests.kernels.quantized`: `build_quantized`, `form_of`, tolerances."""
    return importlib.import_module("tests.kernels.quantized")


def tolerance(dtype: torch.dtype) -> float:
    """RMS ratio to allow: the tests' bound, with room for inputs that are drawn anew in each run."""
    allowed: float = attention_cases().TOLERANCE[dtype]
    return ROOM_FOR_THE_DRAW * allowed


def models() -> Any:
    """`tests.support.models`: `by_name`, `cache_kwarg`, tiny models of each family."""
    return importlib.import_module("tests.support.models")


def prefill_cases() -> Any:
    """`tests.kernels.prefills`: `PREFILLS`, with masks and visibility."""
    return importlib.import_module("tests.kernels.prefills")
