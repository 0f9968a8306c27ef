"""One rank of a model whose weights are spread over several; prints what each format generates."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import distributed
from transformers import AutoModelForCausalLM, DynamicCache

from hf_paged_cache import PagedCache
from tests.support.models import cache_kwarg
from tests.support.quantized import cache_of, ids

TOKENS = 12


def generate(model: Any, cache: PagedCache | DynamicCache) -> list[list[int]]:
    prompt = ids(20)
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=TOKENS,
        do_sample=False,
        **{cache_kwarg(): cache},
    )
    return out[:, 20:].tolist()  # type: ignore[no-any-return]


if __name__ == "__main__":
    folder, *formats = sys.argv[1:]
    distributed.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
    results = {"stock": generate(model, DynamicCache(config=model.config))}
    results |= {name: generate(model, cache_of(model, name)) for name in formats}
    print(type(model.model.layers[0].self_attn.k_proj.weight).__name__, results)
    distributed.destroy_process_group()
