"""The methods of `transformers.Cache` by which models reach what is not paged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicCache

from hf_paged_cache.host import architectures

if TYPE_CHECKING:
    from hf_paged_cache.forward.recurrent_state import HostStates
    from hf_paged_cache.forward.state import CacheState


# A DynamicCache, so that type checks of the host (`EncoderDecoderCache.crop`, Whisper) let it pass.
class HostContract(DynamicCache):
    """The methods of `transformers.Cache` by which models reach what is not paged."""

    _hosts: HostStates
    _state: CacheState

    @property
    def _num_rows(self) -> int:
        return self._state.rows.batch or self._hosts.batch

    def _spread_rows(self, rows: int) -> None:
        """One cached row goes on as several: beams and `num_return_sequences` of one prompt share it."""
        if self._num_rows != 1 or rows < 2 or torch.compiler.is_compiling():
            return
        self._state.take(None)
        if self._num_rows == 1 and not self._state.is_open and not self._state.is_static:
            self._state.spread_rows(rows, self._hosts)

    def _enter_read(self) -> None:
        """What a forward reads before it writes may go straight into its arithmetic, so it has all rows."""
        self._hosts.enter()
        step = self._state.step
        if step is not None and step.ids is not None:
            self._spread_rows(step.ids.shape[0])

    @property
    def is_linear(self) -> list[bool]:
        """Which layers keep nothing but states of linear attention or convolutions."""
        return [architectures.is_linear(x) and not isinstance(x, CacheLayerMixin) for x in self.layers]

    @property
    def position_ids(self) -> torch.Tensor:
        """Where models of transformers 5.17 keep the positions `[dims, batch, tokens]` of an indexer."""
        self._enter_read()
        positions: torch.Tensor | None = getattr(self._hosts.indexer, "indexer_position_ids", None)
        if positions is None:
            raise AttributeError("this cache holds no positions of an indexer")
        return positions

    @position_ids.setter
    def position_ids(self, value: torch.Tensor) -> None:
        if self._hosts.indexer is None:
            raise AttributeError("this cache has no indexer whose positions it could hold")
        self._hosts.indexer.indexer_position_ids = value

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Take in the inputs of a convolution `[batch, channels, tokens]`; return those that it needs."""
        if self._hosts.can(layer_idx, "update_conv_state"):
            self._hosts.enter(("conv", layer_idx, state_idx))
            self._spread_rows(conv_states.shape[0])
            if self._state.traits.chunk_fault is not None:
                is_warm = self.has_previous_state(layer_idx, state_idx)
                self._state.check_chunk(conv_states.shape[-1], is_warm=is_warm)
            self._hosts.check_begun(layer_idx, state_idx)
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Replace a recurrent state `[batch, ...]`; return it."""
        if self._hosts.can(layer_idx, "update_recurrent_state"):
            self._hosts.enter(("recurrent", layer_idx, state_idx))
            self._spread_rows(recurrent_states.shape[0])
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Append indexer keys `[batch, tokens, index_head_dim]`; return all of them."""
        if self._hosts.can(layer_idx, "update_indexer"):
            self._hosts.enter(("indexer", layer_idx))
            self._spread_rows(indexer_key_states.shape[0])
        return super().update_indexer(indexer_key_states, layer_idx)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The last inputs of a convolution; None if there are none."""
        self._enter_read()
        return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """A recurrent state; None if there is none."""
        self._enter_read()
        return super().get_recurrent_state(layer_idx, state_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a layer that is not paged (the last one, if None) has a state."""
        self._enter_read()  # up to transformers 5.17 they then read the state itself, past the methods
        return bool(super().has_previous_state(layer_idx, state_idx))
