"""K and V that cannot be stored, where the host does not wait to see them.

On a CPU a write refuses them. On a GPU the kernels store such a token with scales of zero and set a flag on
the device. The host sends for the flags when it begins a step and reads them when it begins another, without
waiting for the device: an error comes two steps after its cause.
"""

from __future__ import annotations

import torch

from hf_paged_cache.errors import UnstorableValueError


class Faults:
    """The flags of the quantized layers, given by their indices, on one device."""

    def __init__(self, device: torch.device, layers: list[int]) -> None:
        self._layers = layers
        self._flags = torch.zeros(len(layers), 2, dtype=torch.int32, device=device)
        self._read = torch.zeros(
            len(layers), 2, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda"
        )
        self._event: torch.cuda.Event | None = None
        self._is_sent = False

    def of(self, layer_idx: int) -> torch.Tensor:
        """Where kernels set what they met in a layer: int32 `[2]`, K and V."""
        return self._flags[self._layers.index(layer_idx)]

    def check(self) -> None:
        """Raise UnstorableValueError if a flag of earlier steps has arrived, and send for those of now."""
        if self._is_sent and (self._event is None or self._event.query()):  # type: ignore[no-untyped-call]
            met = self._read.nonzero().tolist()
            if met:
                layer_idx, side = self._layers[met[0][0]], met[0][1]
                raise UnstorableValueError(  # again and again, until a reset
                    f"layer {layer_idx}: {'KV'[side]} of an earlier step has a NaN, an infinity or a "
                    "magnitude above 65504, and was stored as zeros. Look for what makes the model overflow, "
                    f"or keep the layer as it is: layer_dtypes={{{layer_idx}: 'auto'}}; then `cache.reset()` "
                    "and start from the prompt"
                )
            self._is_sent = False
        if not self._is_sent:
            self._read.copy_(self._flags, non_blocking=True)
            if self._flags.is_cuda:
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                # The current device may be another one, whose stream knows nothing of this copy.
                self._event.record(torch.cuda.current_stream(self._flags.device))
            self._is_sent = True

    def copy(self) -> Faults:
        """The same flags, for a copy of the cache."""
        copied = Faults(self._flags.device, self._layers)
        copied._flags.copy_(self._flags)
        return copied

    def reset(self) -> None:
        """Forget all flags."""
        self._flags.zero_()
        self._read.zero_()
        self._is_sent = False
