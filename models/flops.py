"""FLOPs of a model's useful work, without padding, recomputation and copies.

Nothing here imports jax. `lengths` holds the tokens of each sequence (prompt and response), without
padding.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.models.config import Kind, ModelConfig, QwenVision
from jaxrl_llm.models.shapes import active_parameters


def matmul_parameters(config: ModelConfig, kind: Kind = "causal_lm") -> int:
    """Parameters that multiply each token: all except an embedding that is not the head too.

    A scalar model has no vocabulary head; its head is one row. Of a mixture, these are the router
    and the experts of one token.
    """
    table = config.vocab_size * config.hidden_size
    tables = 1 if config.tie_word_embeddings else 2
    layers = active_parameters(config) - tables * table
    return layers + (table if kind == "causal_lm" else config.hidden_size)


def image_flops(config: ModelConfig, patches: int) -> float:
    """FLOPs of the encoder and the projector on an image of so many patches; 0 without them."""
    if (vision := config.vision) is None:
        return 0.0
    W, cells = vision.hidden_size, vision.scale**2
    gated = isinstance(vision, QwenVision) and vision.model_type == "qwen2_5_vl"
    layer = 4 * W * W + (3 if gated else 2) * W * vision.intermediate_size
    joined = cells * W
    projector = joined * config.hidden_size
    if isinstance(vision, QwenVision):
        projector = (projector + joined**2) * (1 + len(vision.deep_layers))
    matmuls = patches * vision.num_layers * layer + patches // cells * projector
    return 2.0 * matmuls + 4.0 * vision.num_layers * W * patches**2


def kv_bytes_per_token(config: ModelConfig, itemsize: float = 2) -> float:
    """Bytes that one token holds in the cache, over all layers of attention."""
    heads, size = config.cache_heads
    return 2 * config.num_attention_layers * heads * size * itemsize


def state_bytes_per_slot(config: ModelConfig, itemsize: float = 2) -> float:
    """Bytes of the states of one sample in generation: of all layers of a gated delta rule."""
    if (delta := config.delta) is None:
        return 0.0
    keys, values = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
    window = (2 * keys + values) * (delta.conv_size - 1) * itemsize
    rules = config.num_layers - config.num_attention_layers
    return rules * (4.0 * values * delta.key_dim + window)


def attended_dim(config: ModelConfig) -> float:
    """The mean of the sizes of a key and of a value, of one head."""
    value = config.head_dim if config.latent is None else config.latent.value_dim
    return (config.head_dim + value) / 2


def attention_flops(
    num_heads: int,
    head_dim: float,
    lengths: Sequence[int],
    *,
    window: int | None = None,
    backward: bool = False,
) -> float:
    """FLOPs of one layer's causal attention: 4 * S^2 * heads * head_dim / 2 a row.

    With a window of W < S tokens, (S - W)^2 of the S^2 pairs are hidden. A backward pass counts as
    2.5 forward passes, as in the FlashAttention papers.
    """
    S = np.asarray(lengths, np.float64)
    hidden = 0.0 if window is None else np.maximum(S - window, 0.0)
    squares = float(np.sum(np.square(S) - np.square(hidden)))
    forward = 2.0 * num_heads * head_dim * squares
    return forward * (3.5 if backward else 1.0)


def training_flops(
    config: ModelConfig, lengths: Sequence[int], kind: Kind = "causal_lm", *, adapters: bool = False
) -> float:
    """FLOPs of one update: 6 * N * tokens + 6 * L * S^2 * heads * head_dim a row, causal.

    Pairs that the window of a layer hides do not count; see `attention_flops`. With `adapters` the
    weights are frozen, and have no gradient: 4 * N * tokens.
    """
    gradient = 2.0 * matmul_parameters(config, kind) * sum(lengths) if adapters else 0.0
    return 3.0 * forward_flops(config, lengths, kind) - gradient


def forward_flops(config: ModelConfig, lengths: Sequence[int], kind: Kind = "causal_lm") -> float:
    """FLOPs of a forward pass, a third of `training_flops`."""
    dense = 2.0 * matmul_parameters(config, kind) * sum(lengths)
    windows = Counter(w for i, w in enumerate(config.sliding_window) if not config.is_linear(i))
    heads, size = config.num_heads, attended_dim(config)
    layers = [n * attention_flops(heads, size, lengths, window=w) for w, n in windows.items()]
    return dense + sum(layers) + _rule_flops(config) * sum(lengths)


def _rule_flops(config: ModelConfig) -> float:
    """FLOPs of a token in the states of all layers of a gated delta rule: read, write, read."""
    if (delta := config.delta) is None:
        return 0.0
    rules = config.num_layers - config.num_attention_layers
    return 6.0 * rules * delta.value_heads * delta.value_dim * delta.key_dim
