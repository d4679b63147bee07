"""The decoder that all families share: embedding, pre-norm blocks, final norm.

Shape letters: B batch, T tokens, D hidden.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxrl_llm.kernels.flash_attention import ATTENTION, SCHEDULE
from jaxrl_llm.kernels.strict import Strict, by_rows, strict_in_scope
from jaxrl_llm.models.attention import Attend, Attention
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.experts import Experts, Routed, Routing
from jaxrl_llm.models.layers import (
    MLP,
    PROJECTION,
    Embedding,
    Form,
    RMSNorm,
    over_sequence,
    rope_tables,
    scattered,
)

# Activation checkpointing, from the least recomputation to the most. "none" keeps everything.
# "projections" keeps the outputs of projections and attention. "attention" keeps the outputs of
# attention. "full" keeps only each layer's input.
Remat = Literal["none", "projections", "attention", "full"]
_POLICIES = {
    "projections": jax.checkpoint_policies.save_only_these_names(PROJECTION, ATTENTION, SCHEDULE),
    "attention": jax.checkpoint_policies.save_only_these_names(ATTENTION, SCHEDULE),
    "full": jax.checkpoint_policies.save_only_these_names(SCHEDULE),
}


class Block(nnx.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, config: ModelConfig, *, window: int | None, form: Form, dtype: DTypeLike
    ) -> None:
        D, eps = config.hidden_size, config.rms_norm_eps
        float8 = form.startswith("float8")
        self.attention_norm = RMSNorm(D, eps=eps, dtype=dtype, float8=float8)
        self.attention = Attention(config, window=window, form=form, dtype=dtype)
        self.mlp_norm = RMSNorm(D, eps=eps, dtype=dtype, float8=float8)
        self.mlp = (
            MLP(config, form=form, dtype=dtype)
            if config.mixture is None
            else Experts(config, config.mixture, dtype=dtype)
        )

    def __call__(
        self,
        x_BTD: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        layer_cache: Any,
        attend: Attend,
        routing: Routing | None = None,
    ) -> tuple[jax.Array, Any, Routed | None]:
        strict = strict_in_scope()
        if strict is not None and not strict.kernels:
            return *self._strictly(strict, x_BTD, rope, layer_cache, attend), None
        mixed_BTD, new_cache = self.attention(self.attention_norm(x_BTD), rope, layer_cache, attend)
        x_BTD = x_BTD + scattered(mixed_BTD)
        if isinstance(self.mlp, Experts):
            y_BTD, routed = self.mlp(self.mlp_norm(x_BTD), routing)
        else:
            y_BTD, routed = self.mlp(self.mlp_norm(x_BTD)), None
        return x_BTD + scattered(y_BTD), new_cache, routed

    def _strictly(
        self,
        strict: Strict,
        x_BTD: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        layer_cache: Any,
        attend: Attend,
    ) -> tuple[jax.Array, Any]:
        """The layer in chunks of rows before and after the attention."""
        graphdef, state = nnx.split(self)

        def before(state: Any, x_CD: jax.Array, cos: jax.Array, sin: jax.Array) -> Any:
            layer = nnx.merge(graphdef, state)
            return layer.attention.inputs(layer.attention_norm(x_CD), (cos, sin))

        def after(state: Any, x_CD: jax.Array, out_CNH: jax.Array) -> jax.Array:
            layer = nnx.merge(graphdef, state)
            assert isinstance(layer.mlp, MLP)
            x_CD = x_CD + layer.attention.o(out_CNH)
            return x_CD + layer.mlp(layer.mlp_norm(x_CD))

        q_BTNH, k_BTKH, v_BTKH = by_rows(strict, before, state, x_BTD, *rope)
        window = self.attention.window
        out_BTNH, new_cache = attend(q_BTNH, k_BTKH, v_BTKH, layer_cache, window=window)
        return by_rows(strict, after, state, x_BTD, out_BTNH), new_cache


# Runs layers, in their order, on the residual stream [B, T, D].
RunLayers = Callable[[list[Block], jax.Array], jax.Array]


class Decoder(nnx.Module):
    """Tokens to hidden states.

    Layers are a dict with the keys "0", "1", ..., so every path in the parameter tree consists of
    strings. Each layer has its own leaves: decoding would have to copy stacked ones.
    """

    def __init__(self, config: ModelConfig, *, form: Form, dtype: DTypeLike) -> None:
        self.config = config
        self.embed = Embedding(config, dtype=dtype)
        self.layers = nnx.Dict(
            {
                str(i): Block(config, window=window, form=form, dtype=dtype)
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
        remat: Remat = "none",
        scan: bool = False,
        residual_dtype: DTypeLike | None = None,
        run_layers: RunLayers | None = None,
        routing: Routing | None = None,
    ) -> tuple[jax.Array, tuple[Any, ...], Routed | None]:
        """Hidden states after the final norm [B, T, D], a new cache a layer, and what routers did.

        `remat`: see `Remat`. `scan` runs one compiled layer in a loop over stacked weights: the
        program is smaller, but the weights are copied. `residual_dtype` is the dtype of the
        residual stream; None takes that of the parameters. `run_layers` computes the layers in
        another way. `routing` is for layers of experts; what their routers did has the layers as
        its first dim.

        Requires: no cache with `scan` or `run_layers`.
        Raises: ValueError for `scan` over layers of different windows.
        """
        rope, norm = self._rope(positions_BT), self._final_norm
        x_BTD = over_sequence(self.embed(tokens_BT))
        if residual_dtype is not None:
            x_BTD = x_BTD.astype(residual_dtype)
        layers = [self.layers[str(i)] for i in range(self.config.num_layers)]
        if run_layers is not None:
            assert cache is None
            return norm(run_layers(layers, x_BTD)), (), None
        if scan:
            assert cache is None
            x_BTD, routed = _scanned(layers, x_BTD, rope, attend, remat, routing)
            return norm(x_BTD), (), routed
        new_cache, routed = [], []
        runs: dict[Any, Callable[..., Any]] = {}
        for i, layer in enumerate(layers):
            graphdef, state = nnx.split(layer)
            layer_cache = None if cache is None else cache[i]
            if graphdef not in runs:
                # Equal layers share one jitted function, which is traced, differentiated and
                # lowered once. XLA inlines it, so the program is the same.
                runs[graphdef] = jax.jit(_block_fn(graphdef, attend, remat))
            of_layer = None if routing is None else routing.of_layer(i)
            x_BTD, new_layer_cache, layer_routed = runs[graphdef](
                state, x_BTD, rope, layer_cache, of_layer
            )
            new_cache.append(new_layer_cache)
            routed.append(layer_routed)
        every = jax.tree.map(lambda *layers: jnp.stack(layers), *routed)
        return norm(x_BTD), tuple(new_cache), every

    def _rope(self, positions_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        def tables(_: None, positions_C: jax.Array) -> tuple[jax.Array, jax.Array]:
            return rope_tables(self.config, positions_C)

        strict = strict_in_scope()
        if strict is not None and not strict.kernels:
            return by_rows(strict, tables, None, positions_BT)
        return tables(None, positions_BT)

    def _final_norm(self, x_BTD: jax.Array) -> jax.Array:
        strict = strict_in_scope()
        if strict is None or strict.kernels:
            return self.norm(x_BTD)
        graphdef, state = nnx.split(self.norm)
        return by_rows(strict, lambda state, x: nnx.merge(graphdef, state)(x), state, x_BTD)


def _block_fn(graphdef: Any, attend: Attend, remat: Remat) -> Callable[..., Any]:
    # The parameters are an argument: an nnx module must not cross a jax transformation.
    def run(
        state: Any, x_BTD: jax.Array, rope: Any, layer_cache: Any, routing: Routing | None
    ) -> tuple[jax.Array, Any, Routed | None]:
        return nnx.merge(graphdef, state)(x_BTD, rope, layer_cache, attend, routing)

    return rematerialised(run, remat)


def rematerialised(
    run: Callable[..., Any], remat: Remat, *, never_kept: str | None = None
) -> Callable[..., Any]:
    """`run` with its backward pass computing again what `remat` does not keep.

    What has the checkpoint name `never_kept` is computed again in any case.
    """
    if remat == "none" and never_kept is None:
        return run
    policies = jax.checkpoint_policies
    policy = _POLICIES.get(remat) or policies.save_anything_except_these_names(never_kept)
    return jax.checkpoint(run, policy=policy)


def _scanned(
    layers: list[Block],
    x_BTD: jax.Array,
    rope: Any,
    attend: Attend,
    remat: Remat,
    routing: Routing | None,
) -> tuple[jax.Array, Routed | None]:
    windows = {layer.attention.window for layer in layers}
    if len(windows) > 1:
        raise ValueError(f"layers of windows {windows} cannot be scanned: set scan_layers to false")
    graphdefs, states = zip(*(nnx.split(layer) for layer in layers), strict=True)
    run = _block_fn(graphdefs[0], attend, remat)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)

    each = None if routing is None else [routing.of_layer(i) for i in range(len(layers))]
    of_layers = None if each is None else jax.tree.map(lambda *xs: jnp.stack(xs), *each)

    def body(x_BTD: jax.Array, layer: Any) -> tuple[jax.Array, Routed | None]:
        state, of_layer = layer
        x_BTD, _, routed = run(state, x_BTD, rope, None, of_layer)
        return x_BTD, routed

    return jax.lax.scan(body, x_BTD, (stacked, of_layers))
