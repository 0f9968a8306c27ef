"""The order of kernels where caches of one store run on different streams of a GPU.

Blocks are handed on when the host gives them back, which may be long before the kernels that read them have
run. Within a stream that is in order. A stream that takes blocks waits for what the others have queued, since
the blocks may have been theirs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Streams:
    """The streams on which a store's blocks are used. Whoever calls holds the store's lock."""

    def __init__(self) -> None:
        self._known: dict[torch.device, list[torch.cuda.Stream]] = {}

    def enter(self, device: torch.device, *, takes_blocks: bool) -> None:
        """Order the current stream of a device after the others, if it has taken blocks or is new here.

        To be called before anything is launched that reads or writes blocks. Waits on the device, not here.
        """
        if device.type != "cuda":
            return
        stream = torch.cuda.current_stream(device)
        known = self._known.setdefault(device, [])
        is_new = stream not in known
        others = [other for other in known if other != stream]
        if takes_blocks or is_new:
            for other in others:
                stream.wait_stream(other)
            # One that has nothing left to do is as good as new when it comes again.
            known[:] = [stream, *(other for other in others if not other.query())]

    def retire(self, tensors: Iterable[torch.Tensor]) -> None:
        """Have the memory of tensors that are about to be dropped stay until all streams are past them."""
        for tensor in tensors:
            for stream in self._known.get(tensor.device, ()):
                tensor.record_stream(stream)
