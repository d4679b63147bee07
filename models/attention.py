"""The attention layer: projections, q/k norm and rope; the caller supplies the attention itself.

Shape letters: B batch, T tokens, D hidden, N query heads, K KV heads, H head dim.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrl_llm.kernels.decode_attention.heads import HeadNorms, StepHeads, heads_fit
from jaxrl_llm.kernels.gated_delta import Inputs
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers import (
    Form,
    Layer,
    RMSNorm,
    apply_rope,
    gathering,
    parameter,
    projection_of,
)


class Attend(Protocol):
    """The attention that a model's caller supplies: full in training, cached in generation.

    q and k come after q/k norm and rope. The callee applies the scale H**-0.5. `layer_cache` is any
    pytree, or None without a cache. `window` counts positions, including the query's own. `sinks`
    and `softcap` are given by a layer that has them: see `flash_attention.attention`.
    """

    def __call__(
        self,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array,
        layer_cache: Any,
        /,
        *,
        window: int | None,
        sinks: jax.Array | None = None,
        softcap: float | None = None,
    ) -> tuple[jax.Array, Any]:
        """The attention output [B, T, N, H] and the layer's new cache."""
        ...


class Recur(Protocol):
    """The gated delta rule that the caller of a hybrid model supplies; see `Attend`.

    The callee knows which tokens of a row follow which, or the state that they follow.
    """

    def __call__(self, inputs: Inputs, layer_cache: Any, /) -> tuple[jax.Array, Any]:
        """The outputs, float32 [B, T, N, V], and the layer's new cache."""
        ...


class AttendHeads(Protocol):
    """`Attend` in a decode step, of heads before norms and rope."""

    def __call__(
        self,
        heads: StepHeads,
        layer_cache: Any,
        /,
        *,
        window: int | None,
        sinks: jax.Array | None = None,
        softcap: float | None = None,
    ) -> tuple[jax.Array, Any]:
        """See `Attend`."""
        ...


@dataclass(frozen=True)
class Mixers:
    """An `Attend`, and the functions that layers of a gated delta rule need.

    `attend_heads` takes the heads for which `heads_fit`; None: it takes none.
    """

    attend: Attend
    recur: Recur
    attend_heads: AttendHeads | None = None

    def __call__(self, *arguments: Any, **more: Any) -> tuple[jax.Array, Any]:
        """See `Attend`."""
        return self.attend(*arguments, **more)


class Kept(NamedTuple):
    """The cache of a layer, and what it is to hold in place of the keys and values of a prefill."""

    cache: Any
    keys: jax.Array
    values: jax.Array


