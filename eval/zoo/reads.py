"""The way of each layer's attention to stored K and V: from the blocks, or as dense tensors."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from hf_paged_cache.attention import attention_call
from hf_paged_cache.kernels import dispatch

BLOCKS, DENSE, MIXED, NONE = "blocks", "dense", "blocks, dense", "none"  # MIXED: some layers this, some that


@contextmanager
def watch() -> Iterator[Callable[[], str]]:
    """Look at every read of stored K and V in the block; yields what says how they were read until then.

    Only the last read of a layer counts: an eager function is compared with the kernel once, at its first
    step, and a kernel may gather on its way.
    """
    last: dict[int, tuple[str, Any]] = {}  # by id of a layer's blocks, held to keep it theirs

    def noted(function: Callable[..., Any], how: str) -> Callable[..., Any]:
        def call(blocks: Any, *args: Any, **kwargs: Any) -> Any:
            result = function(blocks, *args, **kwargs)
            last[id(blocks)] = how, blocks
            return result

        return call

    def so_far() -> str:
        found = {how for how, _ in last.values()}
        return MIXED if len(found) > 1 else next(iter(found), NONE)

    places = (dispatch, "decode", BLOCKS), (attention_call, "attend_with_history", BLOCKS)
    with ExitStack() as stack:
        for module, name, how in (*places, (dispatch, "gather", DENSE)):
            stack.enter_context(mock.patch.object(module, name, noted(getattr(module, name), how)))
        yield so_far
