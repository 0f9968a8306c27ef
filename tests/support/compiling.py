"""Static caches and compiled steps for tests.

Compiled steps call the Triton kernels, so without a GPU these tests run in Triton's interpreter and tell the
cache that the CPU is a device where compiling pays.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import CompileConfig

from hf_paged_cache import PagedCache
from hf_paged_cache.store import static_group
from tests.support.models import BLOCK_SIZE, by_name, cache_kwarg, shared_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, CAPACITY = 2, 64
PROMPT_TOKENS = 20
NEW_TOKENS = 4
"""Three steps beside the prompt: each takes half a second in the interpreter."""


@cache
def model_of(name: str) -> Any:
    """One for all tests, which leave it as they found it, or activated. A llama has one layer here."""
    if name != "llama":
        return shared_model(name).to(DEVICE)
    case = by_name(name)
    return replace(case, options=case.options | {"num_hidden_layers": 1}).build().to(DEVICE)


def static_cache(
    model: Any, *, rows: int = ROWS, capacity: int = CAPACITY, block_size: int = BLOCK_SIZE
) -> PagedCache:
    return PagedCache(model, block_size=block_size, max_tokens=rows * capacity, compile=True)


def compile_config() -> CompileConfig:
    config = CompileConfig(backend="aot_eager", mode=None, fullgraph=True)
    config._compile_all_devices = True
    return config


def chunk_config() -> CompileConfig:
    config = compile_config()
    config.fullgraph = False  # as it is by default; otherwise the compiler's own error comes first
    return config


def prompt(rows: int = ROWS, tokens: int = PROMPT_TOKENS) -> dict[str, Any]:
    """Left-padded prompts of different lengths."""
    ids = torch.randint(3, 90, (rows, tokens), device=DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: Any, cache: Any, inputs: dict[str, Any], **options: Any) -> torch.Tensor:
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False} | options
    tokens: torch.Tensor = model.generate(**inputs, **settings, **{cache_kwarg(): cache})
    return tokens


def compile_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let caches be static on this device, with the Triton kernels.

    What was compiled stays: a graph serves other tests' caches too, and to trace one takes seconds.
    """
    monkeypatch.setattr(static_group, "DEVICES", frozenset({DEVICE}))
    monkeypatch.setenv("HF_PAGED_CACHE_BACKEND", "triton")


@contextmanager
def graphs_stay() -> Iterator[None]:
    """Nothing is compiled at first, and what is compiled is kept, however many graphs a function has."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield
    torch._dynamo.reset()
