"""Multi-head latent attention, of DeepSeek-V2 and V3 (arXiv:2405.04434).

Keys and values of all heads are made of one small vector of each token, and of one key with rope.
Training makes them and attends as usual, with zeros behind values, and behind queries and keys of a
size that our kernels do not take. Generation keeps the small vector and the key with rope. A decode
step attends to these, as to one KV head. What would make keys of them multiplies the queries, and
what would make values multiplies the output.

Shape letters: B batch, T tokens, D hidden, N heads, H dims of a query and key, C their dims without
rope, P dims with rope, V dims of a value, R size of the small vector, S size of the queries' one,
X another size.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrl_llm.models.attention import Attend, Kept
from jaxrl_llm.models.config import Latent, ModelConfig
from jaxrl_llm.models.layers import (
    Form,
    FrozenProjection,
    Layer,
    RMSNorm,
    apply_rope,
    gathering,
    projection_of,
    without_float8,
)
from jaxrl_llm.models.rope import YarnRope

_EPS = 1e-6  # epsilon of the two norms, whatever the config's is


class LatentAttention(Layer):
    """Latent attention of one layer; `kind` is its entry of `config.layer_kinds`.

    There is no float8 form: a decode step multiplies the weights of keys and values otherwise.
    """

    def __init__(
        self,
        config: ModelConfig,
        latent: Latent,
        *,
        kind: tuple[int | None, int | None],
        form: Form,
        dtype: DTypeLike,
    ) -> None:
        D, N, H = config.hidden_size, config.num_heads, config.head_dim
        R, P, V = latent.kv_rank, latent.rope_dim, latent.value_dim
        self.sizes = (H, H - P, R, V)
        self.attended_size = config.attended_size
        self.window, rope_table = kind
        assert self.window is None and rope_table == 0, kind
        self.rotated = partial(apply_rope, interleaved=config.interleaved_rope)
        scaling = config.rope_scaling
        self.scale = scaling.whole_head_scale**2 if isinstance(scaling, YarnRope) else 1.0
        projection = partial(projection_of(without_float8(form)), dtype=dtype)
        norm = partial(RMSNorm, axes=("rank",), eps=_EPS, dtype=dtype)
        if latent.query_rank is None:
            self.q = projection((D, N, H), ("embed", "q_heads", "head_dim"))
        else:
            S = latent.query_rank
            self.q_a = projection((D, S), ("embed", "rank"))
            self.q_norm = norm(S)
            self.q_b = projection((S, N, H), ("embed", "q_heads", "head_dim"))
        self.kv_a = projection((D, R + P), ("embed", "rank"))
        self.kv_norm = norm(R)
        self.kv_b = projection((R, N, H - P + V), ("embed", "q_heads", "head_dim"))
        self.o = projection((N, V, D), ("q_heads", "head_dim", "embed"), contract=2)

    def __call__(
        self,
        x_BTD: jax.Array,
        rope: tuple[jax.Array, ...],
        layer_cache: Any,
        attend: Attend,
    ) -> tuple[jax.Array, Any]:
        H, C, R, V = self.sizes
        q_BTNH, small_BTR, k_BT1P = gathering(self._project)(x_BTD)
        turned = partial(self.rotated, cos=rope[0], sin=rope[1])
        own_BTNC, turned_BTNP = q_BTNH[..., :C], turned(q_BTNH[..., C:])
        k_BT1P = turned(k_BT1P)
        if layer_cache is not None and x_BTD.shape[1] == 1:
            return self._decoded(own_BTNC, turned_BTNP, small_BTR, k_BT1P, layer_cache, attend)
        q_BTNH = jnp.concatenate([own_BTNC, turned_BTNP], axis=-1)
        made_BTNX = self.kv_b(small_BTR)
        shared_BTNP = jnp.broadcast_to(k_BT1P, (*made_BTNX.shape[:-1], H - C))
        k_BTNH = jnp.concatenate([made_BTNX[..., :C], shared_BTNP], axis=-1)
        if layer_cache is not None:
            layer_cache = Kept(layer_cache, *_stored(small_BTR, k_BT1P))
        q_BTNX, k_BTNX, v_BTNX = (
            _padded(x, self.attended_size) for x in (q_BTNH, k_BTNH, made_BTNX[..., C:])
        )
        out_BTNX, new_cache = attend(self._scaled(q_BTNX), k_BTNX, v_BTNX, layer_cache, window=None)
        return self.o(out_BTNX[..., :V]), new_cache

    def _project(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, the small vector after its norm, and the key of all heads before rope."""
        R = self.sizes[2]
        if hasattr(self, "q"):
            q_BTNH = self.q(x_BTD)
        else:
            q_BTNH = self.q_b(self.q_norm(self.q_a(x_BTD)))
        both_BTX = self.kv_a(x_BTD)
        return q_BTNH, self.kv_norm(both_BTX[..., :R]), both_BTX[..., None, R:]

    def _decoded(
        self,
        own_BTNC: jax.Array,
        turned_BTNP: jax.Array,
        small_BTR: jax.Array,
        k_BT1P: jax.Array,
        layer_cache: Any,
        attend: Attend,
    ) -> tuple[jax.Array, Any]:
        """The layer's output with a cache of small vectors."""
        _, C, R, _ = self.sizes
        to_keys_RNC, to_values_RNV = jnp.split(self._makers(own_BTNC.dtype), (C,), axis=-1)
        own_BTNR = jnp.einsum("BTNC,RNC->BTNR", own_BTNC, to_keys_RNC)
        q_BTNX = self._scaled(jnp.concatenate([own_BTNR, turned_BTNP], axis=-1))
        k_BT1X, v_BT1X = _stored(small_BTR, k_BT1P)
        out_BTNX, new_cache = attend(q_BTNX, k_BT1X, v_BT1X, layer_cache, window=None)
        return self.o(jnp.einsum("BTNR,RNV->BTNV", out_BTNX[..., :R], to_values_RNV)), new_cache

    def _makers(self, dtype: DTypeLike) -> jax.Array:
        """The weights that make keys and values, [R, N, C + V], with their adapter."""
        if self.kv_b.adapter is None and not isinstance(self.kv_b, FrozenProjection):
            return self.kv_b.kernel[...]
        return self.kv_b(jnp.eye(self.sizes[2], dtype=dtype)[None])[0]

    def _scaled(self, q_BTNX: jax.Array) -> jax.Array:
        """Queries whose logits are right after the callee of `Attend` scaled by their size."""
        scale = self.scale * math.sqrt(q_BTNX.shape[-1] / self.sizes[0])
        return q_BTNX if scale == 1.0 else (q_BTNX * jnp.float32(scale)).astype(q_BTNX.dtype)


def _stored(small_BTR: jax.Array, k_BT1P: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The key and the value of a token in the cache, one head each."""
    small_BT1R = small_BTR[:, :, None]
    k_BT1X = jnp.concatenate([small_BT1R, k_BT1P], axis=-1)
    return k_BT1X, _padded(small_BT1R, k_BT1X.shape[-1])


def _padded(x: jax.Array, size: int) -> jax.Array:
    """x with zeros behind its last dim, up to `size`."""
    if x.shape[-1] == size:
        return x
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])
