"""`PagedCache`: a `transformers.Cache` whose K and V lie in preallocated blocks."""

from __future__ import annotations

import io
import weakref
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Never

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from hf_paged_cache.attention.masks import check_length
from hf_paged_cache.attention.paged_attention import activate, watch
from hf_paged_cache.blocks import BlockCounters
from hf_paged_cache.config import KeyErrorGuard, KVCacheDtype, LayerDtype, PagedCacheConfig, unknown_arguments
from hf_paged_cache.display import html
from hf_paged_cache.display.stats import CacheStats, GroupStats, MemoryFootprint
from hf_paged_cache.errors import CacheMismatchError, PagedCacheError, PoolExhausted
from hf_paged_cache.formats import DEFAULT_GROUP_SIZE
from hf_paged_cache.forward.contents import ModelTraits
from hf_paged_cache.forward.ownership import check_prompt
from hf_paged_cache.forward.recurrent_state import HostStates
from hf_paged_cache.forward.state import CacheState
from hf_paged_cache.host import architectures, compat, generation, running_forward
from hf_paged_cache.host.lazy_tensor import dense
from hf_paged_cache.kernels import dispatch

from .editing import CacheTools
from .layer import UNMOVABLE, PagedLayer, refused
from .layers import can_be_static, check_layers, make_layer
from .legacy_names import DeprecatedReads


