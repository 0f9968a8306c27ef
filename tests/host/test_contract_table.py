"""The contract of a cache, name by name: what `DynamicCache` answers, `PagedCache` answers, or it refuses.

The names are those that the installed `transformers` has, so one that a newer version adds fails here until
it gets a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    DynamicCache,
    EncoderDecoderCache,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    T5Config,
)
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from hf_paged_cache import PagedCache, PagedCacheError
from hf_paged_cache.formats import FORMATS

LAYERS, HEADS, HEAD_DIM, WINDOW, BLOCK = 3, 2, 16, 24, 16
SIZES = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 512,
}

# Norm of the error over the norm of K or V, for normally distributed ones.
BOUNDS = {
    "auto": 0.0,
    "int8": 0.015,
    "fp8": 0.04,
    "k8v4": 0.13,
    "int4": 0.13,
    "int8_block": 0.02,
    "int4_group": 0.13,
    "adaptive": 0.13,
}


def _indexed_config() -> PreTrainedConfig:
    config = LlamaConfig(**SIZES)
    name = next(name for name, kind in DYNAMIC_LAYER_TYPE_MAPPING.items() if kind is DynamicIndexedLayer)
    config.layer_types = ["full_attention", name, "full_attention"]
    return config


def _hybrid_config() -> PreTrainedConfig:
    return Lfm2Config(**SIZES, layer_types=["conv", "full_attention", "full_attention"])


KINDS: dict[str, Callable[[], PreTrainedConfig]] = {
    "full": lambda: LlamaConfig(**SIZES),
    "window": lambda: MistralConfig(**SIZES, sliding_window=WINDOW),
    "indexed": _indexed_config,
    "hybrid": _hybrid_config,
}
PAGED_KINDS = ("full", "window")

Call = Callable[[Any], Any]


@dataclass(frozen=True)
class Row:
    """A name, how it is called, and what is compared.

    Attributes:
        name: The name in `transformers`.
        call: What is done with the cache (or the layer) of either side.
        compared: `value`: what it returns, on caches of several lengths. `effect`: what layers hold after it,
            and after more tokens. `refused`: an error that names the way out, and a cache that stays as it
            was.
        kinds: Configs to try.
        way_out: What the error of a refused call says.
        stock_call: What is done with the stock cache, where the same would not mean the same.
        label: What is special about this row.
        fill: Tokens that are there before.
        stock_records: The stock cache has recorded the past all along, so that it can roll back as far.
    """

    name: str
    call: Call
    compared: str = "value"
    kinds: tuple[str, ...] = PAGED_KINDS
    way_out: str = ""
    stock_call: Call | None = None
    label: str = ""
    fill: tuple[int, ...] = (20, 40)
    stock_records: bool = False

    def __str__(self) -> str:
        return f"{self.name}{self.label and ' '}{self.label}"

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats to try: all of them where contents are compared."""
        reads = self.compared == "effect" or self.name in ("__iter__", "keys", "values", "update")
        return tuple(BOUNDS) if reads or self.label == "keys" else ("auto", "int4")


ALL = tuple(KINDS)
WINDOWS = ("window",)


def _effect(name: str, call: Call, label: str = "", **options: Any) -> Row:
    return Row(name, call, "effect", label=label, **options)


def _refused(name: str, call: Call, way_out: str, **options: Any) -> Row:
    return Row(name, call, "refused", way_out=way_out, **options)


def _states(*shape: int) -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, steps=torch.Size(shape).numel()).reshape(shape)


def _roll_back(cache: Any) -> None:
    cache.activate_past_recording()
    cache.activate_past_recording()
    _update(cache, 6)
    cache.crop(-5)
    _stop_recording(cache)


def _stop_recording(cache: Any) -> None:
    for layer in cache.layers:
        if hasattr(layer, "record_past"):
            layer.record_past = False


def _recorded(cache: Any) -> Any:
    cache.activate_past_recording()
    told = [cache.is_recording_past(i) for i in range(LAYERS)]
    _stop_recording(cache)
    return told


def _record_in_layer(layer: Any) -> Any:
    layer.activate_past_recording()
    told, layer.record_past = layer.record_past, False
    return told


def _early(cache: Any) -> None:
    cache.early_initialization(2, HEADS, HEAD_DIM, torch.float32, torch.device("cpu"))


