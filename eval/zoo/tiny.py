"""A tiny random model of any registered type."""

import copy
import inspect
import math
import re
import zlib
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import transformers
from transformers import AutoModel, GenerationConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

from eval.zoo import exceptions, sizes
from eval.zoo.registry import Entry

_IDS = {
    "pad_token_id": sizes.PAD,
    "bos_token_id": sizes.BOS,
    "eos_token_id": sizes.EOS,
    "decoder_start_token_id": sizes.START,
}

# --- configs ------------------------------------------------------------------------------------------------


def config(model_type: str) -> PreTrainedConfig:
    """The default config of a type, made tiny."""
    name = exceptions.CONFIG_CLASSES.get(model_type)
    config_class = CONFIG_MAPPING[model_type] if name is None else getattr(transformers, name)
    arguments = copy.deepcopy(exceptions.DEFAULTS.get(model_type, {}))  # constructors take them apart
    return _Shrinking(config_class(**arguments)).tiny


class _Shrinking:
    """One config, and those inside it, made tiny by what constructors take, so that the rest follows."""

    def __init__(self, root: PreTrainedConfig) -> None:
        self._decoder = None if root.is_encoder_decoder else root.get_text_config(decoder=True)
        self._free_id = sizes.VOCAB
        self.tiny = self._shrink(root)

    def _shrink(self, config: PreTrainedConfig) -> PreTrainedConfig:
        own = exceptions.FIELDS.get(config.model_type, {})
        is_decoder = config is self._decoder
        layers = own.get("num_hidden_layers", sizes.LAYERS if is_decoder else sizes.TOWER_LAYERS)
        given = _arguments_of(config)
        many = next((n for name, n in given.items() if _is_int(n) and _fits(sizes.LAYER_COUNTS, name)), None)
        lists = {
            name: value
            for name, value in given.items()
            if isinstance(value, list | tuple) and len(value) == many and name not in own
        }
        kept = _kept_layers(list(lists.values()), layers)
        arguments = {
            name: self._per_layer(name, value, kept) if name in lists else self._one(name, value, layers)
            for name, value in given.items()
        }
        if is_decoder:  # what it has and its default config may not
            arguments |= {"is_decoder": True} if "is_decoder" in given else {}
            for name, value in (("num_key_value_heads", sizes.KV_HEADS), ("head_dim", sizes.HEAD_DIM)):
                if name in given and given[name] is None:
                    arguments[name] = value
        if _is_int(given.get("kv_lora_rank")) and "num_key_value_heads" in given:
            arguments["num_key_value_heads"] = sizes.HEADS  # latent attention has no groups of heads
        arguments |= own
        return type(config)(**{n: v for n, v in arguments.items() if v is not exceptions.UNSET})

    def _one(self, name: str, value: Any, layers: int) -> Any:
        if isinstance(value, PreTrainedConfig):
            inner = self._shrink(value)
            is_plain = name in ("encoder", "decoder")  # up to 5.17 these are dicts
            return inner.to_dict() if is_plain else inner
        if name in _IDS:
            return _IDS[name]
        if name == "tie_word_embeddings":
            return False  # a tied head repeats the last id again and again
        if isinstance(value, bool | str):
            return value
        if name == "rope_parameters" and isinstance(value, dict):
            return _narrow_rope(value)
        if not isinstance(value, int | float):
            return exceptions.UNSET
        if _fits(sizes.LAYER_COUNTS, name):
            return layers
        if _fits(sizes.POSITION_COUNTS, name):
            return sizes.POSITIONS
        if _fits(r"\w+_token_(id|index)", name) and value >= sizes.VOCAB:
            self._free_id -= 1
            return self._free_id
        size = _size(name)
        return exceptions.UNSET if size is None else min(size, value)

    def _per_layer(self, name: str, value: Sequence[Any], kept: list[int]) -> Any:
        size = _size(name) if all(_is_int(item) for item in value) else None
        if size is not None:
            return type(value)([size] * len(kept))  # type: ignore[call-arg]  # a list or a tuple
        if list(value) == list(range(len(value))):
            return type(value)(range(len(kept)))  # type: ignore[call-arg]
        return type(value)([value[index] for index in kept])  # type: ignore[call-arg]


def _arguments_of(config: PreTrainedConfig) -> dict[str, Any]:
    config_class = type(config)
    left_alone = {"transformers_version", "architectures", "dtype", "problem_type", "is_encoder_decoder"}
    held, names = vars(config), inspect.signature(config_class.__init__).parameters
    stored_as = {name: config_class.attribute_map.get(name, name) for name in names}
    # Composites without fields (`encoder-decoder`) take the configs inside them as further arguments.
    stored_as |= {name: name for name, value in held.items() if isinstance(value, PreTrainedConfig)}
    return {name: held[key] for name, key in stored_as.items() if key in held and name not in left_alone}


