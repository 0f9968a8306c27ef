"""Bytes of K and V at one length, for every format."""

from itertools import product
from typing import Any

import torch
from transformers import DynamicCache

from eval.bench.context import Bench, Context
from eval.bench.models import workload
from eval.core.table import Cell, Column, Row, WrongAnswer, fixed, required
from hf_paged_cache.config import LAYER_DTYPES, LayerDtype

TOKENS = 8192
# Of the bytes of a DynamicCache in the model's dtype.
MAX_RATIO = {
    (torch.float32, "int8"): 0.27,
    (torch.float32, "int4"): 0.16,
    (torch.bfloat16, "int8"): 0.53,
    (torch.bfloat16, "int4"): 0.30,
}

COLUMNS = (
    Column("dtype", "model"),
    Column("format", "format"),
    Column("dynamic_bytes", "Dynamic bytes", "{:,}".format),
    Column("used_bytes", "bytes", "{:,}".format),
    Column("ratio", "x Dynamic", fixed(4)),
    Column("bits", "bits per value", fixed(2)),
)


def _measure(context: Context) -> tuple[list[Row], tuple[str, ...]]:
    config = workload.smollm2_config()
    rows = []
    for dtype, name in product((torch.float32, torch.bfloat16), LAYER_DTYPES):
        context.progress(f"bytes: {workload.dtype_name(dtype)}, {name}")
        rows.append(measure(config, dtype, name, TOKENS))
    return rows, (
        "bytes: memory_footprint().used_bytes, with scales and with the blocks that stay in the model's "
        "dtype (first and newest); Dynamic: the tensors of a DynamicCache.",
    )


BENCH = Bench("bytes", f"K and V of {TOKENS} tokens in the shape of SmolLM2-135M, one row", COLUMNS, _measure)


def measure(config: Any, dtype: torch.dtype, name: LayerDtype, tokens: int) -> Row:
    """Fill a cache of a format and a `DynamicCache`, layer by layer."""
    from hf_paged_cache import PagedCache

    cache = PagedCache(config, kv_cache_dtype=name, max_tokens=tokens)
    dynamic_bytes = 0
    generator = torch.Generator().manual_seed(workload.SEED)
    shape = (1, config.num_key_value_heads, tokens, config.hidden_size // config.num_attention_heads)
    for layer_idx in range(config.num_hidden_layers):
        keys, values = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))
        dynamic_bytes += sum(states.nbytes for states in DynamicCache().update(keys, values, 0))
        cache.update(keys, values, layer_idx)
    used = cache.memory_footprint().used_bytes
    if name == "auto" and tokens % cache.stats().block_size == 0 and used != dynamic_bytes:
        raise WrongAnswer(f"{tokens} tokens as they are take {used} bytes, and DynamicCache {dynamic_bytes}")
    ratio = used / dynamic_bytes
    cells: dict[str, Cell] = {
        "dtype": workload.dtype_name(dtype),
        "format": name,
        "dynamic_bytes": dynamic_bytes,
        "used_bytes": used,
        "ratio": ratio,
        "bits": 8 * dtype.itemsize * ratio,
    }
    return Row(cells, required("Dynamic", ratio, MAX_RATIO.get((dtype, name)), at_least=False))
