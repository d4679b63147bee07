"""The tiny model of the tests. A test that needs other sizes changes only those."""

from typing import Any

from jaxrl_llm.models.base import ModelConfig

# As config.json of a Hugging Face directory gives it.
MODEL = {
    "model_type": "qwen2",
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}

# Changes to MODEL. Experts in every layer, of which a token has two:
EXPERTS = {
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
GPT_OSS = EXPERTS | {"model_type": "gpt_oss", "num_local_experts": 4, "sliding_window": 3}
# A dense layer, then one with groups of experts and a shared one; latent attention in both.
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}

# A layer of a gated delta rule, then one of gated attention.
HYBRID = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 2,
    "head_dim": 8,
    "partial_rotary_factor": 0.5,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
}


def model_config(**changes: Any) -> ModelConfig:
    """The same model as our own record, with `changes`."""
    sizes = dict(
        family="qwen2",
        vocab_size=24,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=32,
        attention_bias=True,
        tie_word_embeddings=True,
    )
    return ModelConfig(**(sizes | changes))


# A model whose vocabulary is the tokenizer's, and rows for it.
READS_TEXT = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