def _initialize(layer: Any) -> bool:
    nothing = _states(2, HEADS, 0, HEAD_DIM)
    layer.lazy_initialization(nothing, nothing)
    initialized: bool = layer.is_initialized
    return initialized


def _short_text(cache: Any) -> None:
    assert len(repr(cache)) < 120, repr(cache)
    assert "tensor" not in repr(cache)


ROW_CHOICES = {
    "one": torch.tensor([1]),
    "three": torch.tensor([1, 0, 1]),
    "mask": torch.tensor([False, True]),
}
LAYERWISE = ("batch_repeat_interleave", "batch_select_indices", "crop", "reorder_cache", "reset")

CACHE_ROWS = (
    Row("__len__", len, kinds=ALL),
    Row("__iter__", list),
    Row("__repr__", _short_text, stock_call=lambda cache: None, kinds=ALL),
    Row("layers", lambda cache: len(cache.layers), kinds=ALL),
    Row("layer_class_to_replicate", lambda cache: cache.layer_class_to_replicate, kinds=ALL),
    Row("offloading", lambda cache: cache.offloading, kinds=ALL),
    _effect("activate_past_recording", _roll_back),
    _effect("batch_repeat_interleave", lambda cache: cache.batch_repeat_interleave(3)),
    *(
        _effect("batch_select_indices", lambda cache, i=rows: cache.batch_select_indices(i), label)
        for label, rows in ROW_CHOICES.items()
    ),
    # Layers of the stock cache do not tell, so it says -1 all the time.
    Row("batch_size", lambda cache: cache.batch_size, stock_call=lambda cache: -1 if _is_empty(cache) else 2),
    Row(
        "max_batch_size",
        lambda cache: cache.max_batch_size,
        stock_call=lambda cache: -1 if _is_empty(cache) else 2,
    ),
    *(
        _effect("crop", lambda cache, n=count: cache.crop(n), str(count), kinds=("full", "indexed"))
        for count in (0, -1, -4, -5, -20, -25, 7)
    ),
    # Blocks are given back one by one, so more can be rolled back than in a window to the token.
    *(
        _effect(
            "crop",
            lambda cache, n=count: cache.crop(n),
            str(count),
            kinds=WINDOWS,
            stock_records=True,
            fill=(5, 20, 40),
        )
        for count in (0, -1, -4, -5, -20, -25)
    ),
    _refused(
        "crop",
        lambda cache: cache.crop(-60),
        "activate_past_recording",
        kinds=WINDOWS,
        fill=(100,),
        label="too far",
    ),
    _effect("early_initialization", _early, fill=(0,)),
    *(
        Row("get_mask_sizes", lambda cache, q=q, i=i: cache.get_mask_sizes(q, i), label=f"{q}, {i}")
        for q in (1, 5)
        for i in (0, 2, 99)
    ),
    Row("get_mask_sizes", lambda cache: cache.get_mask_sizes(3, 0), kinds=("hybrid",), label="first kept"),
    Row("get_max_length", lambda cache: cache.get_max_length(), kinds=ALL),
    *(
        Row("get_max_length", lambda cache, i=i: cache.get_max_length(i), kinds=ALL, label=str(i))
        for i in (1, 99)
    ),
    Row("get_max_cache_shape", lambda cache: cache.get_max_cache_shape()),
    Row("max_cache_len", lambda cache: cache.max_cache_len),
    Row("get_query_offset", lambda cache: cache.get_query_offset(), kinds=ALL),
    Row("get_query_offset", lambda cache: cache.get_query_offset(layer_idx=2), label="2"),
    Row("get_seq_length", lambda cache: cache.get_seq_length(), kinds=ALL),
    *(
        Row("get_seq_length", lambda cache, i=i: cache.get_seq_length(i), kinds=ALL, label=str(i))
        for i in (2, 99)
    ),
    *(
        Row(name, lambda cache, n=name: getattr(cache, n), kinds=ALL)
        for name in (
            "is_compileable",
            "is_croppable",
            "is_dummy",
            "is_initialized",
            "is_linear",
            "is_sliding",
        )
    ),
    Row("is_recording_past", lambda cache: [cache.is_recording_past(i) for i in range(LAYERS)], kinds=ALL),
    Row(
        "is_recording_past",
        _recorded,
        label="while it does",
    ),
    # Keys of a CPU cache move nowhere in the stock cache; blocks move nowhere yet.
    _refused("offload", lambda cache: cache.offload(0, only_non_sliding=False), "kv_cache_dtype='int8'"),
    _refused("prefetch", lambda cache: cache.prefetch(0), "kv_cache_dtype='int8'"),
    _effect("reorder_cache", lambda cache: cache.reorder_cache(torch.tensor([1, 1]))),
    _effect("reorder_cache", lambda cache: cache.reorder_cache(torch.tensor([1, 0])), "swap"),
    # Before 5.18 the stock cache only wrote zeros, so a new one says what is right.
    *(
        _effect("reset", lambda cache: cache.reset(), kinds=(kind,), stock_call=_renewed)
        for kind, _renewed in (
            (k, lambda cache, k=k: DynamicCache(config=KINDS[k]())) for k in (*PAGED_KINDS, "indexed")
        )
    ),
    *(_effect("update", lambda cache, n=n: _update(cache, n), str(n)) for n in (1, 5, 16, 17, 45)),
    Row("get_conv_state", lambda cache: cache.get_conv_state(0), kinds=ALL),
    Row("get_recurrent_state", lambda cache: cache.get_recurrent_state(0), kinds=ALL),
    Row("has_previous_state", lambda cache: cache.has_previous_state(), kinds=ALL),
    Row("has_previous_state", lambda cache: cache.has_previous_state(0), kinds=ALL, label="0"),
    Row("update_conv_state", lambda cache: cache.update_conv_state(_states(2, 4, 3), 0), kinds=ALL),
    Row("update_recurrent_state", lambda cache: cache.update_recurrent_state(_states(2, 4, 3), 0), kinds=ALL),
    Row("update_indexer", lambda cache: cache.update_indexer(_states(2, 5, 4), 1)),
    _effect("update_indexer", lambda cache: _update(cache, 5), kinds=("indexed",)),
)

