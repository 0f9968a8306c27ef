"""Peak memory of one `generate` call: `python -m eval.bench.memory_child CACHE PROMPT NEW CHUNK` prints JSON.

The `memory` bench runs it once per cache: memory that a process has freed would be used again by the next.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from eval.bench import workload
from eval.bench.seed import SEED
from eval.core import measure
from hf_paged_cache.host.compat import cache_argument

_WARM_UP_TOKENS = 64


def main(name: str, prompt_tokens: int, new_tokens: int, chunk: int) -> dict[str, Any]:
    """Generate with a cache of this name; peak and rise of memory, bytes of the cache, and the tokens.

    Args:
        name: `dynamic`, `paged`, or a format of the latter.
        prompt_tokens: random tokens to begin with.
        new_tokens: tokens to generate.
        chunk: tokens of the prompt forwarded at a time; 0 for all at once.
    """
    model, _ = workload.load_model(torch.float32)
    generator = torch.Generator().manual_seed(SEED)
    prompt = torch.randint(1, model.config.vocab_size, (1, prompt_tokens), generator=generator)
    # Kernels are compiled and libraries make their buffers at the first call; that is no cache's doing.
    _generate(model, name, prompt[:, :_WARM_UP_TOKENS], 4, min(chunk, _WARM_UP_TOKENS // 2))
    with measure.peak_memory(torch.device("cpu")) as memory:
        cache, tokens = _generate(model, name, prompt, new_tokens, chunk)
    return {
        "peak_bytes": memory.peak_bytes,
        "rise_bytes": memory.rise_bytes,
        "method": memory.method,
        "tokens": tokens[0, prompt_tokens:].tolist(),
        "kv_bytes": _kv_bytes(model.config, cache.get_seq_length()),
        **_pool(name, model.config, cache),
    }


def _generate(
    model: Any, name: str, prompt: torch.Tensor, new_tokens: int, chunk: int
) -> tuple[Any, torch.Tensor]:
    cache = workload.new_cache(name, model)
    options: dict[str, Any] = {cache_argument(model): cache}
    if chunk:
        options["prefill_chunk_size"] = chunk
    tokens: torch.Tensor = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        **options,
    )
    return cache, tokens


def _pool(name: str, config: Any, cache: Any) -> dict[str, int]:
    if name == "dynamic":
        return {}
    footprint, stats = cache.memory_footprint(), cache.stats()
    if name != "paged":
        return {"pool_bytes": footprint.pool_bytes, "kv_bytes": footprint.used_bytes}
    return {
        "pool_bytes": footprint.pool_bytes,
        "formula_bytes": _kv_bytes(config, stats.num_blocks * stats.block_size),
    }


def _kv_bytes(config: Any, tokens: int) -> int:
    head_dim = config.hidden_size // config.num_attention_heads
    return 2 * int(config.num_hidden_layers * config.num_key_value_heads * head_dim) * 4 * tokens


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], *(int(argument) for argument in sys.argv[2:5]))))
