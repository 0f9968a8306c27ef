"""The operator by which a forward that the user has compiled updates one layer of a cache that is not static.

To the compiler it is an opaque call, so that a forward stays in one graph. What it changes is no tensor of
the graph; how far the cache had come is known when a forward begins, and shows in the shapes of the results.
"""

# No `from __future__ import annotations` here: the schema is read from the annotations.
import itertools
import weakref
from typing import Any

import torch

# The compiler takes 0 and 1 for constants, and would make a graph for each.
_numbers = itertools.count(2)
_caches: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def register(cache: Any) -> int:
    """A number by which graphs name a `PagedCache`. A copy of a cache needs one of its own."""
    number = next(_numbers)
    _caches[number] = cache
    return number


@torch.library.custom_op("hf_paged_cache::update", mutates_args=())
def update(
    key_states: torch.Tensor, value_states: torch.Tensor, cache: int, layer_idx: int, start: int, visible: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write new K and V of one layer of a cache, named by what `register` gave; return all it may see.

    It holds `start` tokens per row before; the results are `[batch, kv_heads, visible, head_dim]`, in memory
    of their own.
    """
    keys, values = _caches[cache].update_in_graph(key_states, value_states, layer_idx, start)
    return keys, values


@update.register_fake
def _(
    key_states: torch.Tensor, value_states: torch.Tensor, cache: int, layer_idx: int, start: int, visible: int
) -> tuple[torch.Tensor, torch.Tensor]:
    (batch, heads, _, head_dim), v_head_dim = key_states.shape, value_states.shape[3]
    return (
        key_states.new_empty(batch, heads, visible, head_dim),
        value_states.new_empty(batch, heads, visible, v_head_dim),
    )