LAYER_ROWS = (
    *(
        Row(name, lambda layer, n=name: getattr(layer, n))
        for name in ("is_compileable", "is_croppable", "is_initialized", "is_sliding", "supports_early_init")
    ),
    Row("keys", lambda layer: layer.keys),
    Row("values", lambda layer: layer.values),
    # Unknown before the first update: the stock layer has no such attribute yet.
    Row("device", lambda layer: getattr(layer, "device", None)),
    Row("dtype", lambda layer: layer.dtype, stock_call=lambda layer: layer.keys.dtype, fill=(5,)),
    Row("get_mask_sizes", lambda layer: layer.get_mask_sizes(5)),
    Row("get_max_length", lambda layer: layer.get_max_length()),
    Row("get_max_cache_shape", lambda layer: layer.get_max_cache_shape()),
    Row("get_seq_length", lambda layer: layer.get_seq_length()),
    Row("cumulative_length", lambda layer: layer.cumulative_length, kinds=WINDOWS),
    Row("record_past", lambda layer: layer.record_past, kinds=WINDOWS),
    Row(
        "activate_past_recording",
        _record_in_layer,
        kinds=WINDOWS,
    ),
    Row("sliding_window", lambda layer: layer.sliding_window, kinds=WINDOWS),
    Row("lazy_initialization", _initialize, fill=(0,)),
    Row(
        "update",
        lambda layer: layer.update(_states(2, HEADS, 3, HEAD_DIM), _states(2, HEADS, 3, HEAD_DIM)),
    ),
    *(
        _refused(name, lambda layer, n=name, a=arguments: getattr(layer, n)(*a), rf"call `cache\.{name}\(")
        for name, arguments in zip(
            LAYERWISE, ((2,), (torch.tensor([0]),), (-1,), (torch.tensor([1, 0]),), ()), strict=True
        )
    ),
    _refused("offload", lambda layer: layer.offload(), "kv_cache_dtype='int8'"),
    _refused("prefetch", lambda layer: layer.prefetch(), "kv_cache_dtype='int8'"),
)


# --- the two sides ------------------------------------------------------------------------------------------


def _is_empty(cache: Any) -> bool:
    return not cache.layers[0].get_seq_length()


