"""The decoder that the families share: embedding, pre-norm blocks, final norm.

Shape letters: B batch, T tokens, D hidden.
"""

from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

from jaxrl_llm.models.attention import Attend, Attention
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers import MLP, Embedding, RMSNorm, rope_tables


class Block(nnx.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, config: ModelConfig, *, window: int | None, merged: bool, dtype: DTypeLike
    ) -> None:
        D, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(D, eps=eps, dtype=dtype)
        self.attention = Attention(config, window=window, merged=merged, dtype=dtype)
        self.mlp_norm = RMSNorm(D, eps=eps, dtype=dtype)
        self.mlp = MLP(config, merged=merged, dtype=dtype)

    def __call__(
        self,
        x_BTD: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        layer_cache: Any,
        attend: Attend,
    ) -> tuple[jax.Array, Any]:
        mixed_BTD, new_cache = self.attention(self.attention_norm(x_BTD), rope, layer_cache, attend)
        x_BTD = x_BTD + mixed_BTD
        return x_BTD + self.mlp(self.mlp_norm(x_BTD)), new_cache


class Decoder(nnx.Module):
    """Tokens to hidden states.

    Layers are a dict keyed "0", "1", ... and so every path in the parameter tree is made of
    strings; each layer has its own leaves, which is what decoding wants.
    """

    def __init__(self, config: ModelConfig, *, merged: bool, dtype: DTypeLike) -> None:
        self.config = config
        self.embed = Embedding(config, dtype=dtype)
        self.layers = nnx.Dict(
            {
                str(i): Block(config, window=window, merged=merged, dtype=dtype)
                for i, window in enumerate(config.sliding_window)
            }
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)

    def __call__(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        *,
        attend: Attend,
        cache: tuple[Any, ...] | None = None,
        remat: bool = False,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Hidden states after the final norm [B, T, D], and one new cache a layer.

        `remat` recomputes each block in the backward pass instead of storing its activations.
        """
        rope = rope_tables(self.config, positions_BT)
        x_BTD = self.embed(tokens_BT)
        new_cache = []
        for i in range(self.config.num_layers):
            layer_cache = None if cache is None else cache[i]
            run = _checkpointed if remat else _plain
            x_BTD, new_layer_cache = run(self.layers[str(i)], x_BTD, rope, layer_cache, attend)
            new_cache.append(new_layer_cache)
        return self.norm(x_BTD), tuple(new_cache)


def _plain(
    block: Block, x_BTD: jax.Array, rope: Any, layer_cache: Any, attend: Attend
) -> tuple[jax.Array, Any]:
    return block(x_BTD, rope, layer_cache, attend)


def _checkpointed(
    block: Block, x_BTD: jax.Array, rope: Any, layer_cache: Any, attend: Attend
) -> tuple[jax.Array, Any]:
    # The parameters go in as an argument: the module itself must not cross the transformation.
    graphdef, state = nnx.split(block)

    @jax.checkpoint
    def run(state: Any, x_BTD: jax.Array, rope: Any, layer_cache: Any) -> tuple[jax.Array, Any]:
        return nnx.merge(graphdef, state)(x_BTD, rope, layer_cache, attend)

    return run(state, x_BTD, rope, layer_cache)
