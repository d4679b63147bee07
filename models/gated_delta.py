"""The layer of a gated delta rule, which hybrid families have in place of most attention.

The caller of a model says, by `Recur`, which tokens follow which, as it supplies attention.

Shape letters: B batch, T tokens, D hidden, G key heads, N value heads, H dims of a key, V of a
value, W tokens of the convolution.
"""

import itertools
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrl_llm.kernels.gated_delta import Inputs, Streams
from jaxrl_llm.models.attention import Attend, Mixers
from jaxrl_llm.models.config import GatedDelta, ModelConfig
from jaxrl_llm.models.layers import (
    Form,
    Layer,
    Projection,
    gathering,
    parameter,
    projection_of,
    without_float8,
)
from jaxrl_llm.numerics import rms_norm

# The projections of the inputs, in the order in which they are merged.
PROJECTIONS = ("q", "k", "v", "gate", "rate", "decay")
# Parameters that are stored and computed in float32, whatever the dtype: they go through exp.
DECAY = ("log_speed", "decay_bias")


class GatedDeltaNet(Layer):
    """A short convolution, the gated delta rule, and a gated norm of its output.

    Heads are split like attention's: an axis of the mesh divides both kinds. In merged form,
    all input projections are one kernel; see `base.merge_projections`. There is no float8 form.
    """

    def __init__(
        self, config: ModelConfig, delta: GatedDelta, *, form: Form, dtype: DTypeLike
    ) -> None:
        D, G, N = config.hidden_size, delta.key_heads, delta.value_heads
        H, V, W = delta.key_dim, delta.value_dim, delta.conv_size
        self.eps = config.rms_norm_eps
        form = without_float8(form)
        heads = ("q_heads", "head_dim")
        projection = partial(projection_of(form), dtype=dtype)
        small = partial(Projection, dtype=dtype)  # never in float8: they go through exp
        self.parts = ((G, H), (G, H), (N, V), (N, V), (N,), (N,))  # q to decay
        if form.endswith("separate"):
            self.q = projection((D, G, H), ("embed", *heads))
            self.k = projection((D, G, H), ("embed", *heads))
            self.v = projection((D, N, V), ("embed", *heads))
            self.gate = projection((D, N, V), ("embed", *heads))
            self.rate = small((D, N), ("embed", "q_heads"))
            self.decay = small((D, N), ("embed", "q_heads"))
        else:
            self.merged = small((D, sum(map(math.prod, self.parts))), ("embed", "merged"))
        shapes = {"q_conv": (G, H, W), "k_conv": (G, H, W), "v_conv": (N, V, W)}
        for name, shape in shapes.items():
            setattr(self, name, parameter(shape, (*heads, "norm"), "normal", dtype))
        self.log_speed = parameter((N,), ("q_heads",), "log_uniform", jnp.float32)
        self.decay_bias = parameter((N,), ("q_heads",), "ones", jnp.float32)
        self.norm = parameter((V,), ("head_dim",), "ones", dtype)
        self.o = projection((N, V, D), ("q_heads", "head_dim", "embed"), contract=2)

    def __call__(
        self,
        x_BTD: jax.Array,
        rope: tuple[jax.Array, ...],
        layer_cache: Any,
        attend: Attend,
    ) -> tuple[jax.Array, Any]:
        assert isinstance(attend, Mixers), "the caller of a hybrid model supplies both"
        *streams, gate_BTNV, rate_BTN, decay_BTN = gathering(self._project)(x_BTD)
        kernels = Streams(*(getattr(self, f"{name}_conv")[...] for name in Streams._fields))
        speed_N, bias_N = jnp.exp(self.log_speed[...]), self.decay_bias[...]
        inputs = Inputs(
            streams=Streams(*streams),
            kernels=kernels,
            log_decay_BTN=-speed_N * jax.nn.softplus(decay_BTN.astype(jnp.float32) + bias_N),
            rate_BTN=jax.nn.sigmoid(rate_BTN.astype(jnp.float32)),
        )
        out_BTNV, new_cache = attend.recur(inputs, layer_cache)
        normed_BTNV = rms_norm(out_BTNV, self.norm[...], self.eps)
        gated_BTNV = normed_BTNV * jax.nn.silu(gate_BTNV.astype(jnp.float32))
        return self.o(gated_BTNV.astype(gate_BTNV.dtype)), new_cache

    def _project(self, x_BTD: jax.Array) -> tuple[jax.Array, ...]:
        """Queries, keys, values and gates of heads, rates and decays."""
        if not hasattr(self, "merged"):
            return tuple(getattr(self, name)(x_BTD) for name in PROJECTIONS)
        ends = list(itertools.accumulate(map(math.prod, self.parts)))
        parts = jnp.split(self.merged(x_BTD), ends[:-1], axis=-1)
        batch = x_BTD.shape[:-1]
        return tuple(x.reshape(*batch, *shape) for x, shape in zip(parts, self.parts, strict=True))
