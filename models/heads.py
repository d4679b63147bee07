"""A decoder with a head: the language model, and the scalar model of critics and reward models.

Shape letters: B batch, T tokens, D hidden, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrl_llm.kernels.linear_logprob import head_logits
from jaxrl_llm.kernels.partial_softmax import soft_cap
from jaxrl_llm.models.attention import Attend
from jaxrl_llm.models.config import ModelConfig, QwenVision
from jaxrl_llm.models.decoder import Decoder, Remat, RunLayers
from jaxrl_llm.models.experts import Routed, Routing
from jaxrl_llm.models.layers import Embedding, Form, Layer, Projection
from jaxrl_llm.models.media import Media, features_of
from jaxrl_llm.models.qwen_vision import QwenEncoder
from jaxrl_llm.models.vision import ImageEncoder


class _WithDecoder(Layer):
    """Calling a model runs its decoder. The caller applies the head to the tokens that need it."""

    decoder: Decoder
    vision: Any = None  # the image encoder, where the config has one

    def _see(self, config: ModelConfig, dtype: DTypeLike) -> None:
        """Add the image encoder of the config."""
        if isinstance(config.vision, QwenVision):
            self.vision = QwenEncoder(config, config.vision, dtype=dtype)
        elif config.vision is not None:
            self.vision = ImageEncoder(config, config.vision, dtype=dtype)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of computation; the head may be float32."""
        return self.decoder.norm.scale[...].dtype

    def __call__(self, *arguments: Any, **options: Any) -> tuple[jax.Array, tuple[Any, ...]]:
        """Hidden states [B, T, D] and the new cache; the arguments are `routed`'s."""
        hidden_BTD, new_cache, _ = self.routed(*arguments, **options)
        return hidden_BTD, new_cache

    def routed(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        *,
        attend: Attend,
        cache: tuple[Any, ...] | None = None,
        remat: Remat = "none",
        scan: bool = False,
        residual_dtype: DTypeLike | None = None,
        run_layers: RunLayers | None = None,
        routing: Routing | None = None,
        media: Media | None = None,
    ) -> tuple[jax.Array, tuple[Any, ...], Routed | None]:
        """Hidden states, the new cache, and routers' statistics; see `Decoder.__call__`."""
        features = None if media is None else features_of(self.vision, media)
        hidden_BTD, cache, routed = self.decoder(
            tokens_BT,
            positions_BT,
            attend=attend,
            cache=cache,
            remat=remat,
            scan=scan,
            residual_dtype=residual_dtype,
            run_layers=run_layers,
            routing=routing,
            features=features,
        )
        return self._for_head(hidden_BTD), cache, routed

    def _for_head(self, hidden_BTD: jax.Array) -> jax.Array:
        return hidden_BTD


class CausalLM(_WithDecoder):
    """A language model. `head` is None when it is tied to the embedding."""

    def __init__(self, config: ModelConfig, *, form: Form, dtype: DTypeLike) -> None:
        self.decoder = Decoder(config, form=form, dtype=dtype)
        self.head = None if config.tie_word_embeddings else Embedding(config, dtype=dtype)
        self._see(config, dtype)

    def _for_head(self, hidden_BTD: jax.Array) -> jax.Array:
        """Hidden states whose product with the table gives the logits as the family scales them."""
        scaling = self.decoder.config.logits_scaling
        return hidden_BTD if scaling == 1.0 else hidden_BTD * (1 / scaling)

    def unembedding(self) -> jax.Array:
        """The weights of the head [V, D]; the embedding table when they are tied."""
        return self.decoder.embed.table[...] if self.head is None else self.head.weights()

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 logits [..., V] of hidden states [..., D], with the family's soft cap."""
        logits = head_logits(hidden, self.unembedding())
        return soft_cap(logits, self.decoder.config.logits_softcap)


class ScalarModel(_WithDecoder):
    """A decoder with one output a token: a critic's value or a reward model's score."""

    def __init__(self, config: ModelConfig, *, form: Form, dtype: DTypeLike) -> None:
        self.decoder = Decoder(config, form=form, dtype=dtype)
        # Zeros, so that a new critic predicts 0 everywhere instead of noise.
        shape = (config.hidden_size, 1)
        self.score = Projection(shape, ("embed", "value"), init="zeros", dtype=dtype)
        self._see(config, dtype)

    def scores(self, hidden_BTD: jax.Array) -> jax.Array:
        """float32 score of every token [B, T]."""
        kernel = self.score.kernel[...]
        scores = jnp.einsum("...D,DS->...S", hidden_BTD, kernel, preferred_element_type=jnp.float32)
        return scores[..., 0]
