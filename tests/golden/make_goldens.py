"""Writes the golden logits of tiny random models, one .npz a case, next to this file.

    python tests/golden/make_goldens.py [CASE ...]

Needs torch (a CPU build does) and transformers; the tests that read the files need neither. Each
file holds the config.json as text, every weight under its Hugging Face name, token ids [2, 14] and
transformers' float32 logits, computed with its plain ("eager") attention.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,  # short enough that 14 positions feel the scaling
}


# Both sets are far from 1, so that a mix-up shows. One pair of a head of 8 has the factor 1.
LONGROPE = {
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [1.0, 4.0, 6.0, 8.0],
    "rope_theta": 10000.0,
}


HYBRID: dict[str, Any] = {
    "head_dim": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100.0,
        "partial_rotary_factor": 0.5,
    },
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
}
SHARED_EXPERT = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 12,
}
LATENT = {
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
SCALAR: dict[str, Any] = {
    "id2label": {"0": "LABEL_0"},
    "label2id": {"LABEL_0": 0},
    "pad_token_id": 0,
}


def case(
    model_type: str, architecture: str, sizes: tuple[int, int, int], **config: Any
) -> dict[str, Any]:
    """A two-layer config.json with a vocabulary of 40; `sizes`: hidden, heads, KV heads."""
    hidden, heads, kv_heads = sizes
    return {
        "model_type": model_type,
        "architectures": [architecture],
        "vocab_size": 40,
        "hidden_size": hidden,
        "intermediate_size": 36,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 64,
        "hidden_act": "silu",
        **config,
    }


# Between them: grouped and odd head counts, each rope type in the old and the new spelling, windows
# shorter than the row, tied and untied tables, a head dim that is not hidden / heads.
CASES: dict[str, dict[str, Any]] = {
    "llama_gqa_llama3": case(
        "llama",
        "LlamaForCausalLM",
        (32, 4, 2),
        rope_theta=500000.0,
        rope_scaling=LLAMA3,
        rms_norm_eps=1e-5,
    ),
    "llama_9_3_tied": case(
        "llama", "LlamaForCausalLM", (36, 9, 3), rope_theta=100000.0, tie_word_embeddings=True
    ),
    "llama_5_5_linear": case(
        "llama",
        "LlamaForCausalLM",
        (20, 5, 5),
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    ),
    "llama_scalar": case(
        "llama",
        "LlamaForSequenceClassification",
        (24, 3, 1),
        **SCALAR,
    ),
    "mistral_window": case(
        "mistral", "MistralForCausalLM", (24, 3, 1), sliding_window=5, head_dim=8
    ),
    "mistral_full": case(
        "mistral", "MistralForCausalLM", (32, 4, 2), sliding_window=None, head_dim=6
    ),
    "qwen2_tied": case(
        "qwen2", "Qwen2ForCausalLM", (24, 6, 2), tie_word_embeddings=True, rope_theta=1e6
    ),
    "qwen2_window": case(
        "qwen2",
        "Qwen2ForCausalLM",
        (20, 5, 5),
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
    ),
    "qwen3_gqa": case(
        "qwen3",
        "Qwen3ForCausalLM",
        (24, 4, 2),
        head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "qwen3_9_3_tied_llama3": case(
        "qwen3",
        "Qwen3ForCausalLM",
        (18, 9, 3),
        head_dim=4,
        tie_word_embeddings=True,
        rope_parameters={**LLAMA3, "rope_theta": 10000.0},
    ),
    # Qwen's published YaRN: the old spelling, everything else by default. The windowed layer too.
    "qwen2_yarn": case(
        "qwen2",
        "Qwen2ForCausalLM",
        (16, 2, 1),
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
        rope_theta=1e6,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    ),
    # Every key of YaRN; no whole pairs, and no factor of its own: 64 / 16.
    "llama_yarn_mscale": case(
        "llama",
        "LlamaForCausalLM",
        (16, 2, 2),
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": None,
            "original_max_position_embeddings": 16,
            "beta_fast": 2.0,
            "beta_slow": 0.25,
            "mscale": 1.5,
            "mscale_all_dim": 0.5,
            "truncate": False,
        },
    ),
    "llama_dynamic": case(  # 14 tokens are beyond the trained 10
        "llama",
        "LlamaForCausalLM",
        (16, 2, 1),
        rope_scaling={"type": "dynamic", "factor": 2.0},
        max_position_embeddings=10,
    ),
    "llama_longrope": case(  # 14 tokens are beyond the trained 8; factor = 64 / 8
        "llama",
        "LlamaForCausalLM",
        (16, 2, 1),
        original_max_position_embeddings=8,
        rope_scaling={"type": "longrope", **LONGROPE},
    ),
    "qwen3_moe_window": case(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        (16, 4, 2),
        head_dim=6,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        norm_topk_prob=True,
        use_sliding_window=True,
        sliding_window=5,
    ),
    "qwen3_moe_scalar": case(
        "qwen3_moe",
        "Qwen3MoeForSequenceClassification",
        (16, 2, 1),
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=3,
        moe_intermediate_size=8,
        norm_topk_prob=False,
        **SCALAR,
    ),
    "mixtral_tied": case(
        "mixtral",
        "MixtralForCausalLM",
        (16, 4, 2),
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=None,
        tie_word_embeddings=True,
        intermediate_size=12,
    ),
    "olmoe_gqa": case(
        "olmoe",
        "OlmoeForCausalLM",
        (16, 4, 2),
        num_experts=4,
        num_experts_per_tok=2,
        pad_token_id=0,
        intermediate_size=12,
    ),
    "qwen3_longrope_short": case(
        "qwen3",
        "Qwen3ForCausalLM",
        (16, 2, 1),
        head_dim=8,
        rope_parameters={
            "rope_type": "longrope",
            **LONGROPE,
            "original_max_position_embeddings": 16,
            "factor": 4.0,
            "attention_factor": 1.25,
        },
    ),
    # The first layer has no rope.
    "smollm3": case(
        "smollm3",
        "SmolLM3ForCausalLM",
        (16, 2, 1),
        no_rope_layers=[0, 1],
        use_sliding_window=True,
        sliding_window=5,
        pad_token_id=0,
        tie_word_embeddings=True,
    ),
    "granite": case(
        "granite",
        "GraniteForCausalLM",
        (16, 2, 1),
        attention_multiplier=0.2,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        logits_scaling=1.5,
        tie_word_embeddings=True,
    ),
    "phi3_window": case("phi3", "Phi3ForCausalLM", (24, 3, 1), sliding_window=5, pad_token_id=0),
    # Phi-4-mini: grouped heads, three quarters of a head rotated, longrope.
    "phi3_partial_longrope": case(
        "phi3",
        "Phi3ForCausalLM",
        (32, 4, 2),
        partial_rotary_factor=0.75,
        original_max_position_embeddings=8,
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0, 1.5, 2.0],
            "long_factor": [1.0, 4.0, 6.0],
        },
        tie_word_embeddings=True,
        pad_token_id=0,
    ),
    "olmo2": case("olmo2", "Olmo2ForCausalLM", (24, 3, 1)),
    "glm4": case("glm4", "Glm4ForCausalLM", (20, 5, 1), head_dim=8, pad_token_id=0, eos_token_id=1),
    "gemma": case(
        "gemma",
        "GemmaForCausalLM",
        (16, 2, 1),
        head_dim=6,
        hidden_act="gelu",
        tie_word_embeddings=True,
    ),
    # A window with a rope base of its own; the head dim is not the square of the scale.
    "gemma3_text": case(
        "gemma3_text",
        "Gemma3ForCausalLM",
        (16, 2, 1),
        head_dim=8,
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=6,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
        rope_local_base_freq=100.0,
        tie_word_embeddings=True,
    ),
    # A window, then none; a rope that stretches some pairs; values that the limit cuts.
    "gpt_oss": case(
        "gpt_oss",
        "GptOssForCausalLM",
        (16, 4, 2),
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=4,
        swiglu_limit=0.5,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "truncate": False,
        },
        intermediate_size=12,
    ),
    # A dense layer, then groups of experts of which one is closed; YaRN with both scales.
    "deepseek_v3": case(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        (16, 3, 3),
        first_k_dense_replace=1,
        q_lora_rank=12,
        kv_lora_rank=10,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=8,
        n_routed_experts=6,
        n_group=3,
        topk_group=2,
        num_experts_per_tok=3,
        moe_intermediate_size=8,
        n_shared_experts=2,
        routed_scaling_factor=1.5,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
        },
    ),
    # Queries without a small vector, halves of a head, no groups, weights that do not add up to 1.
    "deepseek_v3_plain": case(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        (16, 2, 2),
        **LATENT,
        first_k_dense_replace=0,
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        rope_interleave=False,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
    "glm4_moe_lite": case(
        "glm4_moe_lite", "Glm4MoeLiteForCausalLM", (16, 2, 2), **LATENT, q_lora_rank=8
    ),
    "deepseek_v3_scalar": case(
        "deepseek_v3",
        "DeepseekV3ForSequenceClassification",
        (16, 2, 2),
        **LATENT,
        **SCALAR,
        first_k_dense_replace=1,
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
    ),
    # A window, then none; caps that most values feel.
    "gemma2": case(
        "gemma2",
        "Gemma2ForCausalLM",
        (16, 4, 2),
        head_dim=8,
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=4,
        query_pre_attn_scalar=6,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=2.0,
        tie_word_embeddings=True,
    ),
    # One layer of a gated delta rule, then one of gated attention.
    "qwen3_5": case(
        "qwen3_5_text", "Qwen3_5ForCausalLM", (16, 4, 2), **HYBRID, tie_word_embeddings=True
    ),
    "qwen3_5_moe": case(
        "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", (16, 2, 1), **HYBRID, **SHARED_EXPERT
    ),
    "qwen3_next": case(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        (16, 2, 1),
        **HYBRID,
        **SHARED_EXPERT,
        norm_topk_prob=False,
    ),
}


def build(config: dict[str, Any], seed: int) -> Any:
    """transformers' model of a config.json with random weights, norms and biases included."""
    import torch
    import transformers

    hf_config = transformers.AutoConfig.for_model(**json.loads(json.dumps(config)))
    hf_config._attn_implementation = "eager"
    model = getattr(transformers, config["architectures"][0])(hf_config).eval().float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1.0 + 0.2 * noise if "norm" in name else 0.25 * noise)
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model


def logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """float32 logits of every token, [B, T, V]; of a scalar model its score, [B, T, 1]."""
    import torch

    with torch.no_grad():
        hidden = model.model(input_ids=torch.from_numpy(tokens).long()).last_hidden_state
        if not hasattr(model, "score"):
            # Some families scale the head's output, so the model itself computes it.
            return model(input_ids=torch.from_numpy(tokens).long()).logits.float().numpy()
        return model.score(hidden).numpy()


def weights(model: Any) -> dict[str, np.ndarray]:
    """Every stored tensor by name, as a file has them; a tied head is not stored."""
    if hasattr(model.config, "num_experts_per_tok"):
        # The model has the experts of a layer in one tensor, a file has a tensor for each.
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            return load_file(Path(folder) / "model.safetensors")
    tied = getattr(model.config, "tie_word_embeddings", False)
    return {
        name: tensor.detach().numpy()
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }


def tokens_for(config: dict[str, Any], seed: int) -> np.ndarray:
    """Two rows of 14 random tokens, int32."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, config["vocab_size"], (2, 14)).astype(np.int32)


def main() -> None:
    """Writes every case, or those that arguments name."""
    for seed, (name, config) in enumerate(CASES.items()):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        model, tokens = build(config, seed), tokens_for(config, seed)
        stored = {f"weights/{key}": value for key, value in weights(model).items()}
        path = Path(__file__).parent / f"{name}.npz"
        np.savez_compressed(
            path,
            config=np.array(json.dumps(config)),
            tokens=tokens,
            logits=logits(model, tokens),
            **stored,
        )
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
