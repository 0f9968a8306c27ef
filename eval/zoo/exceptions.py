"""Exceptions from the rule of `sizes`, by `model_type` of the config concerned. Data, no code."""

from typing import Any

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
SPARSE, COMPRESSED = "compressed_sparse_attention", "heavily_compressed_attention"

UNSET = object()  # stands for a field that is left to the config class

_WINDOW = {"sliding_window": 8}
_ALTERNATING = {**_WINDOW, "layer_types": [SLIDING, FULL] * 2}
_SWITCHED_ON = {**_ALTERNATING, "use_sliding_window": True}
_SHARING = {"num_hidden_layers": 6, "num_kv_shared_layers": 2}
_HUNYUAN_ROPE = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 10000.0}

# Fields that a type's tiny config gets as they stand here. Where a type can have windows and its default has
# none, they are switched on.
FIELDS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 512, "num_hidden_layers": 2},
    "cohere_compass_text": {
        "layer_types": [SLIDING, FULL] * 2,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
            FULL: None,
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {
        "layer_types": [COMPRESSED, SPARSE, SLIDING, SPARSE],
        "compress_rates": {SPARSE: 4, COMPRESSED: 8},
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "index_topk": 2,
        "o_groups": 2,
        "hc_sinkhorn_iters": 4,
        "head_dim": 32,
    },
    "doge": {"keep_window_size": 64},
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "dots1": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "layer_types": [FULL, SLIDING] * 2,
    },
    "dots3_note_text": {
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 48,
        "swa_head_dim": 32,
        "swa_qk_nope_head_dim": 24,
        "swa_v_head_dim": 16,
    },
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_d_head": 16},
    "gemma3n_text": {**_SHARING, "activation_sparsity_pattern": [0.0] * 6},
    "gemma4_text": {**_SHARING, "global_head_dim": 32},
    "gemma4_unified_text": {**_SHARING, "global_head_dim": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "attention_layers": UNSET},
    "granitemoehybrid": {"layer_types": [LINEAR, FULL] * 2, "position_embedding_type": "rope"},
    "hunyuan_v1_dense": {"rope_parameters": _HUNYUAN_ROPE},
    "hunyuan_v1_moe": {
        "rope_parameters": _HUNYUAN_ROPE,
        "num_experts": 4,
        "moe_topk": 2,
        "num_shared_expert": 1,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": _ALTERNATING,
    "lfm2": {"layer_types": ["conv", FULL] * 2, "full_attn_idxs": [1, 3]},
    "lfm2_moe": {"layer_types": ["conv", FULL] * 2},
    "longcat_flash": {"head_dim": 8, "num_layers": 2},
    "mamba2": {"num_heads": 8},
    "mellum": _ALTERNATING,
    "minimax_m3_vl_text": {
        "layer_types": [FULL, "minimax_m3_sparse"] * 2,
        "mlp_layer_types": ["dense", "sparse"] * 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "ministral": _ALTERNATING,
    "mixtral": _WINDOW,
    "omniasr_audio": {"conv_dim": (32,) * 7},
    "phi3": _WINDOW,
    "phimoe": _WINDOW,
    "qwen2": _SWITCHED_ON,
    "qwen2_moe": _SWITCHED_ON,
    "qwen3": _SWITCHED_ON,
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"] * 2, "hash_seed": 3},
    "smollm3": _SWITCHED_ON,
    "starcoder2": _WINDOW,
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2, "depths": (1,) * 7},
    "xlm": {"mask_token_id": 4},
    "xlstm": {"chunk_size": 16, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "zaya": {**_WINDOW, "layer_types": ["hybrid", "hybrid_sliding"] * 2},
}
# Types whose registered config is larger than what the model class takes.
CONFIG_CLASSES = {"musicgen": "MusicgenDecoderConfig", "musicgen_melody": "MusicgenMelodyDecoderConfig"}
# Arguments without which a type has no default config.
DEFAULTS: dict[str, dict[str, Any]] = {
    "encoder-decoder": {
        "encoder": {"model_type": "bert"},
        "decoder": {"model_type": "bert", "is_decoder": True, "add_cross_attention": True},
    },
}
EMPTY_TOWERS = ("gemma3n_vision",)  # they need packages beside transformers, and text does not: left out
# Types that do not generate by themselves.
SKIPPED = dict.fromkeys(
    ("gemma4_assistant", "gemma4_unified_assistant"),
    "a drafter: it reads the keys and values of the model it drafts for",
)