def _rows_of(cache: Any) -> int:
    keys = next((x.keys for x in cache.layers if getattr(x, "keys", None) is not None), None)
    return 2 if keys is None or not keys.numel() else keys.shape[0]


def _update(cache: Any, tokens: int, seed: int = 5) -> list[Any]:
    """New K and V in every layer that keeps them; what comes back."""
    generator, rows, returned = torch.Generator().manual_seed(seed), _rows_of(cache), []
    for layer_idx, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            states = torch.randn(rows, 4, 3, generator=generator)
            cache.update_conv_state(states, layer_idx)
            continue
        keys, values = (torch.randn(rows, HEADS, tokens, HEAD_DIM, generator=generator) for _ in range(2))
        returned.append(cache.update(keys, values, layer_idx))
        if hasattr(layer, "update_indexer"):
            new = torch.randn(rows, tokens, 4, generator=generator)
            returned.append(cache.update_indexer(new, layer_idx))
    return returned


def _outcome(call: Call, subject: Any) -> tuple[Any, BaseException | None]:
    try:
        return call(subject), None
    except (ValueError, RuntimeError, AttributeError, TypeError, IndexError) as error:
        return None, error


def _assert_same(got: Any, want: Any, bound: float) -> None:
    """Equal, but for the error that a format makes; an empty tensor is none."""
    if isinstance(want, torch.Tensor) and not want.numel():
        want = None
    if isinstance(got, torch.Tensor) and not got.numel():
        got = None
    if isinstance(want, torch.Tensor) and want.is_floating_point():
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        error = float((got - want).norm())
        assert error <= bound * float(want.norm()), error / float(want.norm())
    elif isinstance(want, list | tuple):
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            _assert_same(a, b, bound)
    else:
        assert got == want


def _parts(cache: Any) -> list[Any]:
    if isinstance(cache, EncoderDecoderCache):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [cache]


def _contents(cache: Any) -> list[Any]:
    return [
        (part.get_seq_length(), [(getattr(x, "keys", None), getattr(x, "values", None)) for x in part.layers])
        for part in _parts(cache)
    ]


def _check(paged: Any, stock: Any, bound: float) -> None:
    _assert_same(_contents(paged), _contents(stock), bound)
    for part in _parts(paged):
        part.check_integrity()


def _run(row: Row, paged: Any, stock: Any, bound: float, subject: Call, append: Call) -> None:
    """Do what a row says on both sides, compare, and see that both can go on."""
    if row.compared == "refused":
        with pytest.raises(PagedCacheError, match=row.way_out):
            row.call(subject(paged))
        _check(paged, stock, bound)
    else:
        want, why = _outcome(row.stock_call or row.call, subject(stock))
        got, refusal = _outcome(row.call, subject(paged))
        if why is not None:
            assert isinstance(refusal, ValueError | RuntimeError | type(why)), (why, got)
        else:
            assert refusal is None, refusal
        if row.stock_records:
            _stop_recording(stock)
        if row.compared == "effect":
            stock = want if isinstance(want, Cache) else stock
            _check(paged, stock, bound)
        elif why is None:
            _assert_same(got, want, bound)
            if row.name == "update":
                return  # of one layer: the others are behind
    for tokens in (1, 17, 1):
        # After a length there is no crop, so a window layer may forget again.
        _assert_same(append(paged, tokens), append(stock, tokens), bound)  # type: ignore[call-arg]
        _check(paged, stock, bound)


def _pair(kind: str, format_name: str, tokens: int, *, stock_records: bool = False) -> tuple[Any, Any]:
    config = KINDS[kind]()
    stock = DynamicCache(config=config)
    if stock_records:
        stock.activate_past_recording()
    caches = PagedCache(config, block_size=BLOCK, kv_cache_dtype=format_name, group_size=8), stock
    for cache in caches if tokens else ():
        _update(cache, tokens - 3, seed=1)
        _update(cache, 3, seed=2)
    return caches


def _installed(rows: Sequence[Row], owner: type) -> list[Row]:
    """The rows whose names the installed version has."""
    names = _names(owner)
    return [row for row in rows if row.name in names or row.name.startswith("__")]


