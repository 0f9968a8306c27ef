"""Under autocast K and V are stored in the dtype that attention computes in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged_cache import PagedCache, disable
from hf_paged_cache.errors import CacheMismatchError
from tests.support.models import CASES, by_name, host_cache, paged_cache, paged_parts

HALVES = [torch.bfloat16, torch.float16]


def padded_ids() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(1, 97, (2, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    return ids * mask, mask


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_tokens_under_autocast_are_those_of_the_stock_cache(name: str) -> None:
    """In float16: in bfloat16 two ways to add up the same numbers may choose other tokens."""
    model = by_name(name).build()
    ids, mask = padded_ids()
    cache = paged_cache(model)
    found = []
    for one in (host_cache(model), cache):
        with torch.autocast("cpu", dtype=torch.float16):
            found.append(
                model.generate(
                    ids, attention_mask=mask, past_key_values=one, max_new_tokens=8, do_sample=False
                )
            )
    assert torch.equal(found[1], found[0])
    assert {part.layers[0].dtype for part in paged_parts(cache)} == {torch.float16}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("is_paged", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("name", ["llama", "llama-eager", "gpt-oss"])
def test_attention_under_autocast_gives_the_dtype_and_values_of_the_host(
    name: str, is_paged: bool, dtype: torch.dtype
) -> None:
    model = by_name(name).build()
    given: list[torch.Tensor] = []
    project = model.model.layers[-1].self_attn.o_proj
    project.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    ids, _ = padded_ids()
    for cache in (host_cache(model), PagedCache(model, block_size=16)):
        if not is_paged:
            disable(model)
        with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
            for step in (ids, ids[:, :1], ids[:, :3]):
                model(step, past_key_values=cache)
    for want, got in zip(given[:3], given[3:], strict=True):
        assert got.dtype == want.dtype == dtype
        if not is_paged:
            assert torch.equal(got, want)
    difference = (given[4].float() - given[1].float()).abs().max() / given[1].float().abs().max()
    assert float(difference) < (0.02 if dtype == torch.bfloat16 else 0.004)


@pytest.mark.parametrize("backend", ["cpp", "torch", "reference"])
@pytest.mark.parametrize("format_name", ["auto", "int8", "fp8", "k8v4", "int4"])
def test_what_is_stored_and_read_back_is_not_computed_under_autocast(
    format_name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_PAGED_CACHE_BACKEND", backend)
    config = by_name("llama").build().config
    caches = [PagedCache(config, block_size=16, kv_cache_dtype=format_name) for _ in range(2)]
    keys, values = torch.randn(2, 2, 2, 70, 16, generator=torch.Generator().manual_seed(0))
    for layer in range(3):
        caches[0].update(keys.bfloat16(), values.bfloat16(), layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for layer in range(3):
            caches[1].update(keys, values.bfloat16(), layer)
        caches[1].reorder_cache(torch.tensor([1, 0]))
        got = [caches[1].layers[1].keys.clone(), caches[1].layers[1].values.clone()]
    want = [caches[0].layers[1].keys.flip(0), caches[0].layers[1].values.flip(0)]
    for side in range(2):
        assert got[side].dtype == torch.bfloat16
        assert torch.equal(got[side], want[side])


@pytest.mark.parametrize("order", ["in, out", "out, in", "in, other"])
def test_a_forward_in_another_precision_is_refused_and_changes_nothing(order: str) -> None:
    model, (ids, _) = by_name("llama").build(), padded_ids()
    cache = PagedCache(model, block_size=16)

    def forward(where: str, tokens: int) -> Any:
        dtype = torch.float16 if where == "other" else torch.bfloat16
        with torch.no_grad(), torch.autocast("cpu", dtype=dtype, enabled=where != "out"):
            return model(ids[:, :tokens], past_key_values=cache).logits

    first, second = order.split(", ")
    forward(first, 20)
    before = cache.layers[0].keys.clone()
    with pytest.raises(CacheMismatchError, match=r"`torch\.autocast`.*go on as the cache was"):
        forward(second, 1)
    assert torch.equal(cache.layers[0].keys, before)
    forward(first, 1)
    assert cache.get_seq_length() == 21
    cache.check_integrity()


def test_unlike_dtypes_without_autocast_are_refused_with_the_way_out() -> None:
    cache = PagedCache(by_name("llama").build())
    keys = torch.zeros(1, 2, 3, 16)
    with pytest.raises(CacheMismatchError, match=r"torch\.autocast.*cast them before `cache\.update"):
        cache.update(keys, keys.to(torch.bfloat16), 0)


def test_training_under_autocast_gives_the_gradients_of_the_stock_cache() -> None:
    found = []
    for cache_of in (host_cache, paged_cache):
        model, (ids, _) = by_name("llama").build(), padded_ids()
        cache = cache_of(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                model(ids, past_key_values=cache)
            model(ids[:, :3], past_key_values=cache).logits.float().square().sum().backward()
        found.append(model.model.layers[0].self_attn.k_proj.weight.grad)
    assert (found[1] - found[0]).abs().max() < 0.01 * found[0].abs().max()
