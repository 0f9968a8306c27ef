"""The kinds of layers that a decoder has, as its config says."""

from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs

from eval.zoo import exceptions, tiny
from eval.zoo.registry import Entry

# Every kind and what its layers do, in the order of the tables.
KINDS = {
    "full": "attends all tokens",
    "sliding": "attends a window",
    "chunked": "attends a chunk",
    "latent": "keeps a compressed K and V, expanded after the cache (MLA)",
    "indexed": "attends tokens that an index chooses",
    "linear": "keeps a recurrent state",
    "conv": "keeps the last inputs of a convolution",
    "hybrid": "keeps a state and K and V",
    "shared": "reads K and V of another layer",
    "cross": "attends an encoder",
    "own": "keeps something in a class of the model's own",
}

_BY_LAYER_TYPE = {
    **{f"{kind}_attention": (kind,) for kind in ("full", "sliding", "chunked", "indexed", "linear")},
    **dict.fromkeys(("deepseek_sparse_attention", "qwen_sparse_attention"), ("indexed",)),
    "conv": ("conv",),
    "hybrid": ("hybrid",),
    "hybrid_sliding": ("hybrid", "sliding"),
    **dict.fromkeys(("dummy", "moe", "mlp"), ()),
}


def of(config: PreTrainedConfig) -> tuple[str, ...]:
    """The kinds of a (whole) config, in the order of `KINDS`."""
    decoder = config.get_text_config(decoder=True)
    names, _ = get_layer_types_and_kwargs(decoder)
    found = {kind for name in names for kind in _BY_LAYER_TYPE.get(name, ("own",))}
    if config.is_encoder_decoder or _value(decoder, "cross_attention_layers"):
        found.add("cross")
    if _value(decoder, "kv_lora_rank"):
        found.add("latent")
    if _value(decoder, "num_kv_shared_layers") or any(_value(decoder, "kv_sharing_modes") or ()):
        found.add("shared")
    return tuple(kind for kind in KINDS if kind in found)


def of_entry(entry: Entry) -> tuple[str, ...]:
    """The kinds of a registered class, without a model; none if it does not generate by itself."""
    if entry.model_type in exceptions.SKIPPED:
        return ()
    found = of(tiny.config(entry.model_type))
    # A decoder alone shares its config with the whole.
    return found if entry.has_encoder else tuple(kind for kind in found if kind != "cross")


def _value(decoder: PreTrainedConfig, name: str) -> Any:
    first = decoder.per_layer_config[0] if hasattr(decoder, "per_layer_config") else decoder
    return getattr(first, name, None)