def _cases(rows: Sequence[Row], owner: type, kinds: Sequence[Any] = ()) -> list[Any]:
    """Row, kind and formats: first what is stored as it comes and one more, in turns; then all others.

    `make test` tries each row with one of the given kinds, in turns.
    """
    found: list[Any] = []
    pairs = [(row, kind) for row in _installed(rows, owner) for kind in (kinds or row.kinds)]
    for number, (row, kind) in enumerate(pairs):
        first, *others = row.formats
        others = others[number % len(others) :] + others[: number % len(others)]
        name = f"{row}-{getattr(kind, 'model_type', kind)}"
        is_quick = not kinds or (number // len(kinds)) % len(kinds) == number % len(kinds)
        quick = () if is_quick else (pytest.mark.full,)
        found.append(pytest.param(row, kind, (first, others[0]), id=name, marks=quick))
        if others[1:]:
            found.append(pytest.param(row, kind, others[1:], id=f"{name}-more", marks=pytest.mark.full))
    return found


# --- the names ----------------------------------------------------------------------------------------------


def _names(owner: type) -> set[str]:
    """What a class and its objects have, beside what all objects have and what is private."""
    found = set(dir(owner))
    if owner is DynamicCache:
        cache = DynamicCache(config=KINDS["window"]())
        _update(cache, 3)
        found |= set(vars(cache)) | set(dir(Cache))
    elif owner is EncoderDecoderCache:
        found |= set(vars(EncoderDecoderCache(DynamicCache(), DynamicCache())))
    else:
        layer = DynamicSlidingWindowLayer(sliding_window=8)
        layer.update(_states(1, 1, 1, 4), _states(1, 1, 1, 4))
        found |= set(vars(layer)) | set(dir(CacheLayerMixin)) | set(dir(DynamicLayer))
    methods = {name for name in ("__len__", "__iter__") if hasattr(owner, name)}
    return {name for name in found if not name.startswith("_")} | methods


@pytest.mark.parametrize(
    "owner", [DynamicCache, DynamicSlidingWindowLayer, EncoderDecoderCache], ids=lambda owner: owner.__name__
)
def test_every_name_of_the_installed_transformers_has_a_row(owner: type) -> None:
    tables = {
        DynamicCache: CACHE_ROWS,
        DynamicSlidingWindowLayer: LAYER_ROWS,
        EncoderDecoderCache: ENCODER_DECODER_ROWS,
    }
    assert _names(owner) - {row.name for row in tables[owner]} == set()


@pytest.mark.parametrize(("row", "kind", "format_names"), _cases(CACHE_ROWS, DynamicCache))
def test_the_cache_answers_as_the_stock_cache_does(row: Row, kind: str, format_names: Sequence[str]) -> None:
    lengths = (0, *row.fill) if row.compared == "value" else row.fill
    for format_name, tokens in product(format_names, lengths):
        paged, stock = _pair(kind, format_name, tokens, stock_records=row.stock_records)
        _run(row, paged, stock, BOUNDS[format_name], lambda cache: cache, _update)


@pytest.mark.parametrize(("row", "kind", "format_names"), _cases(LAYER_ROWS, DynamicSlidingWindowLayer))
def test_a_layer_answers_as_the_stock_layer_does(row: Row, kind: str, format_names: Sequence[str]) -> None:
    for format_name, tokens in product(format_names, row.fill):
        paged, stock = _pair(kind, format_name, tokens)
        _run(row, paged, stock, BOUNDS[format_name], lambda cache: cache.layers[0], _update)


def test_every_format_is_in_the_table() -> None:
    assert set(BOUNDS) == {"auto", "adaptive", *FORMATS}


# --- encoder and decoder ------------------------------------------------------------------------------------

T5 = T5Config(vocab_size=50, d_model=32, d_kv=HEAD_DIM, d_ff=32, num_layers=LAYERS, num_heads=HEADS)
BART = BartConfig(
    vocab_size=50, d_model=HEADS * HEAD_DIM, encoder_layers=1, decoder_layers=LAYERS,
    encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, encoder_ffn_dim=32, decoder_ffn_dim=32,
)  # fmt: skip


def _update_decoder(cache: Any, tokens: int, seed: int = 5) -> Any:
    return _update(cache.self_attention_cache, tokens, seed)


def _encoder_decoder_pair(config: PreTrainedConfig, format_name: str, tokens: int) -> tuple[Any, Any]:
    options = {"block_size": BLOCK, "kv_cache_dtype": format_name, "group_size": 8}
    caches = (
        EncoderDecoderCache(PagedCache(config, **options), PagedCache(config, **options)),
        EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config)),
    )
    for cache in caches if tokens else ():
        _update(cache.cross_attention_cache, 33, seed=7)
        _update_decoder(cache, tokens, seed=1)
        cache.is_updated.update(dict.fromkeys(range(LAYERS), True))
    return caches


