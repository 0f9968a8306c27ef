"""Tiny models with random weights, one per family of attention code, and how to run and cache them.

Weights are redrawn at the scale of trained ones. The small defaults of `transformers` give near-flat
attention and logits that hardly depend on the history, so that a cache could lose it all unnoticed.
"""

from __future__ import annotations

import inspect
import zlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, EncoderDecoderCache, LlamaModel

from hf_paged_cache import PagedCache

VOCAB = 97
PAD = 0
BLOCK_SIZE = 16
WINDOW = 8


def cache_kwargs() -> tuple[str, ...]:
    """The names under which the installed transformers takes a cache, the preferred one first."""
    if "cache" in inspect.signature(LlamaModel.forward).parameters:
        return ("cache", "past_key_values")
    return ("past_key_values",)


def cache_kwarg() -> str:
    """The name under which the installed transformers takes a cache without a warning."""
    return cache_kwargs()[0]


@dataclass(frozen=True)
class ModelCase:
    """A tiny model.

    Attributes:
        name: What test ids show.
        config: Name of the config class in `transformers`.
        options: Its arguments, beside those that all share.
        architecture: Name of the model class, or "" for the one that `AutoModelForCausalLM` chooses.
        attention: The attention implementation.
        is_encoder_decoder: Whether it needs an `EncoderDecoderCache`.
        value_gain: Scale of what attention adds to the residual stream. With too much of it, cross-attention
            drowns the decoder's own history.
    """

    name: str
    config: str
    options: dict[str, Any]
    architecture: str = ""
    attention: str = "sdpa"
    is_encoder_decoder: bool = False
    value_gain: float = 2.0

    def build(self, *, noise: float = 0.0, dtype: torch.dtype = torch.float32, windowed: bool = True) -> Any:
        """A new model in evaluation mode; the same weights at every call.

        Args:
            noise: Share of every weight's scale that is drawn anew. A little makes an assistant that guesses
                well but not always.
            dtype: Of the weights.
            windowed: False widens a sliding window beyond every sequence of these tests.
        """
        has_window = "sliding_window" in self.options
        options = self.options | ({"sliding_window": 1024} if has_window and not windowed else {})
        config = getattr(transformers, self.config)(
            **{"vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": None},
            **options,
        )
        if self.architecture:
            config._attn_implementation = self.attention
            model = getattr(transformers, self.architecture)(config)
            # T5 ties its head to the embedding whatever the config says, and then repeats itself.
            model.lm_head = torch.nn.Linear(config.d_model, VOCAB, bias=False)
        else:
            model = AutoModelForCausalLM.from_config(config, attn_implementation=self.attention)
        _redraw(model, zlib.crc32(self.name.encode()), noise, self.value_gain)
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = PAD
        return model.to(dtype).eval()


def _case(name: str, config: str, *, attention: str = "sdpa", **options: Any) -> ModelCase:
    shared = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    return ModelCase(name, config, shared | options, attention=attention)


def _encoder_decoder_case(name: str, config: str, architecture: str, **options: Any) -> ModelCase:
    return ModelCase(
        name, config, options, architecture=architecture, is_encoder_decoder=True, value_gain=1.0
    )


_GQA: dict[str, Any] = {"num_key_value_heads": 2}
_GEMMA: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": WINDOW,
}

