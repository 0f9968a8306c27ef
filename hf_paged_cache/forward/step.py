"""One forward, from the first layer that gets new K and V to the last."""

from __future__ import annotations

from dataclasses import dataclass

from hf_paged_cache.host.frames import Place

from .left_padding import Padding


@dataclass(slots=True)
class Step:
    """A step in progress, or one whose forward has ended and nobody has looked at yet.

    Attributes:
        forward: The forward that opened it; None if nobody knows.
        missing: Layers that have yet to join it.
        is_read_only: The forward was told `use_cache=False`, so that its tokens go when it ends.
        padding: What was remembered of hidden tokens before it.
    """

    forward: Place | None
    missing: int
    is_read_only: bool
    padding: Padding

    @property
    def is_over(self) -> bool:
        """Whether its forward has ended; False if nobody knows."""
        return self.forward is not None and self.forward.frame is not None and not self.forward.is_running()
