"""What a cache shows of its K and V can be read in every way and written in none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from hf_paged_cache import PagedCache, PagedCacheError
from hf_paged_cache.errors import StaleViewError
from hf_paged_cache.host.lazy_tensor import LazyTensor
from hf_paged_cache.kernels import dispatch

TOKENS = 20


def kv(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 2, TOKENS, 16, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def cache() -> PagedCache:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    cache = PagedCache(LlamaConfig(**sizes), block_size=16)
    for layer in range(2):
        cache.update(kv(layer), kv(layer + 2), layer)
    return cache


INDEX = torch.tensor([0])
WRITES: dict[str, Callable[[Any], object]] = {
    "whole": lambda x: x.mul_(0.5),
    "all items": lambda x: x.__setitem__(..., 0),
    "items": lambda x: x.__setitem__((slice(None), slice(None), slice(3, 9)), 0),
    "items by mask": lambda x: x.__setitem__(x > 0, 0),
    "items by index": lambda x: x.__setitem__(INDEX, 0),
    "add to items": lambda x: x[:, :, 3:9].__iadd__(1),
    "slice": lambda x: x[0].zero_(),
    "select": lambda x: x.select(2, 0).copy_(x.select(2, 1)),
    "transpose": lambda x: x.transpose(1, 2).zero_(),
    "permute": lambda x: x.permute(3, 2, 1, 0).zero_(),
    "reshape": lambda x: x.reshape(-1).zero_(),
    "view as bytes": lambda x: x.view(torch.uint8).zero_(),
    "unsqueeze": lambda x: x[:, :, None].zero_(),
    "expand": lambda x: x[:1].expand(2, -1, -1, -1)[0].zero_(),
    "unbind": lambda x: x.unbind(0)[1].zero_(),
    "chunk": lambda x: x.chunk(2, dim=2)[0].zero_(),
    "no view to the schema": lambda x: torch.ops.aten._unsafe_view(x, [-1]).zero_(),
    "the same dtype": lambda x: x.float().zero_(),
    "contiguous": lambda x: x.contiguous().zero_(),
    "data": lambda x: x.data.zero_(),
    "data of a slice": lambda x: x[0].data[0].zero_(),
    "new data": lambda x: setattr(x, "data", kv(9)),
    "new data of a slice": lambda x: setattr(x[0], "data", kv(9)),
    "detach": lambda x: x.detach()[0].zero_(),
    "out": lambda x: torch.add(kv(), 1, out=x),
    "out of a slice": lambda x: torch.add(kv()[:, :, :3], 1, out=x[:, :, :3]),
    "index_put_": lambda x: x.index_put_((INDEX,), torch.tensor(0.0)),
    "masked_fill_": lambda x: x[0].masked_fill_(kv()[0] > 0, 0),
    "a list of tensors": lambda x: torch._foreach_mul_([x[0], x[1]], 2),
    "set_": lambda x: x.set_(kv(9)),
    "set_ of a slice": lambda x: x[0].set_(kv(9)),
    "resize_": lambda x: x[0].resize_(3),
    "apply_": lambda x: x[0].apply_(lambda item: 0.0),
    "dropout": lambda x: torch.nn.functional.dropout(x[0], inplace=True),
    "init": lambda x: torch.nn.init.zeros_(x[0]),
    "a parameter": lambda x: torch.nn.Parameter(x[0]).data.zero_(),
    "another library": lambda x: torch.from_dlpack(x),
    "another library, slice": lambda x: torch.from_dlpack(x[0]),
}


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("is_held", [False, True], ids=["anew", "held"])
@pytest.mark.parametrize("write", WRITES)
def test_no_write_reaches_a_view_or_any_part_of_it(
    cache: PagedCache, write: str, is_held: bool, grad: bool
) -> None:
    held = cache.layers[0].keys
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(PagedCacheError, match=r"keys of layer 0.*`\.clone\(\)`"),
    ):
        WRITES[write](held if is_held else cache.layers[0].keys)
    assert torch.equal(held + 0, kv(0))
    assert torch.equal(cache.layers[0].keys + 0, kv(0))


@pytest.mark.parametrize("write", ["slice", "items", "whole"])
def test_no_write_reaches_a_view_whose_gradients_are_refused(cache: PagedCache, write: str) -> None:
    for layer in range(2):
        cache.update(kv(4).requires_grad_(), kv(5), layer)
    held = cache.layers[0].keys
    assert held.requires_grad
    with pytest.raises(PagedCacheError, match="keys of layer 0"):
        WRITES[write](held)
    assert torch.equal(held + 0, torch.cat((kv(0), kv(4)), 2))


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_a_layer_is_gathered_once_while_somebody_looks_at_it(
    cache: PagedCache, monkeypatch: pytest.MonkeyPatch, grad: bool
) -> None:
    for layer in range(2):
        cache.update(kv(4).requires_grad_(), kv(5), layer)
    gather, gathered = dispatch.gather, []

    def counted(*args: Any) -> Any:
        gathered.append(args)
        return gather(*args)

    monkeypatch.setattr(dispatch, "gather", counted)
    with torch.set_grad_enabled(grad):
        keys, values = cache.layers[0].keys, cache.layers[0].values
        assert keys.requires_grad == grad
        assert torch.equal(keys + 0, torch.cat((kv(0), kv(4)), 2))
        assert torch.equal(values + 0, torch.cat((kv(2), kv(5)), 2))
        assert torch.equal(cache.layers[0].keys + 0, keys + 0)
        assert len(gathered) == 1
        cache.crop(-1)
        assert cache.layers[0].keys[:, :, -1].sum() == kv(4)[:, :, -2].sum()
        assert len(gathered) == 2


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_arrays_are_copies_that_cannot_be_written(cache: PagedCache) -> None:
    values = cache.layers[1].values
    for array in (values.numpy(), np.asarray(values), values[0].numpy(), values.numpy(force=True)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
        torch.from_numpy(array).zero_()
    assert np.array_equal(values.numpy(), kv(3).numpy())


READS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "window, then cat": lambda x: torch.cat((x[:, :, -7:], x[:, :, :2]), 2),
    "heads repeated": lambda x: x[:, :, None].expand(2, 2, 3, TOKENS, 16).reshape(2, 6, TOKENS, 16),
    "transposed product": lambda x: x @ x.transpose(2, 3),
    "view of a transpose": lambda x: x.transpose(1, 2).reshape(2, TOKENS, 32),
    "strided": lambda x: x[:, :, ::3].contiguous().view(4, -1),
    "split": lambda x: torch.split(x, [4, 12], dim=-1)[1] * 2,
    "new memory, then in place": lambda x: x[:, :, 1:].clone().mul_(2),
    "sum in place into another": lambda x: torch.zeros(2, 2, TOKENS, 16).add_(x[:, :, :]),
    "another dtype": lambda x: x[0].to(torch.bfloat16).mul_(2),
    "sdpa": lambda x: torch.nn.functional.scaled_dot_product_attention(x[:, :, :2], x, x[:, :, :]),
}


@pytest.mark.parametrize("read", READS)
def test_parts_are_read_as_those_of_an_ordinary_tensor(cache: PagedCache, read: str) -> None:
    got = READS[read](cache.layers[1].keys)
    assert torch.equal(got, READS[read](kv(1)))
    assert not isinstance(got, LazyTensor)


def test_parts_of_a_view_outlive_it_and_the_cache_may_go_on(cache: PagedCache) -> None:
    part = cache.layers[0].keys[:, :, -3:]
    cache.crop(-5)
    assert torch.equal(part + 0, kv(0)[:, :, -3:])
    with pytest.raises(PagedCacheError, match="keys of layer 0"):
        part.zero_()


def test_a_stale_view_is_refused(cache: PagedCache) -> None:
    keys = cache.layers[1].keys
    cache.crop(-1)
    with pytest.raises(StaleViewError, match="K/V of layer 1"):
        keys + 0


ASSIGNMENTS: dict[str, Callable[[Any], object]] = {
    "keys": lambda cache: setattr(cache.layers[0], "keys", kv(9)),
    "values": lambda cache: setattr(cache.layers[0], "values", None),
    "del keys": lambda cache: delattr(cache.layers[0], "keys"),
    "del values": lambda cache: delattr(cache.layers[0], "values"),
    "key_cache": lambda cache: setattr(cache, "key_cache", [kv(9)]),
    "value_cache": lambda cache: setattr(cache, "value_cache", [kv(9)]),
    "key_cache[0]": lambda cache: cache.key_cache.__setitem__(0, kv(9)),
    "value_cache[0]": lambda cache: cache.value_cache.__setitem__(0, kv(9)),
    "del key_cache[0]": lambda cache: cache.key_cache.__delitem__(0),
    "key_cache.append": lambda cache: cache.key_cache.append(kv(9)),
    "key_cache +=": lambda cache: cache.key_cache.__iadd__([kv(9)]),
}


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize("assign", ASSIGNMENTS)
def test_assignments_are_refused_with_the_way_out(cache: PagedCache, assign: str) -> None:
    with pytest.raises(PagedCacheError, match=r"`cache\.crop\(\.\.\.\)`.*`PagedCache\.from_cache"):
        ASSIGNMENTS[assign](cache)
    assert torch.equal(cache.layers[0].keys + 0, kv(0))
    assert torch.equal(cache.layers[0].values + 0, kv(2))
    cache.check_integrity()


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_old_lists_are_read_as_lists(cache: PagedCache) -> None:
    keys = cache.key_cache
    assert len(keys) == 2
    assert torch.equal(keys[-1] + 0, kv(1))
    assert [tuple(one.shape) for one in keys] == [one.shape for one in keys[:]] == [kv().shape] * 2