CASES = (
    _case("llama", "LlamaConfig", num_hidden_layers=3, **_GQA),
    _case("llama-eager", "LlamaConfig", attention="eager", **_GQA),
    _case("qwen2", "Qwen2Config", **_GQA),
    _case("qwen3", "Qwen3Config", head_dim=24, **_GQA),
    _case("mistral", "MistralConfig", sliding_window=WINDOW, **_GQA),
    _case(
        "gemma2", "Gemma2Config", attention="eager",
        attn_logit_softcapping=5.0, final_logit_softcapping=30.0, **_GEMMA,
    ),
    _case(
        "gemma3", "Gemma3TextConfig",
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        **_GEMMA | {"num_hidden_layers": 3},
    ),
    _case("phi3", "Phi3Config", num_key_value_heads=4),
    _case("gpt2", "GPT2Config", n_inner=96),
    _case("gpt-neox", "GPTNeoXConfig", rotary_pct=0.5),
    _case("falcon", "FalconConfig", multi_query=True),
    _case("falcon-alibi", "FalconConfig", alibi=True, multi_query=False),
    _case("mixtral", "MixtralConfig", num_local_experts=4, num_experts_per_tok=2, **_GQA),
    _case(
        "gpt-oss", "GptOssConfig", attention="eager", head_dim=16, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=WINDOW, **_GQA,
    ),
    _encoder_decoder_case(
        "t5", "T5Config", "T5ForConditionalGeneration",
        d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=PAD,
        tie_word_embeddings=False,
    ),
    _encoder_decoder_case(
        "bart", "BartConfig", "BartForConditionalGeneration",
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=256, decoder_start_token_id=2,
        forced_eos_token_id=None, tie_word_embeddings=False,
    ),
)  # fmt: skip
"""Every family that the cache is tested with. A new one is a new row."""


def by_name(name: str) -> ModelCase:
    """The case of that name."""
    return next(case for case in CASES if case.name == name)


@cache
def shared_model(case_name: str, *, dtype: torch.dtype = torch.float32) -> Any:
    """One model per case for a whole test run. Tests leave it as they found it, or activated."""
    return by_name(case_name).build(dtype=dtype)


@cache
def assistant_for(case_name: str) -> Any:
    """A draft model that agrees with the case's model often, with a schedule that keeps no memory.

    Its windows are wide: up to transformers 5.17 an assistant's own cache fails in a window.
    """
    assistant = by_name(case_name).build(noise=0.15, windowed=False)
    assistant.generation_config.num_assistant_tokens = 5
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    return assistant


def host_cache(model: Any) -> Any:
    """What `transformers` itself would use for this model."""
    if model.config.is_encoder_decoder:
        return EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    return DynamicCache(config=model.config)


def paged_cache(model: Any, *, block_size: int = BLOCK_SIZE, cross: str = "paged") -> Any:
    """The paged counterpart; `cross` says whether cross-attention is `paged` too or a `dynamic` cache."""
    if model.config.is_encoder_decoder:
        second = (
            PagedCache(model, block_size=block_size)
            if cross == "paged"
            else DynamicCache(config=model.config)
        )
        return EncoderDecoderCache(PagedCache(model, block_size=block_size), second)
    return PagedCache(model, block_size=block_size)


def paged_parts(cache: Any) -> list[PagedCache]:
    """The paged caches inside a cache."""
    parts = (
        [cache.self_attention_cache, cache.cross_attention_cache]
        if isinstance(cache, EncoderDecoderCache)
        else [cache]
    )
    return [part for part in parts if isinstance(part, PagedCache)]


def _redraw(model: Any, seed: int, noise: float, value_gain: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    others = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            scale = _scale(name, weight, value_gain)
            if scale == 0.0:
                continue
            drawn = torch.randn(weight.shape, generator=generator)
            other = torch.randn(weight.shape, generator=others)
            weight.copy_(scale * ((1.0 - noise**2) ** 0.5 * drawn + noise * other))


def _scale(name: str, weight: torch.Tensor, value_gain: float) -> float:
    """Standard deviation to draw a parameter with; 0 leaves it (the weights of norms)."""
    if weight.dim() == 1:
        return 1.0 if "sinks" in name else 0.1 if name.endswith("bias") else 0.0
    if "relative_attention_bias" in name:
        return 1.0
    if any(part in name for part in ("embed", "shared", ".wte", ".wpe")):
        return 0.3
    fan_in = weight.shape[0] if ".c_" in name else weight.shape[-1]
    gain = value_gain if any(part in name for part in ("v_proj", "o_proj", "out_proj", ".v.", ".o.")) else 1.5
    # T5 leaves out the factor 1 / sqrt(head_dim) of attention.
    return gain / fan_in**0.5 * (0.25 if ".q." in name else 1.0)
