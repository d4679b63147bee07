"""Published model shapes by name, for benchmarks and planning; sizes only, no weights.

Sources: the config.json of Qwen/Qwen2.5-0.5B to -32B, Qwen/Qwen3-4B, Qwen/Qwen3-30B-A3B,
openai/gpt-oss-20b, deepseek-ai/DeepSeek-V3, meta-llama/Llama-3.2-1B, Llama-3.1-8B and -70B.
`tiny` is not a published model; with it a benchmark takes seconds on a CPU.
"""

from functools import cache, partial
from typing import Any

from jaxrl_llm.models.config import Latent, Mixture, ModelConfig
from jaxrl_llm.models.rope import Llama3Rope, YarnRope


def _shape(
    family: str,
    vocab: int,
    hidden: int,
    mlp: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    **features: Any,
) -> ModelConfig:
    return ModelConfig(
        family=family,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        **features,
    )


_qwen = partial(
    _shape,
    "qwen2",
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    attention_bias=True,
    max_position_embeddings=32768,
)

_llama3_rope = partial(
    Llama3Rope,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
_llama = partial(
    _shape,
    "llama",
    rope_theta=5e5,
    rope_scaling=_llama3_rope(factor=8.0),
    rms_norm_eps=1e-5,
    max_position_embeddings=131072,
)

SHAPES: dict[str, ModelConfig] = {
    # vocabulary, hidden, MLP, layers, heads, KV heads, head dim
    "tiny": _qwen(512, 64, 96, 1, 4, 2, 16, tie_word_embeddings=True),
    "qwen2.5-0.5b": _qwen(151936, 896, 4864, 24, 14, 2, 64, tie_word_embeddings=True),
    "qwen2.5-1.5b": _qwen(151936, 1536, 8960, 28, 12, 2, 128, tie_word_embeddings=True),
    "qwen2.5-7b": _qwen(152064, 3584, 18944, 28, 28, 4, 128),
    "qwen2.5-14b": _qwen(152064, 5120, 13824, 48, 40, 8, 128),
    "qwen2.5-32b": _qwen(152064, 5120, 27648, 64, 40, 8, 128),
    "llama-3.2-1b": _llama(
        128256,
        2048,
        8192,
        16,
        32,
        8,
        64,
        tie_word_embeddings=True,
        rope_scaling=_llama3_rope(factor=32.0),
    ),
    "llama-3.1-8b": _llama(128256, 4096, 14336, 32, 32, 8, 128),
    "llama-3.1-70b": _llama(128256, 8192, 28672, 80, 64, 8, 128),
    "qwen3-4b": _shape(
        "qwen3",
        151936,
        2560,
        9728,
        36,
        32,
        8,
        128,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        qk_norm=True,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    ),
    "qwen3-30b-a3b": _shape(
        "qwen3_moe",
        151936,
        2048,
        6144,
        48,
        32,
        4,
        128,
        rope_theta=1e6,
        qk_norm=True,
        max_position_embeddings=40960,
        mixture=Mixture(num_experts=128, experts_per_token=8, expert_size=768, normalized=True),
    ),
    "gpt-oss-20b": _shape(
        "gpt_oss",
        201088,
        2880,
        2880,
        24,
        64,
        8,
        64,
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
        mixture=Mixture(num_experts=32, experts_per_token=4, expert_size=2880, normalized=True),
    ),
    "deepseek-v3": _shape(
        "deepseek_v3",
        129280,
        7168,
        18432,
        61,
        128,
        128,
        192,
        rope_scaling=YarnRope(
            factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0
        ),
        interleaved_rope=True,
        max_position_embeddings=163840,
        latent=Latent(kv_rank=512, query_rank=1536, rope_dim=64, value_dim=128),
        mixture=Mixture(
            num_experts=256,
            experts_per_token=8,
            expert_size=2048,
            normalized=True,
            scores="sigmoid",
            num_groups=8,
            groups_per_token=4,
            scaling=2.5,
            shared_size=2048,
            dense_layers=3,
        ),
    ),
}


@cache
def num_parameters(config: ModelConfig) -> int:
    """Number of parameters of the language model; a tied table counts once."""
    D, H, N, K = config.hidden_size, config.head_dim, config.num_heads, config.num_kv_heads
    experts = 0 if config.mixture is None else config.mixture.num_experts
    attentions = config.num_attention_layers
    rules = config.num_layers - attentions
    matmuls = sum(shared_matmuls(config, i) for i in range(config.num_layers))
    matmuls += config.num_expert_layers * experts * expert_matmuls(config)
    of_experts = config.num_expert_layers * experts * expert_biases(config)
    if config.expert_bias:
        of_experts += config.num_expert_layers * experts  # routers
    biases = (N + 2 * K) * H if config.attention_bias else 0
    biases += D if config.attention_out_bias else 0
    biases += N if config.attention_sinks else 0
    of_heads, norms = 0, (4 if config.norms == "both" else 2) * D
    if config.qk_norm:
        of_heads += (N + K) * H if config.qk_norm_whole else 2 * H
    if (latent := config.latent) is not None:
        of_heads += latent.kv_rank + (latent.query_rank or 0)
    tables = config.vocab_size * D * (1 if config.tie_word_embeddings else 2)
    balance = 0
    if config.mixture is not None and config.mixture.scores == "sigmoid":
        balance = config.num_expert_layers * experts
    of_layers = attentions * (biases + of_heads) + config.num_layers * norms
    of_layers += rules * _rule_vectors(config)
    return matmuls + of_layers + of_experts + balance + tables + D


def _rule_vectors(config: ModelConfig) -> int:
    """Parameters of a layer of a gated delta rule that are in no matmul."""
    if (delta := config.delta) is None:
        return 0
    streams = 2 * delta.key_heads * delta.key_dim + delta.value_heads * delta.value_dim
    return streams * delta.conv_size + 2 * delta.value_heads + delta.value_dim


def attention_matmuls(config: ModelConfig, layer: int) -> int:
    """Parameters of the projections of a layer's attention, or of its gated delta rule."""
    D, N, H = config.hidden_size, config.num_heads, config.head_dim
    if (delta := config.delta) is not None and config.is_linear(layer):
        values = delta.value_heads * delta.value_dim
        keys = delta.key_heads * delta.key_dim
        return D * (2 * keys + 3 * values + 2 * delta.value_heads)
    if (latent := config.latent) is None:
        queries = 2 * N if config.attention_gate else N
        return D * (queries + 2 * config.num_kv_heads) * H + N * H * D
    R, P, V, S = latent.kv_rank, latent.rope_dim, latent.value_dim, latent.query_rank
    queries = D * N * H if S is None else D * S + S * N * H
    return queries + D * (R + P) + R * N * (H - P + V) + N * V * D


def shared_matmuls(config: ModelConfig, layer: int) -> int:
    """Parameters of the matmuls of one layer, without the experts that tokens choose."""
    D = config.hidden_size
    if (mixture := config.mixture_of(layer)) is None:
        return attention_matmuls(config, layer) + 3 * D * config.intermediate_size
    shared = 3 * D * mixture.shared_size + (D if mixture.shared_gate else 0)
    return attention_matmuls(config, layer) + D * mixture.num_experts + shared


def wide_matmuls(config: ModelConfig, layer: int) -> int:
    """Parameters of `shared_matmuls` that generation in float8 has in the model's dtype."""
    rule = config.delta is not None and config.is_linear(layer)
    mixer = attention_matmuls(config, layer) if rule or config.latent is not None else 0
    if (mixture := config.mixture_of(layer)) is None:
        return mixer
    return mixer + config.hidden_size * (mixture.num_experts + mixture.shared_gate)


def expert_matmuls(config: ModelConfig) -> int:
    """Parameters of the matmuls of one expert that tokens choose."""
    return 0 if config.mixture is None else 3 * config.hidden_size * config.mixture.expert_size


def copied_elements(config: ModelConfig) -> int:
    """Numbers of a token's copies, one for each of its experts."""
    mixture = config.mixture
    return 0 if mixture is None else mixture.experts_per_token * config.hidden_size


def experts_hit(mixture: Mixture, tokens: float) -> float:
    """Experts of a layer that so many tokens are expected to choose, with even and random loads.

    `tokens` may be an array of counts.
    """
    missed = (1.0 - mixture.experts_per_token / mixture.num_experts) ** tokens
    return mixture.num_experts * (1.0 - missed)


def expert_biases(config: ModelConfig) -> int:
    """Parameters of the biases of one expert."""
    if config.mixture is None or not config.expert_bias:
        return 0
    return 2 * config.mixture.expert_size + config.hidden_size


def active_parameters(config: ModelConfig) -> int:
    """Parameters of the language model that one token is computed with; all of a dense model."""
    mixture = config.mixture
    if mixture is None:
        return num_parameters(config)
    idle = mixture.num_experts - mixture.experts_per_token
    each = expert_matmuls(config) + expert_biases(config)
    return num_parameters(config) - config.num_expert_layers * idle * each
