"""Which kernels a generation compiles at which step: Triton's own host code, without a device.

Run as a program, since Triton is loaded as a compiler here and as an interpreter in the tests' process. What
Triton would compile is noted, and nothing is launched, so that answers are zeros.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

os.environ["HF_PAGED_CACHE_BACKEND"] = "triton"

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from hf_paged_cache import PagedCache
from hf_paged_cache.kernels import triton
from hf_paged_cache.kernels.triton import question
from hf_paged_cache.store.device import tables
from tests.support.models import by_name, cache_kwarg

DEVICE = SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
    utils=SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 227 << 10}),
)
KERNEL = SimpleNamespace(
    run=lambda *args: None, launch_metadata=lambda *args: None, function=0, packed_metadata=()
)


def steps_of(kv_cache_dtype: str, prompt: int, new: int) -> dict[int, list[str]]:
    """Forward -> names of the kernels that were compiled in it."""
    found: dict[int, list[str]] = defaultdict(list)
    step = 0

    def compiled(self: Any, key: Any, signature: Any, device: Any, *rest: Any) -> Any:
        found[step].append(self.fn.__name__)
        self.device_caches[device][0][key] = KERNEL
        return KERNEL

    def answers(self: Any, v_head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        batch, heads, tokens, _ = self.query.shape
        out = self.query.new_zeros(batch, tokens, heads, v_head_dim)
        return out, self.query.new_zeros(batch, heads, tokens, dtype=torch.float32)

    driver.set_active(DEVICE)
    JITFunction._do_compile = compiled
    triton.unsupported_reason = lambda blocks: None
    question.Question.answers = answers
    tables.DeviceTables._has_lengths = lambda self, device: True  # as on a GPU
    model = by_name("llama").build()
    forward = model.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal step
        step += 1
        return forward(*args, **kwargs)

    model.forward = counted
    ids, mask = torch.full((2, prompt), 5), torch.ones(2, prompt, dtype=torch.long)
    mask[1, :3] = 0
    settings = {"kv_cache_dtype": kv_cache_dtype, "block_size": 16, "key_error_guard": "off", "group_size": 8}
    given = {cache_kwarg(): PagedCache(model, max_tokens=4096, **settings), "attention_mask": mask}
    with torch.no_grad():
        model.generate(ids, **given, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
    assert step == new, f"{step} forwards for {new} tokens"
    return found


if __name__ == "__main__":
    print(json.dumps(steps_of(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