def _kept_layers(lists: list[Sequence[Any]], count: int) -> list[int]:
    """Which layers of the default config stay: the first of every sort, over and over."""
    if not lists:
        return list(range(count))
    sorts = [repr(entries) for entries in zip(*lists, strict=True)]
    first = [sorts.index(sort) for sort in dict.fromkeys(sorts)][:count]
    return [first[index % len(first)] for index in range(count)]


def _narrow_rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """The sections of a rotary embedding with several axes, cut to the tiny head."""
    parameters = copy.deepcopy(parameters)
    for part in (parameters, *parameters.values()):
        if isinstance(part, dict) and "mrope_section" in part:
            pairs = int(sizes.HEAD_DIM * part.get("partial_rotary_factor", 1.0)) // 2
            others = len(part["mrope_section"]) - 1
            each = pairs // (others + 1)
            part["mrope_section"] = [pairs - each * others, *[each] * others]
    return parameters


def _size(name: str) -> int | None:
    return next((size for size, pattern in sizes.SIZES if _fits(pattern, name)), None)


def _fits(pattern: str, name: str) -> bool:
    return re.fullmatch(pattern, name) is not None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# --- models -------------------------------------------------------------------------------------------------


def build(entry: Entry, attention: str | None = None) -> Any:
    """A tiny model in float32 and evaluation mode; the same weights at every call."""
    model_class = getattr(transformers, entry.class_name)
    tiny = config(entry.model_type)
    if not isinstance(tiny, model_class.config_class):
        tiny = _inner(tiny, model_class.config_class) or tiny.get_text_config(decoder=True)
    if attention is not None:
        tiny._attn_implementation = attention
    torch.manual_seed(0)
    real: Any = AutoModel.from_config

    def from_config(config: PreTrainedConfig, **kwargs: Any) -> Any:
        return torch.nn.Identity() if config.model_type in exceptions.EMPTY_TOWERS else real(config, **kwargs)

    with mock.patch.object(AutoModel, "from_config", from_config):
        model = model_class(tiny).float().eval()
    redraw(model, zlib.crc32(entry.name.encode()))
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]  # the host is untyped
        do_sample=False, num_beams=1, num_return_sequences=1, **_special_ids(entry, tiny)
    )
    return model


def _special_ids(entry: Entry, config: PreTrainedConfig) -> dict[str, int]:
    """Ids that generation uses. There is no end: every row has all its tokens."""
    if entry.model_type in ("musicgen", "musicgen_melody"):  # one above the last code stands for silence
        return dict.fromkeys(("bos_token_id", "pad_token_id", "decoder_start_token_id"), sizes.VOCAB)
    ids = {"bos_token_id": sizes.BOS, "pad_token_id": sizes.PAD}
    return {**ids, "decoder_start_token_id": sizes.START} if config.is_encoder_decoder else ids


def _inner(config: PreTrainedConfig, wanted: type) -> PreTrainedConfig | None:
    """The config of a class inside another."""
    inside = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    found = (value if isinstance(value, wanted) else _inner(value, wanted) for value in inside)
    return next(filter(None, found), None)


def redraw(model: torch.nn.Module, seed: int) -> None:
    """Draw weights at the scale of trained ones: with flat attention, a lost history would not be noticed."""
    generator = torch.Generator().manual_seed(seed)
    drawn: set[int] = set()
    with torch.no_grad():
        for path, module in model.named_modules():
            for name, weight in module.named_parameters(recurse=False):
                scale = _scale(path, module, name, weight)
                if scale and id(weight) not in drawn:
                    drawn.add(id(weight))
                    weight.copy_(scale * torch.randn(weight.shape, generator=generator))


def _scale(path: str, module: torch.nn.Module, name: str, weight: torch.Tensor) -> float:
    """Standard deviation to draw a parameter with; 0 leaves it (norms, convolutions, decays of states)."""
    if isinstance(module, torch.nn.Embedding):
        return 1.0 if "relative_attention_bias" in path else 0.3
    if "sink" in name:
        return 1.0
    if weight.dim() == 1:
        return 0.1 if name == "bias" and isinstance(module, torch.nn.Linear | Conv1D) else 0.0
    if isinstance(module, torch.nn.Linear):
        # T5 leaves out the factor 1 / sqrt(head_dim) of attention.
        return (0.4 if path.endswith(".q") else 1.5) / math.sqrt(weight.shape[-1])
    if isinstance(module, Conv1D):
        return 1.5 / math.sqrt(weight.shape[0])
    is_router, is_expert = name == "weight" and weight.dim() == 2, "proj" in name and weight.dim() == 3
    if is_router or is_expert:
        return 1.5 / math.sqrt(max(weight.shape[-2:]))
    return 0.0
