"""One forward, from the first thing it does with a cache until it has ended.

A forward brings the same new tokens to every layer, one layer after the other. The first layer to get them
opens the step for tokens: blocks are reserved in every group, or nothing happens at all. The others only
write.

```
            layer 0   layer 1   layer 2
rows.end  ─ written   written   ·           <- tokens [start, end) are reserved everywhere
rows.start─ written   written   written
```

A step is over when its forward is. What an exception has left of one is taken back by whoever looks next.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hf_paged_cache.errors import CacheMismatchError
from hf_paged_cache.host import running_forward

if TYPE_CHECKING:
    import torch

    from hf_paged_cache.host.frames import Frame

    from .left_padding import Padding
    from .undo import Undo


@dataclass(slots=True)
class Step:
    """A forward in progress, or one that has ended and nobody has looked at since."""

    forward: Frame  # known if it is one of a model; only then its end can be told
    start: int  # tokens of every row before it
    is_read_only: bool = False  # it was told `use_cache=False`, so that all it does goes when it ends
    missing: int | None = None  # layers that have yet to write its tokens; None before any has come
    padding: Padding | None = None  # what was remembered of hidden tokens before it
    rows_before: int | None = None  # rows before it spread them over more; None if it has not
    undo: Undo | None = None  # takes back what it changes outside the blocks, None if that is nothing
    writes: set[Hashable] = field(default_factory=set)  # outside the blocks, where it is no model's forward
    ids: torch.Tensor | None = None  # `[batch, tokens]` that it was given; None if it shows none

    @property
    def is_open(self) -> bool:
        """Whether its tokens have come to some layers and not to all, or are to go again."""
        return self.missing is not None and (self.missing > 0 or self.is_read_only)

    @property
    def is_over(self) -> bool:
        """Whether its forward has ended; False if nobody knows."""
        return self.forward.is_known and not self.forward.is_running()

    def has_returned(self) -> bool | None:
        """Whether its forward, which is over, came to its end, as a loop without a model; None if unknown."""
        return self.forward.has_returned() if self.forward.is_known else True

    def goes_on(self, write: Hashable | None) -> bool:
        """Whether a use of the cache now, to `write` something or to read (None), is part of it.

        From callers that are no forward of a model the same thing written once more is the next round.
        """
        if self.forward.is_known:
            return not self.is_over
        return not running_forward.current().forward.is_known and (write is None or write not in self.writes)

    def unknown_end(self) -> CacheMismatchError:
        """What to raise where it cannot be told whether it has come to its end."""
        what = "it cannot be told whether the last forward failed"
        if self.is_open:
            what = (
                f"the last forward did not reach {self.missing} of the layers, and {what} or was to end there"
            )
        return CacheMismatchError(f"{what}. Call `cache.reset()`, and start from the prompt")


def no_new_tokens(layer_idx: int, held: int) -> CacheMismatchError:
    """What to raise where a forward brings no token."""
    return CacheMismatchError(
        f"layer {layer_idx}: no new tokens. The cache already holds {held} tokens per row, and the prompt "
        "has no more than that; pass a longer prompt, `cache.crop(...)` what differs, or `cache.reset()`"
    )
