"""A constant added to two channels of every key: keys as models with large key biases have them.

`q·(k + c) = q·k + q·c`, and the second term is the same for all keys of a query, so that a softmax does not
see it. Whoever stores keys in a few bits does.
"""

from __future__ import annotations

from typing import Any

import torch

OFFSET = 60.0


def channels(head_dim: int) -> tuple[int, int]:
    """The two channels: the pair that rotary embeddings turn slowest.

    Only there does a bias of the key projection stay nearly constant from token to token, as it does in the
    models whose keys look like this. Where the halves of a head are turned together, as in Llama, they are
    the last of each half.
    """
    return head_dim // 2 - 1, head_dim - 1


def add_to_keys(cache: Any) -> None:
    """Let every `update` of this cache, whichever its class, add `OFFSET` to the keys first.

    What `update` returns and what it stores both have it, so the keys of one attention call agree.
    """
    update = cache.update

    def shifted(keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        keys = keys.clone()
        keys[..., channels(keys.shape[-1])] += OFFSET
        return update(keys, values, *args, **kwargs)

    cache.update = shifted