class Attention(Layer):
    """Grouped-query self-attention of one layer; `kind` is its entry of `config.layer_kinds`.

    In merged form, the three input projections are one kernel [D, N + 2K, H]; see
    `base.merge_projections`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        kind: tuple[int | None, int | None],
        form: Form,
        dtype: DTypeLike,
    ) -> None:
        D, H = config.hidden_size, config.head_dim
        N, K = config.num_heads, config.num_kv_heads
        self.heads, self.head_dim, self.dtype = (N, K), H, jnp.dtype(dtype)
        self.window, self.rope_table = kind
        self.interleaved = config.interleaved_rope
        multiplier = config.attention_multiplier
        self.query_scale = 1.0 if multiplier is None else multiplier * math.sqrt(H)
        linear = projection_of(form)
        projection = partial(linear, bias=config.attention_bias, dtype=dtype)
        self.gated = config.attention_gate
        parts = 2 if self.gated else 1  # parts of the queries' projection: query and gate of a head
        if form.endswith("separate"):
            self.q = projection((D, N, parts * H), ("embed", "q_heads", "head_dim"))
            self.k = projection((D, K, H), ("embed", "kv_heads", "head_dim"))
            self.v = projection((D, K, H), ("embed", "kv_heads", "head_dim"))
        else:
            self.qkv = projection((D, parts * N + 2 * K, H), ("embed", "merged", "head_dim"))
        self.o = linear(
            (N, H, D),
            ("q_heads", "head_dim", "embed"),
            contract=2,
            bias=config.attention_out_bias,
            dtype=dtype,
        )
        sinks = config.attention_sinks
        self.sinks = parameter((N,), ("q_heads",), "normal", dtype) if sinks else None
        self.softcap = config.attention_softcap
        norm = partial(
            RMSNorm, eps=config.rms_norm_eps, dtype=dtype, unit_offset=config.unit_offset
        )
        if config.qk_norm_whole:
            self.q_norm = norm(N, H, axes=("q_heads", "head_dim"))
            self.k_norm = norm(K, H, axes=("kv_heads", "head_dim"))
        else:
            self.q_norm = norm(H, axes=("head_dim",)) if config.qk_norm else None
            self.k_norm = norm(H, axes=("head_dim",)) if config.qk_norm else None

    def __call__(
        self,
        x_BTD: jax.Array,
        rope: tuple[jax.Array, ...],
        layer_cache: Any,
        attend: Attend,
    ) -> tuple[jax.Array, Any]:
        more: dict[str, Any] = {} if self.sinks is None else {"sinks": self.sinks[...]}
        if self.softcap is not None:
            more["softcap"] = self.softcap
        if isinstance(attend, Mixers) and attend.attend_heads is not None:
            heads = self._step_heads(x_BTD, rope)
            if heads is not None:
                how: dict[str, Any] = {"window": self.window, **more}
                out_BTNH, new_cache = attend.attend_heads(heads, layer_cache, **how)
                return self.o(out_BTNH), new_cache
        q_BTNH, k_BTKH, v_BTKH, gate_BTNH = gathering(self._project)(x_BTD)
        q_BTNH, k_BTKH = self._turned(q_BTNH, k_BTKH, rope)
        out_BTNH, new_cache = attend(
            q_BTNH, k_BTKH, v_BTKH, layer_cache, window=self.window, **more
        )
        if gate_BTNH is not None:
            out_BTNH *= jax.nn.sigmoid(gate_BTNH)
        return self.o(out_BTNH), new_cache

    def _step_heads(self, x_BTD: jax.Array, rope: tuple[jax.Array, ...]) -> StepHeads | None:
        """The heads of a decode step before norms and rope, where one kernel computes both."""
        if self.rope_table is None or self.gated or self.interleaved or not hasattr(self, "qkv"):
            return None
        norms, norm = None, self.q_norm
        if norm is not None and self.k_norm is not None:
            if norm.scale[...].ndim > 1:
                return None
            weights = norm.scale[...], self.k_norm.scale[...]
            norms = HeadNorms(*weights, eps=norm.eps, unit_offset=norm.unit_offset)
        cos_BP, sin_BP = (x[:, 0, 0] for x in rope[2 * self.rope_table :][:2])
        B, pairs = cos_BP.shape
        shape = (B, self.heads[0] + 2 * self.heads[1], self.head_dim)
        if not heads_fit(shape, self.dtype, pairs, with_norms=norms is not None):
            return None
        heads_BAH = gathering(self.qkv)(x_BTD)[:, 0]
        return StepHeads(heads_BAH, cos_BP, sin_BP, norms, self.query_scale)

    def inputs(
        self, x_BTD: jax.Array, rope: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values, as `Attend` takes them."""
        q_BTNH, k_BTKH, v_BTKH, gate_BTNH = gathering(self._project)(x_BTD)
        assert gate_BTNH is None, "strict passes of a gated layer are refused"
        return *self._turned(q_BTNH, k_BTKH, rope), v_BTKH

    def _turned(
        self, q_BTNH: jax.Array, k_BTKH: jax.Array, rope: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array]:
        """Queries and keys after their norms, rope and scale."""
        if self.q_norm is not None and self.k_norm is not None:
            q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
        if self.rope_table is not None:
            cos, sin = rope[2 * self.rope_table : 2 * self.rope_table + 2]
            turned = partial(apply_rope, cos=cos, sin=sin, interleaved=self.interleaved)
            q_BTNH, k_BTKH = turned(q_BTNH), turned(k_BTKH)
        if self.query_scale != 1.0:  # the callee of `Attend` scales too
            q_BTNH = (q_BTNH * jnp.float32(self.query_scale)).astype(q_BTNH.dtype)
        return q_BTNH, k_BTKH

    def _project(
        self, x_BTD: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Queries, keys and values, and the gate of a layer that has one."""
        if hasattr(self, "qkv"):
            N, K = self.heads
            queries = 2 * N if self.gated else N
            q_BTNH, k_BTKH, v_BTKH = jnp.split(self.qkv(x_BTD), (queries, queries + K), axis=-2)
        else:
            q_BTNH, k_BTKH, v_BTKH = self.q(x_BTD), self.k(x_BTD), self.v(x_BTD)
        if not self.gated:
            return q_BTNH, k_BTKH, v_BTKH, None
        both_BTNH = q_BTNH.reshape(*q_BTNH.shape[:-2], self.heads[0], -1)
        q_BTNH, gate_BTNH = jnp.split(both_BTNH, 2, axis=-1)
        return q_BTNH, k_BTKH, v_BTKH, gate_BTNH