def _renewed_decoder(cache: Any) -> Any:
    return _encoder_decoder_pair(T5, "auto", 0)[1]


def _reads(*names: str) -> tuple[Row, ...]:
    return tuple(Row(name, lambda cache, n=name: getattr(cache, n)) for name in names)


ENCODER_DECODER_ROWS = (
    Row("__len__", len),
    Row("__iter__", list),
    Row("__repr__", repr, stock_call=lambda cache: None, compared="effect"),
    *_reads("is_compileable", "is_croppable", "is_dummy", "is_linear", "is_sliding", "is_updated"),
    # The host forwards these to no part: it fails for want of `layers`, whatever the parts are.
    *_reads("batch_size", "is_initialized", "max_batch_size", "max_cache_len"),
    Row("early_initialization", _early),
    Row("get_conv_state", lambda cache: cache.get_conv_state(0)),
    Row("get_recurrent_state", lambda cache: cache.get_recurrent_state(0)),
    Row("has_previous_state", lambda cache: cache.has_previous_state(0)),
    Row("is_recording_past", lambda cache: cache.is_recording_past(0)),
    Row("offload", lambda cache: cache.offload(0)),
    Row("prefetch", lambda cache: cache.prefetch(0)),
    Row("update_conv_state", lambda cache: cache.update_conv_state(_states(2, 4, 3), 0)),
    Row("update_recurrent_state", lambda cache: cache.update_recurrent_state(_states(2, 4, 3), 0)),
    Row("update_indexer", lambda cache: cache.update_indexer(_states(2, 4, 3), 0)),
    # What its parts are asked for.
    Row("self_attention_cache", lambda cache: cache.self_attention_cache.get_seq_length()),
    Row("cross_attention_cache", lambda cache: cache.cross_attention_cache.get_seq_length(2)),
    Row("cross_attention_cache", lambda cache: cache.cross_attention_cache.layers[1].keys, label="keys"),
    Row("check_dynamic_cache", lambda cache: cache.check_dynamic_cache("crop")),
    Row("get_mask_sizes", lambda cache: cache.get_mask_sizes(5, 1)),
    Row("get_max_cache_shape", lambda cache: cache.get_max_cache_shape()),
    Row("get_max_length", lambda cache: cache.get_max_length()),
    Row("get_query_offset", lambda cache: cache.get_query_offset()),
    Row("get_seq_length", lambda cache: cache.get_seq_length()),
    _effect("activate_past_recording", lambda cache: cache.activate_past_recording()),
    _effect("batch_repeat_interleave", lambda cache: cache.batch_repeat_interleave(3)),
    _effect("batch_select_indices", lambda cache: cache.batch_select_indices(torch.tensor([1, 0, 1]))),
    *(
        _effect("crop", lambda cache, n=count: cache.crop(n), str(count))
        for count in (0, -1, -4, -5, -20, -25, 7)
    ),
    _effect("reorder_cache", lambda cache: cache.reorder_cache(torch.tensor([1, 1]))),
    _effect("reset", lambda cache: cache.reset(), stock_call=_renewed_decoder),
    _effect("update", lambda cache: _update_decoder(cache, 5)),
)


@pytest.mark.parametrize(
    ("row", "config", "format_names"), _cases(ENCODER_DECODER_ROWS, EncoderDecoderCache, [T5, BART])
)
def test_a_pair_of_caches_answers_as_a_pair_of_stock_caches_does(
    row: Row, config: PreTrainedConfig, format_names: Sequence[str]
) -> None:
    for format_name, tokens in product(format_names, row.fill):
        paged, stock = _encoder_decoder_pair(config, format_name, tokens)
        _run(row, paged, stock, BOUNDS[format_name], lambda cache: cache, _update_decoder)
