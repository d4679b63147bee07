"""Published model shapes by name, for benchmarks and planning; sizes only, no weights.

Sources: the config.json of Qwen/Qwen2.5-0.5B to -32B, Qwen/Qwen3-30B-A3B, openai/gpt-oss-20b
and meta-llama/Llama-3.1-8B.
`tiny` is not a published model; with it a benchmark takes seconds on a CPU.
"""

from functools import partial

from jaxrl_llm.models.config import Mixture, ModelConfig
from jaxrl_llm.models.rope import Llama3Rope, YarnRope

_qwen = partial(
    ModelConfig,
    family="qwen2",
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    attention_bias=True,
    max_position_embeddings=32768,
)

SHAPES: dict[str, ModelConfig] = {
    "tiny": _qwen(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
    ),
    "qwen2.5-0.5b": _qwen(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
    ),
    "qwen2.5-1.5b": _qwen(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_layers=28,
        num_heads=12,
        num_kv_heads=2,
        head_dim=128,
        tie_word_embeddings=True,
    ),
    "qwen2.5-7b": _qwen(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
    ),
    "qwen2.5-14b": _qwen(
        vocab_size=152064,
        hidden_size=5120,
        intermediate_size=13824,
        num_layers=48,
        num_heads=40,
        num_kv_heads=8,
        head_dim=128,
    ),
    "qwen2.5-32b": _qwen(
        vocab_size=152064,
        hidden_size=5120,
        intermediate_size=27648,
        num_layers=64,
        num_heads=40,
        num_kv_heads=8,
        head_dim=128,
    ),
    "llama-3.1-8b": ModelConfig(
        family="llama",
        rope_theta=5e5,
        rope_scaling=Llama3Rope(
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
        rms_norm_eps=1e-5,
        max_position_embeddings=131072,
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
    ),
    "qwen3-30b-a3b": ModelConfig(
        family="qwen3_moe",
        rope_theta=1e6,
        qk_norm=True,
        max_position_embeddings=40960,
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        mixture=Mixture(num_experts=128, experts_per_token=8, expert_size=768, normalized=True),
    ),
    "gpt-oss-20b": ModelConfig(
        family="gpt_oss",
        rope_theta=150000.0,
        rope_scaling=YarnRope(factor=32.0, original_max_position_embeddings=4096, truncate=False),
        rms_norm_eps=1e-5,
        attention_bias=True,
        attention_out_bias=True,
        attention_sinks=True,
        expert_bias=True,
        swiglu_limit=7.0,
        sliding_window=(128, None) * 12,
        max_position_embeddings=131072,
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_layers=24,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        mixture=Mixture(num_experts=32, experts_per_token=4, expert_size=2880, normalized=True),
    ),
}


def num_parameters(config: ModelConfig) -> int:
    """Number of parameters of the language model; a tied table counts once."""
    D, F, H = config.hidden_size, config.intermediate_size, config.head_dim
    N, K = config.num_heads, config.num_kv_heads
    mlp = 3 * D * F
    if (mixture := config.mixture) is not None:
        mlp = mixture.num_experts * (3 * D * mixture.expert_size + D)  # with the router
        if config.expert_bias:
            mlp += mixture.num_experts * (2 * mixture.expert_size + D + 1)
    projections = D * (N + 2 * K) * H + N * H * D + mlp
    biases = (N + 2 * K) * H if config.attention_bias else 0
    biases += D if config.attention_out_bias else 0
    biases += N if config.attention_sinks else 0
    norms = (4 if config.norms == "both" else 2) * D
    if config.qk_norm:
        norms += (N + K) * H if config.qk_norm_whole else 2 * H
    tables = config.vocab_size * D * (1 if config.tie_word_embeddings else 2)
    return config.num_layers * (projections + biases + norms) + tables + D


def active_parameters(config: ModelConfig) -> int:
    """Parameters of the language model that one token is computed with; all of a dense model."""
    mixture = config.mixture
    if mixture is None:
        return num_parameters(config)
    idle = mixture.num_experts - mixture.experts_per_token
    each = 3 * config.hidden_size * mixture.expert_size
    if config.expert_bias:
        each += 2 * mixture.expert_size + config.hidden_size
    return num_parameters(config) - config.num_layers * idle * each
