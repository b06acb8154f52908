"""Sizes of tiny models of many architectures: config keywords by transformers' model type."""

S = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 128}
M = {**S, "intermediate_size": 64}
K = {**M, "num_key_value_heads": 2}
H = {**K, "head_dim": 8}
N = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}

# Run by default; the LoRA layers that we choose where the user names none.
MAIN = {
    "gpt2": (N, ["c_attn"]),
    "opt": ({**S, "ffn_dim": 64, "word_embed_proj_dim": 32}, ["q_proj", "v_proj"]),
    "gpt_neox": (M, ["query_key_value"]),
    "gptj": ({**N, "rotary_dim": 4}, ["q_proj", "v_proj"]),
    "llama": (K, ["q_proj", "v_proj"]),
    "mistral": (H, ["q_proj", "v_proj"]),
    "qwen3": (H, ["q_proj", "v_proj"]),
    "gemma3_text": (H, ["q_proj", "v_proj"]),
    "phi": ({**M, "partial_rotary_factor": 0.5}, ["fc1", "fc2", "q_proj", "v_proj"]),
    "smollm3": (K, ["q_proj", "v_proj"]),
    "mixtral": ({**H, "num_local_experts": 4, "num_experts_per_tok": 2}, ["q_proj", "v_proj"]),
    "mamba": ({"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}, ["in_proj"]),
}
MORE = {
    "qwen2": (K, ["q_proj", "v_proj"]),
    "gemma": (H, ["q_proj", "v_proj"]),
    "gemma2": (H, ["q_proj", "v_proj"]),
    "phi3": (K, ["qkv_proj"]),
    "olmo": (K, ["q_proj", "v_proj"]),
    "olmo2": (K, ["q_proj", "v_proj"]),
    "falcon": ({**M, "new_decoder_architecture": False, "multi_query": True}, ["query_key_value"]),
    "bloom": ({"hidden_size": 32, "n_head": 4, "n_layer": 2}, ["query_key_value"]),
    "stablelm": (K, ["q_proj", "v_proj"]),
    "starcoder2": (K, ["q_proj", "v_proj"]),
    "cohere": (K, ["q_proj", "v_proj"]),
    "granite": (K, ["q_proj", "v_proj"]),
    "qwen3_moe": ({**H, **MOE}, ["q_proj", "v_proj"]),
    "gpt_oss": ({**H, "num_local_experts": 4, "num_experts_per_tok": 2}, ["q_proj", "v_proj"]),
    "gpt_bigcode": (N, ["c_attn"]),
    "gpt_neo": (
        {**M, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
        ["q_proj", "v_proj"],
    ),
    "codegen": ({**N, "rotary_dim": 4}, ["qkv_proj"]),
    "mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}, ["Wqkv"]),
    "xglm": ({"d_model": 32, "attention_heads": 4, "num_layers": 2, "ffn_dim": 64}, ["q_proj", "v_proj"]),
    "glm4": (H, ["q_proj", "v_proj"]),
    "nemotron": (H, ["q_proj", "v_proj"]),
    "exaone4": (H, ["q_proj", "v_proj"]),
    "deepseek_v3": (
        {**M, **LATENT, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
         "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4},
        ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj"],
    ),
    "llama4_text": ({**H, "num_local_experts": 4, "intermediate_size_mlp": 64}, ["q_proj", "v_proj"]),
    "lfm2": ({**K, "layer_types": ["conv", "full_attention"]}, ["q_proj", "v_proj"]),
    "qwen3_next": (
        {**H, **MOE, **LINEAR, "shared_expert_intermediate_size": 32,
         "layer_types": ["linear_attention", "full_attention"]},
        ["q_proj", "v_proj"],
    ),
    "mamba2": (
        {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2},
        ["in_proj"],
    ),
    "falcon_mamba": ({"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}, ["in_proj"]),
    "bamba": (
        {**K, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8,
         "attn_layer_indices": [1]},
        ["q_proj", "v_proj"],
    ),
    "jamba": (
        {**K, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
         "expert_layer_offset": 1, "mamba_d_state": 8, "use_mamba_kernels": False},
        ["q_proj", "v_proj"],
    ),
}  # fmt: skip
# Cannot work, and what the refusal says.
REFUSED = {
    "rwkv": (
        {"hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32, "context_length": 128},
        "padded on the left",
    ),
    "recurrent_gemma": (
        {**S, "intermediate_size": 64, "num_key_value_heads": 1, "head_dim": 8, "lru_width": 32,
         "attention_window_size": 16, "block_types": ["recurrent", "attention"]},
        "padded on the left",
    ),
}  # fmt: skip
