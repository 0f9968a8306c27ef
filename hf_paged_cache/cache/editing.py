"""Work on a cache beside `generate`: forks, cuts, saved states, conversion."""

from __future__ import annotations

import copy
import operator
import weakref
from typing import TYPE_CHECKING, Any, Self

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache

from hf_paged_cache.attention import graph_operator
from hf_paged_cache.errors import PagedCacheError
from hf_paged_cache.host import architectures, compat

from . import convert
from .host_contract import HostContract
from .layer import PagedLayer
from .layers import PagedIndexedLayer
from .state_dict import as_state_dict, load

if TYPE_CHECKING:
    from hf_paged_cache.forward.state import CacheState

_ID_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class CacheTools(HostContract):
    """Methods of `PagedCache` by which a user changes, copies and saves it."""

    layers: list[Any]
    _config: PreTrainedConfig

    # --- copies ---------------------------------------------------------------------------------------------

    def fork(self) -> Self:
        """Another cache with the same contents, by sharing blocks (copy-on-write).

        Both go on independently; a block is copied when one of them writes into it while the other holds it.
        They draw on one pool, also from different threads. Of layers in a 4-bit format the few blocks in the
        model's dtype are copied at once.

        Raises:
            PagedCacheError: A forward is in progress, or the cache was made with compile=True.
        """
        state = self._movable("fork").fork()
        memo: dict[int, Any] = {id(self._state): state}
        copied = type(self).__new__(type(self))
        vars(copied).update(vars(self))
        copied._state = state
        copied.layers = [
            layer.of_fork(state, memo) if isinstance(layer, PagedLayer) else copy.deepcopy(layer, memo)
            for layer in self.layers
        ]
        copied._hosts = copy.deepcopy(self._hosts, memo)
        copied._introduce()
        return copied

    def frozen(self) -> Self:
        """A fork to read with: whatever is done with it, this cache stays as it is.

        ```python
        with cache.frozen() as peek:
            logits = model(candidate, cache=peek).logits
        ```

        Leaving the block gives its own blocks back at once.
        """
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """The same contents in blocks of its own, for the model, or for a copy that this call makes of it."""
        self._settled("deepcopy")
        copied = memo[id(self)] = type(self).__new__(type(self))
        for name, value in vars(self).items():
            setattr(copied, name, copy.deepcopy(value, memo) if name != "_config" else value)
        copied._state.forget_user()
        copied._introduce()
        return copied

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything; pools stay allocated, and the next batch may have another size."""
        self._state.check_thread()
        self._state.reset(self._hosts)

    @classmethod
    def from_cache(cls, other: Cache, config_or_model: object, **settings: Any) -> Self:
        """A paged cache with the contents of another one; formats but `auto` encode what that holds.

        Args:
            other: A `DynamicCache`, a `StaticCache` without windows, or a `PagedCache` with other settings.
            config_or_model: The model that filled it, or its config.
            **settings: As for `PagedCache`.

        Raises:
            PagedCacheError: The other has layers that do not fit the model.
        """
        paged = cls(config_or_model, **settings)  # type: ignore[arg-type]  # of the class derived from this
        convert.copy_into(paged, other)
        return paged

    def to_dynamic_cache(self) -> DynamicCache:
        """A `DynamicCache` with the same contents, in dense tensors of its own."""
        self._settled("to_dynamic_cache")
        return convert.to_dynamic(self, self._config.get_text_config(decoder=True))

    def state_dict(self) -> dict[str, Any]:
        """The contents as tensors, numbers and strings, for `torch.save`.

        `torch.load(..., weights_only=True)` reads it back, and `load_state_dict` of a cache made for the same
        model with the same settings takes it in, bit for bit. Nothing is in it but this cache's own tokens;
        blocks that share a scale over many tokens keep it as it is after a crop into them.
        """
        return as_state_dict(self._movable("state_dict"), self._hosts)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace the contents by those that `state_dict` has returned.

        They are put beside what is there, and then take its place: if anything is raised, an interrupt too,
        the cache is as it was. Call `reset` before, where there is no memory for both.

        Raises:
            PagedCacheError: They are of another model, of other settings, or damaged.
            PoolExhausted: They do not fit into the pool.
        """
        load(self._movable("load_state_dict"), self._hosts, self.layers, state_dict)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens of every row and give their blocks back.

        Bytes stay as they are. But K of `int4` and all of `int8_block` are encoded in whole blocks: what is
        left of a block has been rounded beside the tokens that went, and is rounded again when it is full
        again, each time by no more than the format's error. To ask several questions of one text such that
        none moves the answer to another, ask a `fork()` of the cache for each.

        Args:
            tokens_to_remove: Minus the number of tokens to remove; 0 is safe. As in the installed
                `transformers`: before 5.18 a positive number is the length to keep, later it is an error.

        Raises:
            PagedCacheError: A window layer no longer holds what the shorter length needs.
        """
        state = self._settled("crop")
        tokens = self._num_tokens
        number = _as_count("crop", "tokens_to_remove", tokens_to_remove)
        count = compat.tokens_to_remove(number, tokens)
        is_all = count >= tokens > 0
        state.check_crop(state.rows.end - count)
        self._hosts.check_crop(count, is_all=is_all)

        def make() -> None:
            self._hosts.crop(count, is_all=is_all)
            state.crop(count)

        state.change(make, self._hosts)

    # --- the text in the cache ------------------------------------------------------------------------------

    @property
    def input_ids(self) -> torch.Tensor:
        """Ids `[rows, tokens]` of the cached tokens, as far as they are known (from the first one on)."""
        return self._settled("input_ids").rows.ids.known

    def commit(self, input_ids: torch.Tensor) -> None:
        """Tell the ids of the cached tokens, where forwards did not show them.

        Forwards show them unless they were given embeddings, or single tokens on a GPU. Known ids are what
        `truncate_to` goes by, and what prompts of `generate` are held against.

        Args:
            input_ids: `[rows, tokens]`, at least as many tokens as are cached, as `generate` returns them.

        Raises:
            PagedCacheError: There are too few, or forwards have shown others.
        """
        rows = self._with_text("commit", input_ids).rows
        rows.ids.commit(input_ids, rows.end)

    def truncate_to(self, input_ids: torch.Tensor) -> int:
        """Keep the longest beginning that the cached text shares with `input_ids`; return its tokens per row.

        For edited or regenerated chats: afterwards `generate(input_ids, ...)` computes what is new. At least
        the last token of `input_ids` is left to be fed.

        Args:
            input_ids: `[rows, tokens]`, the whole conversation.

        Raises:
            PagedCacheError: The cached ids are not known, or a window no longer holds what is needed.
        """
        state = self._with_text("truncate_to", input_ids)
        if not input_ids.shape[1]:
            raise PagedCacheError("truncate_to: input_ids has no tokens; `cache.reset()` forgets everything")
        if state.rows.end and not state.rows.ids.count:
            raise PagedCacheError(
                "truncate_to: the ids of the cached tokens are not known; call `cache.commit(input_ids)` "
                "after the forwards that fed them, or `cache.reset()`"
            )
        kept = min(state.rows.ids.shared_prefix(input_ids), input_ids.shape[1] - 1)
        if kept < state.rows.end:
            self.crop(kept - state.rows.end)
        return kept

    def prune(self, start: int, end: int) -> None:
        """Delete the tokens `start … end - 1` of every row from the history.

        At the end of the history this is a crop. Further inside, the tokens behind move up; that is only
        right where keys do not carry their position (ALiBi, relative biases), in layers that keep all tokens.

        Raises:
            PagedCacheError: The range is not inside the history, or the keys of this model carry positions.
            PoolExhausted: Others share the blocks, and there are too few to write the tokens behind anew.
                Nothing has changed. (An interrupt while they are written leaves the tokens before `start`.)
        """
        state = self._settled("prune")
        start, end = _as_count("prune", "start", start), _as_count("prune", "end", end)
        length = state.rows.end
        if not 0 <= start <= end <= length:
            raise PagedCacheError(f"prune({start}, {end}): expected 0 <= start <= end <= {length} tokens")
        if start == end:
            return
        if end < length and (reason := self._why_not_prune()) is not None:
            raise PagedCacheError(
                f"prune({start}, {end}) of {length} tokens: {reason}. `cache.crop({start - length})` forgets "
                "everything from there on; feed what comes after again"
            )
        ids, padding, wanted = state.rows.ids.known, state.rows.padding, state.rows.gradients_from
        behind = [
            (index, *(side[:, :, end:].detach().clone() for side in (layer.keys, layer.values)))
            for index, layer in enumerate(self.layers)
            if end < length and layer.get_seq_length()
        ]
        if not behind:
            self.crop(start - length)
            return

        def make() -> None:
            state.replace_tail(start, behind, padding.prune(start, end))
            if wanted is not None:
                state.rows.gradients_from = min(wanted, max(start, wanted - (end - start)))
            if ids.shape[1] == length:
                state.rows.ids.commit(torch.cat((ids[:, :start], ids[:, end:]), 1), state.rows.end)

        state.change(make)

    @property
    def _num_tokens(self) -> int:
        return self._state.rows.end or self._hosts.num_tokens

    def _introduce(self) -> None:
        """Tell those of it who find a cache by other ways than its name."""
        self._number = graph_operator.register(self)
        for layer in self.layers:
            if isinstance(layer, PagedIndexedLayer):
                layer.cache = weakref.ref(self)

    def _settled(self, method: str) -> CacheState:
        """The state, when no forward is in progress."""
        state = self._state
        state.take(None)
        state.pull()
        if state.is_open and any(map(state.rows.is_next, state.rows.behind())):
            raise PagedCacheError(f"{method}: a forward is in progress; call it when the model has returned")
        return state

    def _with_text(self, method: str, input_ids: torch.Tensor) -> CacheState:
        """The state, where blocks say how many tokens are cached, for ids that are some."""
        state = self._settled(method)
        if not state.rows.tokens:
            raise PagedCacheError(
                f"{method}: no layer of this model keeps its tokens in blocks, so the cache does not know "
                "its text; `cache.reset()` and feed the whole text"
            )
        is_tensor = isinstance(input_ids, torch.Tensor)
        if not is_tensor or input_ids.dim() != 2 or input_ids.dtype not in _ID_DTYPES:
            got = f"{tuple(input_ids.shape)} of {input_ids.dtype}" if is_tensor else type(input_ids).__name__
            raise PagedCacheError(f"input_ids must be an integer tensor [rows, tokens], got {got}")
        return state

    def _movable(self, method: str) -> CacheState:
        """The state, where blocks are not tied to rows."""
        state = self._settled(method)
        if state.is_static or state.traits.can_be_static:
            raise PagedCacheError(
                f"{method}: with compile=True every row owns its blocks; use `copy.deepcopy(cache)`, or make "
                "the cache without compile=True"
            )
        return state

    def _why_not_prune(self) -> str | None:
        """Why tokens inside the history cannot be deleted; None if they can."""
        state = self._state
        if self._hosts or any(group.window is not None for group in state.groups):
            return "layers with a window or a recurrent state do not hold all of the history"
        if any(any(group.formats.values()) for group in state.groups):
            return "moving the tokens behind would encode them a second time"
        return architectures.why_keys_have_positions(self._config)


def _as_count(method: str, argument: str, value: Any) -> int:
    """A whole number, or PagedCacheError."""
    try:
        return operator.index(value)
    except (TypeError, RuntimeError, ValueError):
        raise PagedCacheError(f"{method}: {argument} must be a whole number, got {value!r}") from None