class PagedCache(DeprecatedReads, CacheTools):
    """A KV cache in fixed-size blocks of a preallocated pool, for `generate` and plain forwards.

    ```python
    cache = PagedCache(model)
    model.generate(**inputs, cache=cache)  # before 5.24: past_key_values=cache
    ```

    Pools are allocated at the first update, on the device of the layers; decoding then allocates nothing that
    grows with the context. Rows share blocks by reference: reordering beams, repeating and selecting rows
    move integers, and a block is copied only when a row writes into one that others hold too. The idea of
    blocks and tables is that of PagedAttention (Kwon et al., 2023, vLLM).

    Constructing a cache activates paged attention on the model or config given (see `hf_paged_cache.disable`
    and `hf_paged_cache.paged_attention`). The model computes the same as before with any other cache.

    K and V are stored without their graph: a gradient that arrives at tokens which wanted one when they were
    stored is an error, and no gradient flows into the others.

    Args:
        config_or_model: The model, or its config. A model is better: its decoder may hold its own config.
        block_size: Tokens per block; a power of two from 16 to 256; less for layers with a short window.
        kv_cache_dtype: How K and V are stored: `auto` in the model's dtype; `int8`, `fp8`, `k8v4`, `int4` in
            so many bits, read in place by the kernels; `int8_block` and `int4_group` as textbooks do it, to
            compare with; `adaptive` is `int4` for a prompt (the first forward) of at most
            `adaptive_threshold` tokens, and `int8` for a longer one.
        max_tokens: Capacity of the pool in tokens, summed over the rows of a batch. The default goes up to
            the model's `max_position_embeddings` for every row, and to `gpu_memory_utilization` of the free
            memory. On a CPU the pool has that from the start, since memory that was never written is not
            resident; on a GPU it begins with the length at which `generate` stops (in a loop of forwards with
            the prompt and 256 tokens a row) and grows.
        gpu_memory_utilization: Share of the device's free memory (of the available RAM on a CPU) that pools
            may take where there is no `max_tokens`.
        compile: On a GPU, let `generate` compile its decode step and replay it as a CUDA graph (experimental;
            without effect elsewhere and for models with layers that are not paged). Only for `auto`. Rows
            have their shares of the pool from the start: give (longest sequence) x (rows) as `max_tokens`.
        group_size: Channels of a group of `int4_group`, for all layers, or layer index -> number.
        layer_dtypes: Layer index -> format, for layers that differ from `kv_cache_dtype`.
        residual_length: Newest tokens that quantized layers keep in the model's dtype, in whole blocks, the
            one being filled included; by default a block where K has 4 bits or is encoded in whole blocks.
        sink_tokens: First tokens of every row that they keep, in whole blocks; by default a block where K has
            4 bits.
        key_error_guard: What to do with a layer whose keys lose too much in 4 bits, seen at its first full
            block: `on` stores its keys in int8 and says so once, `error` raises, `off` does not look.
        adaptive_threshold: Tokens of the longest prompt that `adaptive` stores in int4.
        max_cache_len: In place of `max_tokens` the capacity for each row of the first forward, by the name
            that `StaticCache` has for it. Rows draw on one pool, so it is no limit of a single row.
        config: `config_or_model`, by the name that the caches of transformers have for it.
        **unknown: None: other names are refused, with the nearest that there are.

    Raises:
        PagedCacheError: An argument is out of range or of the wrong type, or not known.
        UnsupportedLayerError: This cache cannot stand in for a layer kind, or for a cache of the model's own.
    """

    def __init__(
        self,
        config_or_model: object = None,
        *,
        block_size: int = 64,
        kv_cache_dtype: KVCacheDtype = "auto",
        max_tokens: int | None = None,
        gpu_memory_utilization: float = 0.9,
        compile: bool = False,
        group_size: int | Mapping[int, int] = DEFAULT_GROUP_SIZE,
        layer_dtypes: Mapping[int, LayerDtype] | None = None,
        residual_length: int | None = None,
        sink_tokens: int | None = None,
        key_error_guard: KeyErrorGuard = "on",
        adaptive_threshold: int = 512,
        max_cache_len: int | None = None,
        config: PreTrainedConfig | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            raise unknown_arguments(unknown, {field.name for field in fields(PagedCacheConfig)} | {"config"})
        if config is not None and config_or_model is not None:
            raise PagedCacheError("config and config_or_model name the same thing; give one of them")
        config_or_model = config if config_or_model is None else config_or_model
        settings = PagedCacheConfig(
            block_size,
            kv_cache_dtype,
            max_tokens,
            gpu_memory_utilization,
            compile,
            group_size,
            {} if layer_dtypes is None else layer_dtypes,
            residual_length,
            sink_tokens,
            key_error_guard,
            adaptive_threshold,
            max_cache_len,
        )
        config, model = compat.resolve_config(config_or_model)
        specs = architectures.layer_specs(config)
        order = architectures.write_order(config, len(specs))
        paged = {index: specs[index][0] for index in order if specs[index][0].is_paged}
        check_layers(settings, specs, paged)
        traits = ModelTraits(
            is_encoder_decoder=config.is_encoder_decoder,
            has_outside_state=architectures.has_outside_state(config),
            chunk_fault=architectures.chunk_fault(config),
            can_be_static=compile and can_be_static(config, specs),
        )
        max_positions = architectures.max_positions(config)
        self._state = CacheState(settings, paged, max_positions, traits, watch(config_or_model))
        layers = [make_layer(self._state, index, *spec) for index, spec in enumerate(specs)]
        Cache.__init__(self, layers=layers)
        self._num_layers = len(specs)
        hosts = {
            index: getattr(layer, "host_layer", layer)
            for index, (layer, (spec, _)) in enumerate(zip(layers, specs, strict=True))
            if hasattr(layer, "host_layer")
            or not (spec.is_paged or spec.layer_type in architectures.EMPTY_LAYER_TYPES)
        }
        fixed = architectures.fixed_layers(config) | architectures.layers_without_indexer(config)
        self._hosts = HostStates(self._state, hosts, fixed)
        self._config = config
        self._model = None if model is None else weakref.ref(model)
        activate(config_or_model)
        self._introduce()

    # --- the contract of transformers.Cache -----------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new K and V of one layer; return all that its attention may see.

        Args:
            key_states: `[batch, kv_heads, new tokens, head_dim]`.
            value_states: `[batch, kv_heads, new tokens, v_head_dim]`.
            layer_idx: Index of the layer.
            *args: What newer versions of `transformers` pass; not needed here.
            **kwargs: The same.

        Returns:
            K and V `[batch, kv_heads, tokens, head_dim]`: views that become dense when anything but paged
            attention touches them; dense tensors where that is off.

        Raises:
            CacheMismatchError: The tensors do not fit what the cache holds, or there are no new tokens.
            PoolExhausted: No room. Whatever is raised, the step is taken back and the cache stays usable.
            UnstorableValueError: A quantized layer was given NaN, infinity, or too large a magnitude.
            QuantizationError: Its keys lose too much in 4 bits for `key_error_guard="error"`.
        """
        if not 0 <= layer_idx < self._num_layers:
            raise CacheMismatchError(
                f"layer {layer_idx}: this cache was made for a model with {self._num_layers} layers; make a "
                "new PagedCache(model) for this one. Layers appended to `cache.layers` cannot be used"
            )
        if torch.compiler.is_compiling() and self._is_traced(key_states, value_states, layer_idx):
            layer: PagedLayer = self.layers[layer_idx]
            return layer.update_traced(key_states, value_states, self._number)
        if self._hosts:
            self._hosts.enter(("kv", layer_idx))
        self._spread_rows(key_states.shape[0])
        try:
            keys, values = self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)
        except BaseException:
            if not self._state.is_open:
                self._state.give_back_rows(self._hosts)
            raise
        return keys, values

    def update_in_graph(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, start: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `update`, for a graph that the user has compiled: dense K and V in memory of their own."""
        held = self._state.rows.tokens[layer_idx]
        if held != start:
            raise CacheMismatchError(
                f"layer {layer_idx} holds {held} tokens per row, and the compiled forward goes on from "
                f"{start}: the cache was changed in between. Do that outside, and compile the forward alone"
            )
        call = None if self._state.is_open else running_forward.current()
        if call is not None and (self._state.has_masks or not self._state.traits.is_encoder_decoder):
            # A graph that the host made masks in does not show how long they were.
            check_length(call.attention_mask, start, key_states.shape[2], self._config)
        keys, values = self.update(key_states, value_states, layer_idx)
        return _apart(dense(keys), key_states), _apart(dense(values), value_states)

    def _is_traced(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int) -> bool:
        """Whether a step that is being compiled calls an operator for a layer: it has no backward."""
        state = self._state
        is_wanted = key_states.requires_grad or value_states.requires_grad
        if torch.is_grad_enabled() and (is_wanted or state.rows.gradients_from is not None):
            return False
        is_paged = isinstance(self.layers[layer_idx], PagedLayer)
        return is_paged and not state.would_be_static(key_states.device)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens per row that a layer has seen; a tensor in a step that is being compiled."""
        if self._hosts:
            self._enter_read()
        length: Any = super().get_seq_length(layer_idx)
        if isinstance(length, torch.Tensor) or torch.compiler.is_compiling():
            return length  # type: ignore[no-any-return]
        return generation.CachedLength(length, weakref.WeakMethod(self._meet_prompt))

    def _meet_prompt(self, tokens: int, ids: torch.Tensor | None, model: torch.nn.Module | None) -> int:
        """How many of the tokens of a prompt are left to feed; of one that is all cached the last is, again.

        Raises CacheMismatchError if it is shorter than what is cached, or another text.
        """
        state, held = self._settled("generate"), self._num_tokens
        if tokens < held:
            note = "" if state.traits.chunk_fault is None else f". And {state.traits.chunk_fault}"
            raise CacheMismatchError(
                f"the prompt has {tokens} tokens, but the cache already holds {held} per row. Pass the whole "
                "conversation, longer than what is cached; `cache.truncate_to(input_ids)` keeps what an "
                f"edited conversation shares with the cached one, `cache.reset()` starts anew{note}"
            )
        if ids is not None and ids.shape[1] == tokens:
            state.rows.ids.check_prompt(ids)
        if tokens == held and held:
            check_prompt(state.rows.owner, model, state.rows.end)
            try:
                self.crop(-1)
            except (PagedCacheError, RuntimeError) as error:
                raise CacheMismatchError(
                    f"the prompt has {tokens} tokens and all of them are cached, so that the last one would "
                    f"have to be taken back and fed again, but: {error}"
                ) from error
            return 1
        return tokens - held

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the keys that the next forward of `query_length` tokens will attend.

        CacheMismatchError if there are none, or more than the model can take after a history.
        """
        if self._hosts:
            self._enter_read()
        return super().get_mask_sizes(query_length, layer_idx)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Position of the next query; a tensor where the host would have to wait for the number."""
        layer = self.layers[layer_idx]
        if self._state.is_static and self._state.rows.batch and layer.is_initialized:
            return layer.length_tensor()
        return self.get_seq_length(layer_idx)

    def activate_past_recording(self) -> None:
        """Keep what window and recurrent layers would drop, until a `crop`, which can then roll back.

        CacheMismatchError if assisted decoding would feed the whole prompt after what is cached.
        """
        prompt, held = generation.drafts_feed_all_of(), self._num_tokens
        if prompt is not None and held:
            raise CacheMismatchError(
                f"assisted decoding (an assistant, or prompt lookup) would feed the whole prompt of {prompt} "
                f"tokens after the {held} per row that the cache already holds. Pass only the ids that are "
                "not cached, with the attention_mask of all; call `cache.reset()`; or go on without drafts"
            )
        super().activate_past_recording()  # type: ignore[no-untyped-call]  # the host's

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row i a copy of row `beam_idx[i]`, by reference (beam search)."""
        self._take_rows(_as_rows("reorder_cache", "beam_idx", beam_idx, self._num_rows, may_be_mask=False))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Give every row `repeats` copies beside each other, by reference."""
        if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
            raise PagedCacheError(f"repeats must be a positive number of copies per row, got {repeats!r}")
        self._settled("batch_repeat_interleave")
        self._take_rows([row for row in range(self._num_rows) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows listed in `indices` (or marked by a boolean mask), in that order."""
        self._settled("batch_select_indices")
        rows = _as_rows("batch_select_indices", "indices", indices, self._num_rows, may_be_mask=True)
        self._take_rows(rows)

    offload = refused(f"`offload`: {UNMOVABLE}")
    prefetch = refused(f"`prefetch`: {UNMOVABLE}")

    @property
    def batch_size(self) -> int:
        """Rows held, or -1 before the first update."""
        self._state.settle()
        return self._num_rows or -1

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` may compile the decode step: asked for by `compile=True`, and on a GPU."""
        state = self._state
        if state.groups:
            return state.is_static and state.is_attended()
        device = compat.expected_device(self._model() if self._model is not None else None)
        return state.would_be_static(device)

    def __repr__(self) -> str:
        stats, dtype = self.stats(), self._state.config.kv_cache_dtype
        return (
            f"{type(self).__name__}({len(self.layers)} layers, {stats.batch} rows x {stats.tokens} tokens, "
            f"{stats.used_blocks}/{stats.num_blocks} blocks of {stats.block_sizes}, {dtype})"
        )

    # --- what a user asks -----------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """Counts of rows, tokens and blocks; of all caches that share the blocks, if this one was forked."""
        self._state.settle()
        self._state.pull()
        self._state.layer_groups.store.collect()
        groups = self._state.groups
        pools = [group.manager.pool for group in groups]
        return CacheStats(
            batch=self._num_rows,
            tokens=self._num_tokens,
            block_size=self._state.config.block_size,
            num_blocks=sum(pool.num_blocks for pool in pools),
            used_blocks=sum(pool.num_referenced for pool in pools),
            shared_blocks=sum(r.num_blocks for pool in pools for r in pool.runs() if r.holders > 1),
            free_blocks=sum(pool.num_free for pool in pools),
            backend=next(filter(None, (getattr(layer, "backend", None) for layer in self.layers)), None),
            layer_dtypes=self._state.layer_groups.layer_dtypes(),
            moved_layers=self._state.layer_groups.moved_layers(),
            bytes_by_format=self._state.layer_groups.bytes_by_format(),
            equal_rows=self._state.rows.equal_rows,
            counters=sum((pool.counters for pool in pools), BlockCounters()),
            groups=tuple(
                GroupStats(g.window, tuple(g.specs), g.block_size, pool.num_blocks, tuple(pool.runs()))
                for g, pool in zip(groups, pools, strict=True)
            ),
        )

    def _repr_html_(self) -> str:
        """How a notebook shows the cache."""
        name, asked = type(self).__name__, self._state.config.kv_cache_dtype
        try:
            return html.as_html(name, asked, len(self.layers), self.stats(), self.memory_footprint())
        except (PagedCacheError, PoolExhausted) as error:  # as of compiled steps that went past their rows
            return html.as_message(name, str(error))

    def memory_footprint(self) -> MemoryFootprint:
        """Exact bytes of pools (of all caches that share them), tables, scratch, and layers not in blocks."""
        self._state.settle()
        self._state.layer_groups.store.collect()
        groups = self._state.groups
        return MemoryFootprint(
            pool_bytes=sum(group.pool_bytes for group in groups),
            used_bytes=sum(group.bytes_by_format().total() for group in groups),
            table_bytes=sum(group.tables.nbytes for group in groups),
            scratch_bytes=dispatch.scratch_bytes(),
            host_bytes=self._hosts.nbytes,
        )

    def check_integrity(self) -> None:
        """Raise an AssertionError if blocks were lost, or counts, tables and layers disagree."""
        self._state.settle()
        self._state.pull()
        self._state.check_integrity()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """As the config, the settings and `state_dict()`; the model is not part of it."""
        settings = {field.name: getattr(self._state.config, field.name) for field in fields(PagedCacheConfig)}
        # Forks may have enlarged the pool, and this cache have gone on into that room.
        per_row = -(-self._num_tokens // settings["block_size"]) * settings["block_size"]
        for name, held in (("max_tokens", self._num_rows * per_row), ("max_cache_len", per_row)):
            if settings[name] is not None:
                settings[name] = max(settings[name], held)
        contents = io.BytesIO()
        # Not as tensors: another process that is being spawned would be promised memory that ends with them.
        torch.save(self.state_dict(), contents)
        return _unpickle, (type(self), self._config, settings, contents.getvalue())

    def _take_rows(self, row_indices: list[int]) -> None:
        """Make the rows copies of the given old rows, everywhere."""
        self._settled("moving rows")
        if batch := self._num_rows:
            self._state.reorder(self._state.rows.checked(row_indices, batch), self._hosts)


_INDEX_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8)


def _as_rows(method: str, argument: str, indices: Any, batch: int, *, may_be_mask: bool) -> list[int]:
    """Indices of rows, negative ones as they are, from one dimension of them, or a boolean for each row.

    PagedCacheError for anything else; a tensor, an array and a sequence will do.
    """
    wanted = "one dimension of row indices" + (" or a boolean for each row" if may_be_mask else "")
    try:
        found = torch.as_tensor(indices)
    except (TypeError, ValueError, RuntimeError):
        raise PagedCacheError(f"{method}: {argument} must be {wanted}, got {indices!r}") from None
    is_mask = found.dtype == torch.bool
    if found.dim() != 1 or not (found.dtype in _INDEX_DTYPES or (is_mask and may_be_mask) or not len(found)):
        raise PagedCacheError(
            f"{method}: {argument} must be {wanted}, got shape {tuple(found.shape)} of {found.dtype}"
        )
    if is_mask and batch not in (0, len(found)):
        raise PagedCacheError(
            f"{method}: a boolean mask must have one entry for each of the {batch} rows, got {len(found)}"
        )
    return [int(row) for row in (found.nonzero().flatten() if is_mask else found).tolist()]


def _unpickle(
    kind: type[PagedCache], config: object, settings: dict[str, Any], contents: bytes
) -> PagedCache:
    cache = kind(config, **settings)
    cache.load_state_dict(torch.load(io.BytesIO(contents), weights_only=True))
    return cache


def _apart(stored: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Contiguous, and not the tensor that came: an operator must not return what it was given."""
    return stored.clone(memory_format=torch.contiguous_format) if stored is new else stored.contiguous()
