"""Does every kernel compute what it should? Small, and against plain loops and the default cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_paged_cache.cache.paged_cache import PagedCache
from hf_paged_cache.config import LAYER_DTYPES
from hf_paged_cache.formats import RecordFormat, kv_format
from hf_paged_cache.host import compat
from hf_paged_cache.kernels import dispatch, reference
from hf_paged_cache.kernels.call import Attention, LayerBlocks

from .report import Check

_BATCH, _KV_HEADS, _GROUP, _BLOCK, _DIM, _BLOCKS = 2, 2, 2, 16, 64, 2
_DECODE_TOLERANCE = 2e-3
"""RMS ratio between two answers in float32 from the same bytes; GPUs may multiply with fewer bits."""
_WRITE_TOLERANCE = 1e-2
"""The same between what two encoders have stored: a rounding tie may fall to either side."""


def kernels(device: torch.device) -> Iterator[Check]:
    """Write and attend two blocks a row in every format."""
    for name in LAYER_DTYPES:
        try:
            yield _kernel(name, device)
        except Exception as error:  # whatever it is, it is what there is to report
            yield Check(name, False, f"{type(error).__name__}: {error}")


def generation(device: torch.device) -> Check:
    """Generate with a tiny random model, with this cache and with the default one."""
    name = "generate"
    try:
        sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
        heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97}
        config = LlamaConfig(pad_token_id=0, eos_token_id=None, **sizes, **heads)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model: Any = LlamaForCausalLM(config)
        model = model.to(device).eval()
        ids = torch.arange(3, 43, device=device).view(2, 20)
        want, got = (
            _generate(model, ids, cache) for cache in (DynamicCache(config=config), PagedCache(model))
        )
    except Exception as error:
        return Check(name, False, f"{type(error).__name__}: {error}")
    if torch.equal(want, got):
        return Check(name, True, "same tokens as the default cache")
    return Check(name, False, "other tokens than the default cache gives")


def blocks_of(name: str, device: torch.device) -> LayerBlocks:
    """Empty blocks of one layer in a format."""
    num_blocks = _BATCH * _BLOCKS
    form = kv_format(name)
    bound = None if form is None else form.bind(_BLOCK, _DIM, _DIM)
    shape = (num_blocks if bound is None else 0, _KV_HEADS, _BLOCK, _DIM)
    keys, values = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
    table = torch.arange(num_blocks, dtype=torch.int32, device=device).view(_BATCH, _BLOCKS)
    records = None
    if bound is not None:
        records = torch.zeros(num_blocks, _KV_HEADS, bound.nbytes, dtype=torch.uint8, device=device)
    return LayerBlocks(keys, values, table, None, records, bound, () if bound is not None else None)


def _kernel(name: str, device: torch.device) -> Check:
    g = torch.Generator().manual_seed(0)
    tokens = _BLOCKS * _BLOCK
    keys, values = (torch.randn(_BATCH, _KV_HEADS, tokens, _DIM, generator=g) for _ in range(2))
    query = torch.randn(_BATCH, _KV_HEADS * _GROUP, 1, _DIM, generator=g)
    blocks, plain = blocks_of(name, device), blocks_of(name, torch.device("cpu"))
    backend = dispatch.backend_name(blocks)
    dispatch.write(blocks, keys.to(device), values.to(device), 0)
    reference.write(plain, keys, values, 0)
    got = dispatch.decode(blocks, Attention(query.to(device), 0, tokens, _DIM**-0.5))[0].cpu()
    written = _on_cpu(blocks)
    write_error = max(_rms_ratio(*pair) for pair in zip(_stored(written), _stored(plain), strict=True))
    decode_error = _rms_ratio(got, reference.decode(written, Attention(query, 0, tokens, _DIM**-0.5))[0])
    is_ok = write_error <= _WRITE_TOLERANCE and decode_error <= _DECODE_TOLERANCE
    return Check(name, is_ok, f"{backend}, error of write {write_error:.1e}, of attention {decode_error:.1e}")


def _on_cpu(blocks: LayerBlocks) -> LayerBlocks:
    records = None if blocks.records is None else blocks.records.cpu()
    keys, values, table = blocks.keys.cpu(), blocks.values.cpu(), blocks.table.cpu()
    return LayerBlocks(keys, values, table, None, records, blocks.form)


def _stored(blocks: LayerBlocks) -> tuple[torch.Tensor, torch.Tensor]:
    form: RecordFormat | None = blocks.form
    if form is None or blocks.records is None:
        return blocks.keys, blocks.values
    return form.decode(blocks.records)


def _rms_ratio(got: torch.Tensor, want: Any) -> float:
    """RMS of the difference over RMS of what it should be; infinite if anything is NaN."""
    ratio = ((got - want).square().mean() / want.square().mean()).sqrt().item()
    return ratio if ratio == ratio else float("inf")


def _generate(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    given: dict[str, Any] = {compat.cache_argument(model): cache, "attention_mask": torch.ones_like(ids)}
    out: torch.Tensor = model.generate(ids, **given, do_sample=False, max_new_tokens=8)
    return out
