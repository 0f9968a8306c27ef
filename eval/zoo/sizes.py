"""The rule that makes configs tiny. Data, no code; `exceptions` has what it gets wrong."""

VOCAB = 256
PAD, BOS, EOS, START = 0, 1, 2, 3
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
POSITIONS = 1024
LAYERS = 4  # layers of a decoder: enough for two of each kind
TOWER_LAYERS = 2  # layers of encoders, vision towers, and of decoders with an encoder

# Fields that hold a number of layers: a regular expression for the whole name.
LAYER_COUNTS = (
    r"n_layers?|num_layers|num_blocks|depth|(\w+_)?num_hidden_layers|num_(encoder|decoder|global)_layers"
    r"|(\w+_)?(encoder|decoder)_layers"
)
# Value and the fields that are cut to it. The first that fits counts; what is smaller stays.
SIZES: tuple[tuple[int, str], ...] = (
    (VOCAB, r"(\w+_)?vocab_size(_per_layer_input)?|vocab_offset"),
    (32, r"\w*(moe|shared|experts?)\w*_intermediate_size|shared_intermediate_size|expert_ffn_hidden_size"),
    (96, r"(\w+_)?intermediate_size(_mlp)?|(\w+_)?ffn_dim|ffn_hidden_size|feed_forward_size"),
    (96, r"d_ff|dim_ff|dff|d_inner|n_inner|mlp_dim"),
    (32, r"kv_lora_rank|o_lora_rank|router_hidden_size|hidden_size_per_layer_input|prompt_length"),
    (32, r"projection_dim"),
    (64, r"(\w+_)?hidden_size(_global)?|d_model|n_embd|emb_dim|(\w+_)?embedding_size|lru_width|hidden_dim"),
    (64, r"embedding_dim|word_embed_proj_dim|(pronunciation|shape)_embed_dim|output_size"),
    (64, r"projector_(in|out)put_dim|vision_output_dim|adapter_(in|out)_dim|adapter_input_size"),
    (24, r"q_lora_rank|qk_head_dim"),
    (8, r"qk_rope_head_dim|rotary_dim|d_rel|gated_norm_rank|index_topk"),
    (HEAD_DIM, r"(\w+_)?(head_?dim|d_head|d_state)|dim_head|d_kv|kv_channels|attention_head_size"),
    (16, r"(ssm_)?state_size|hc_lowrank|laurel_rank|adapter_rank|index_n_heads|num_position_embeddings"),
    (8, r"sliding_window(_size)?|attention_chunk_size|attention_window_size|window_size"),
    (8, r"mamba_(n|num)_heads|(mamba_)?chunk_size|mamba_dt_rank"),
    (KV_HEADS, r"(\w+_)?num_(global_)?key_value_heads|num_kv_heads|num_query_groups|linear_num_key_heads"),
    (2, r"n_groups|num_experts_per_tok(en)?|moe_(topk|k|top_k)|top_k_experts"),
    (HEADS, r"n_heads?|(\w+_)?num_heads|(\w+_)?attention_heads|linear_num_value_heads"),
    (4, r"(moe_)?num_(local_)?experts|n_routed_experts"),
    (1, r"n_group|topk_group|num_expert_group|mamba_n_groups|first_k_dense_replace|num_dense_layers"),
    (1, r"n_shared_experts"),
)
# Fields that hold the longest sequence, which every prompt here has to fit into: they may grow too.
POSITION_COUNTS = (
    r"(\w+_)?max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length|context_length"
    r"|max_target_positions|max_(encoder|decoder)_position_embeddings"
)
