"""How attention comes by the stored K and V of each layer: from the blocks, or as dense tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import hf_paged_cache.attention.attention_call
from hf_paged_cache.kernels import dispatch

BLOCKS = "blocks"
DENSE = "dense"
MIXED = "blocks, dense"
NONE = "none"


class Reads:
    """What was done last with each layer's stored tokens, while `watch` looked."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[str, Any]] = {}  # by id of blocks, held to keep it theirs

    def note(self, blocks: Any, how: str) -> None:
        """A layer's blocks were read."""
        self._last[id(blocks)] = how, blocks

    @property
    def how(self) -> str:
        """`blocks`, `dense`, both (some layers this, some that), or `none`."""
        found = {how for how, _ in self._last.values()}
        return MIXED if len(found) > 1 else next(iter(found), NONE)


@contextmanager
def watch() -> Iterator[Reads]:
    """Look at every read of stored K and V in the block.

    Kernels are entered by `dispatch.decode` and `attend_with_history`, and dense tensors come from
    `dispatch.gather`. Only the last read of a layer counts: an eager function is compared with the kernel
    once, at its first step, and a kernel may gather on its way.
    """
    reads = Reads()

    def noted(function: Callable[..., Any], how: str) -> Callable[..., Any]:
        def call(blocks: Any, *args: Any, **kwargs: Any) -> Any:
            result = function(blocks, *args, **kwargs)
            reads.note(blocks, how)
            return result

        return call

    places = (
        (dispatch, "decode", BLOCKS),
        (hf_paged_cache.attention.attention_call, "attend_with_history", BLOCKS),
        (dispatch, "gather", DENSE),
    )
    with ExitStack() as stack:
        for module, name, how in places:
            stack.enter_context(mock.patch.object(module, name, noted(getattr(module, name), how)))
        yield reads
