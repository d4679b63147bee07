"""The decoder that all families share: embedding, blocks, final norm.

Shape letters: B batch, T tokens, D hidden.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxrl_llm.kernels.flash_attention import ATTENTION, SCHEDULE
from jaxrl_llm.kernels.strict import Strict, by_rows, strict_in_scope
from jaxrl_llm.models.attention import Attend, Attention
from jaxrl_llm.models.config import LINEAR, Mixture, ModelConfig
from jaxrl_llm.models.experts import Experts, Routed, Routing
from jaxrl_llm.models.gated_delta import GatedDeltaNet
from jaxrl_llm.models.latent_attention import LatentAttention
from jaxrl_llm.models.layers import (
    MLP,
    PROJECTION,
    Embedding,
    Form,
    Layer,
    RMSNorm,
    is_float8,
    over_sequence,
    rope_tables,
    scattered,
)
from jaxrl_llm.models.media import Features

# Activation checkpointing, from the least recomputation to the most. "none" keeps everything.
# "projections" keeps the outputs of projections and attention. "attention" keeps the outputs of
# attention. "full" keeps only each layer's input.
Remat = Literal["none", "projections", "attention", "full"]
_POLICIES = {
    "projections": jax.checkpoint_policies.save_only_these_names(PROJECTION, ATTENTION, SCHEDULE),
    "attention": jax.checkpoint_policies.save_only_these_names(ATTENTION, SCHEDULE),
    "full": jax.checkpoint_policies.save_only_these_names(SCHEDULE),
}
# They compute nothing. Their results would be kept in place of a value that is not kept.
_PLACING = (
    jax.lax.dynamic_slice_p,
    jax.lax.optimization_barrier_p,
    jax.lax.reshape_p,
    jax.lax.squeeze_p,
)


class Block(Layer):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)).

    `config.norms` puts a norm behind attention and MLP, in place of those before or with them.
    In float8 a norm converts the input of attention and of a dense MLP. Other modules read `dtype`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        kind: tuple[int | None, int | None],
        mixture: Mixture | None,
        form: Form,
        dtype: DTypeLike,
    ) -> None:
        norm = partial(
            RMSNorm,
            config.hidden_size,
            eps=config.rms_norm_eps,
            dtype=dtype,
            unit_offset=config.unit_offset,
        )
        before, after = config.norms != "after", config.norms != "before"
        float8 = is_float8(form)
        mixer = _mixer(config, kind=kind, form=form, dtype=dtype)
        self.residual_multiplier = config.residual_multiplier
        self.attention_norm = (
            norm(float8=float8 and isinstance(mixer, Attention)) if before else None
        )
        self.attention = mixer
        self.attention_out_norm = norm() if after else None
        self.mlp_norm = norm(float8=float8 and mixture is None) if before else None
        self.mlp = (
            MLP(config, form=form, dtype=dtype)
            if mixture is None
            else Experts(config, mixture, form=form, dtype=dtype)
        )
        self.mlp_out_norm = norm() if after else None

    def __call__(
        self,
        x_BTD: jax.Array,
        rope: tuple[jax.Array, ...],
        layer_cache: Any,
        attend: Attend,
        routing: Routing | None = None,
    ) -> tuple[jax.Array, Any, Routed | None]:
        strict = strict_in_scope()
        if strict is not None and not strict.kernels:
            return self._strictly(strict, x_BTD, rope, layer_cache, attend, routing)
        read_BTD = self._read(x_BTD, self.attention_norm)
        mixed_BTD, new_cache = self.attention(read_BTD, rope, layer_cache, attend)
        x_BTD = x_BTD + self._addend(scattered(mixed_BTD), self.attention_out_norm)
        read_BTD = self._read(x_BTD, self.mlp_norm)
        if isinstance(self.mlp, Experts):
            mixed_BTD, routed = self.mlp(read_BTD, routing)
        else:
            mixed_BTD, routed = self.mlp(read_BTD), None
        return x_BTD + self._addend(scattered(mixed_BTD), self.mlp_out_norm), new_cache, routed

    def _read(self, x_BTD: jax.Array, norm: RMSNorm | None) -> Any:
        """The input of attention or MLP; without a norm the residual stream in their dtype."""
        if norm is not None:
            return norm(x_BTD)
        assert self.attention_out_norm is not None
        return x_BTD.astype(self.attention_out_norm.scale[...].dtype)

    def _addend(self, x_BTD: jax.Array, norm: RMSNorm | None) -> jax.Array:
        x_BTD = x_BTD if norm is None else norm(x_BTD)
        multiplier = self.residual_multiplier
        return x_BTD if multiplier == 1.0 else x_BTD * multiplier

    def _strictly(
        self,
        strict: Strict,
        x_BTD: jax.Array,
        rope: tuple[jax.Array, ...],
        layer_cache: Any,
        attend: Attend,
        routing: Routing | None,
    ) -> tuple[jax.Array, Any, Routed | None]:
        """The layer in chunks of rows before and after the attention."""
        graphdef, state = nnx.split(self)

        def before(state: Any, x_CD: jax.Array, *rope: jax.Array) -> Any:
            layer = nnx.merge(graphdef, state)
            assert isinstance(layer.attention, Attention)
            return layer.attention.inputs(layer._read(x_CD, layer.attention_norm), rope)

        def after(state: Any, x_CD: jax.Array, out_CNH: jax.Array, routing: Any) -> Any:
            layer = nnx.merge(graphdef, state)
            x_CD = x_CD + layer._addend(layer.attention.o(out_CNH), layer.attention_out_norm)
            read_CD = layer._read(x_CD, layer.mlp_norm)
            if isinstance(layer.mlp, Experts):
                mixed_CD, choice = layer.mlp.strictly(read_CD, routing)
            else:
                mixed_CD, choice = layer.mlp(read_CD), None
            return x_CD + layer._addend(mixed_CD, layer.mlp_out_norm), choice

        assert isinstance(self.attention, Attention)
        q_BTNH, k_BTKH, v_BTKH = by_rows(strict, before, state, x_BTD, *rope)
        window = self.attention.window
        out_BTNH, new_cache = attend(q_BTNH, k_BTKH, v_BTKH, layer_cache, window=window)
        if not isinstance(self.mlp, Experts):
            x_BTD, _ = by_rows(strict, after, state, x_BTD, out_BTNH, None)
            return x_BTD, new_cache, None
        whole = (routing or Routing()).whole(x_BTD, self.mlp.mixture)
        x_BTD, choice = by_rows(strict, after, state, x_BTD, out_BTNH, whole)
        return x_BTD, new_cache, self.mlp.router.routed(choice, whole)


def _mixer(
    config: ModelConfig, *, kind: tuple[int | None, int | None], form: Form, dtype: DTypeLike
) -> Attention | LatentAttention | GatedDeltaNet:
    """The attention or the gated delta rule of a layer."""
    if config.delta is not None and kind[1] == LINEAR:
        return GatedDeltaNet(config, config.delta, form=form, dtype=dtype)
    if config.latent is not None:
        return LatentAttention(config, config.latent, kind=kind, form=form, dtype=dtype)
    return Attention(config, kind=kind, form=form, dtype=dtype)


# Runs layers, in order, on the residual stream [B, T, D]; returns their routers' statistics too.
RunLayers = Callable[[list[Block], jax.Array], tuple[jax.Array, Routed | None]]


class Decoder(Layer):
    """Tokens to hidden states.

    Layers are a dict with the keys "0", "1", ..., so every path in the parameter tree consists of
    strings. Each layer has its own leaves: decoding would have to copy stacked ones.
    """

    def __init__(self, config: ModelConfig, *, form: Form, dtype: DTypeLike) -> None:
        self.config = config
        self.embed = Embedding(config, dtype=dtype)
        self.layers = nnx.Dict(
            {
                str(i): Block(
                    config, kind=kind, mixture=config.mixture_of(i), form=form, dtype=dtype
                )
                for i, kind in enumerate(config.layer_kinds)
            }
        )
        self.norm = RMSNorm(
            config.hidden_size,
            eps=config.rms_norm_eps,
            dtype=dtype,
            unit_offset=config.unit_offset,
        )

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
        features: Features | None = None,
    ) -> tuple[jax.Array, tuple[Any, ...], Routed | None]:
        """Hidden states after the final norm [B, T, D], new caches, and routers' statistics.

        `remat`: see `Remat`. `scan` runs one compiled layer, or one period of a pattern of layers,
        in a loop over stacked weights. The program is smaller, but the weights are copied. The
        layers after the last whole period run one by one. `residual_dtype` is the dtype of the
        residual stream; None takes the parameters'. `run_layers` computes the layers in another
        way, but for leading dense ones. `routing` is for layers of experts, which are the first dim
        of their routers' statistics. `features` replace the embeddings of some tokens.

        Requires: no cache with `scan` or `run_layers`.
        Raises: ValueError for `scan` over layers that repeat no pattern.
        """
        rope, norm = self._rope(positions_BT), self._final_norm
        x_BTD = over_sequence(self.embed(tokens_BT))
        if (multiplier := self.config.embedding_multiplier) != 1.0:
            x_BTD = x_BTD * jnp.asarray(multiplier, x_BTD.dtype)
        if features is not None:  # the multiplier is not theirs
            x_BTD = features.inserted(x_BTD)
        if residual_dtype is not None:
            x_BTD = x_BTD.astype(residual_dtype)
        layers = [self.layers[str(i)] for i in range(self.config.num_layers)]
        of_layers = (rope, attend, remat, routing)
        num_deep = 0 if features is None else features.num_deep
        if run_layers is not None:
            assert cache is None and not num_deep
            first = self.config.num_leading_layers
            x_BTD, _, _ = self._in_turn(layers[:first], x_BTD, None, *of_layers)
            x_BTD, routed = run_layers(layers[first:], x_BTD)
            return norm(x_BTD), (), routed
        if scan and num_deep < len(layers):
            assert cache is None and (not num_deep or self.config.mixture is None)
            x_BTD, _, _ = self._in_turn(layers[:num_deep], x_BTD, None, *of_layers, features)
            x_BTD, routed = _in_loop(layers[num_deep:], x_BTD, *of_layers)
            return norm(x_BTD), (), routed
        x_BTD, new_cache, routed = self._in_turn(layers, x_BTD, cache, *of_layers, features)
        return norm(x_BTD), new_cache, routed

    def _in_turn(
        self,
        layers: list[Block],
        x_BTD: jax.Array,
        cache: tuple[Any, ...] | None,
        rope: tuple[jax.Array, ...],
        attend: Attend,
        remat: Remat,
        routing: Routing | None,
        features: Features | None = None,
    ) -> tuple[jax.Array, tuple[Any, ...], Routed | None]:
        """The first `layers` of the model one after the other."""
        new_cache, routed = [], []
        runs: dict[Any, Callable[..., Any]] = {}
        for i, layer in enumerate(layers):
            graphdef, state = nnx.split(layer)
            layer_cache = None if cache is None else cache[i]
            if graphdef not in runs:
                # Equal layers share one jitted function, which is traced, differentiated and
                # lowered once. XLA inlines it, so the program is the same.
                runs[graphdef] = jax.jit(_block_fn(graphdef, attend, remat))
            of_layer = None
            if routing is not None:
                of_layer = routing.of_layer(i - self.config.num_leading_layers)
            x_BTD, new_layer_cache, layer_routed = runs[graphdef](
                state, x_BTD, rope, layer_cache, of_layer
            )
            if features is not None and i < features.num_deep:
                x_BTD = features.added(i, x_BTD)
            new_cache.append(new_layer_cache)
            if layer_routed is not None:
                routed.append(layer_routed)
        every = jax.tree.map(lambda *layers: jnp.stack(layers), *routed) if routed else None
        return x_BTD, tuple(new_cache), every

    def _rope(self, positions_BT: jax.Array) -> tuple[jax.Array, ...]:
        def tables(_: None, positions_C: jax.Array) -> tuple[jax.Array, ...]:
            if positions_BT.ndim == positions_C.ndim:
                return rope_tables(self.config, positions_C)
            return jax.tree.map(lambda x: x[0], rope_tables(self.config, positions_C[None]))

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
    """`run` with activation checkpointing: the backward pass recomputes what `remat` does not keep.

    Values with the checkpoint name `never_kept` are always recomputed.
    """
    if remat == "none" and never_kept is None:
        return run
    # `save_anything_except_these_names` of jax keeps what it should not.
    named = jax.checkpoint_policies.save_only_these_names(never_kept)

    def kept(primitive: Any, *arguments: Any, **parameters: Any) -> bool:
        return primitive not in _PLACING and not named(primitive, *arguments, **parameters)

    return jax.checkpoint(run, policy=_POLICIES.get(remat, kept))


def _in_loop(
    layers: list[Block],
    x_BTD: jax.Array,
    rope: Any,
    attend: Attend,
    remat: Remat,
    routing: Routing | None,
) -> tuple[jax.Array, Routed | None]:
    """All layers, in a loop over the periods of their pattern."""
    graphdefs, states = zip(*(nnx.split(layer) for layer in layers), strict=True)
    runs = {graphdef: _block_fn(graphdef, attend, remat) for graphdef in set(graphdefs)}
    each = [None if routing is None else routing.of_layer(i) for i in range(len(layers))]

    def run(graphdef: Any, x_BTD: jax.Array, of_layer: Any) -> tuple[jax.Array, Routed | None]:
        state, of_router = of_layer
        x_BTD, _, routed = runs[graphdef](state, x_BTD, rope, None, of_router)
        return x_BTD, routed

    return scanned(run, graphdefs, list(zip(states, each, strict=True)), x_BTD)


def scanned(
    run: Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]],
    kinds: Sequence[Any],
    of_layers: Sequence[Any],
    x_BTD: jax.Array,
) -> tuple[jax.Array, Any]:
    """The residual stream after `run(kind, x, of_layer)` of all layers, and their other results.

    The layers of a whole period of their kinds are a step of a loop. Those after the last one run
    one by one. Other results have the layers as their first dim.

    Raises: ValueError for kinds that repeat no pattern.
    """
    period = period_of(kinds)
    whole = len(kinds) - len(kinds) % period
    # For each layer of a period, the values of all periods.
    stacked = [
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *of_layers[j:whole:period])
        for j in range(period)
    ]

    def body(x_BTD: jax.Array, of_layers: Sequence[Any]) -> tuple[jax.Array, tuple[Any, ...]]:
        others = []
        for kind, of_layer in zip(kinds, of_layers, strict=False):
            x_BTD, of_one = run(kind, x_BTD, of_layer)
            others.append(of_one)
        return x_BTD, tuple(others)

    x_BTD, of_periods = jax.lax.scan(body, x_BTD, tuple(stacked))
    x_BTD, of_others = body(x_BTD, of_layers[whole:])
    # [periods, period, ...] -> [layers, ...]
    joined = jax.tree.map(
        lambda *xs: jnp.stack(xs, axis=1).reshape(whole, *xs[0].shape[1:]), *of_periods
    )
    return x_BTD, jax.tree.map(
        lambda x, *others: jnp.concatenate([x, *(o[None] for o in others)]), joined, *of_others
    )


def period_of(kinds: Sequence[Any]) -> int:
    """Layers after which the kinds of layers repeat. ValueError if they do not at least once."""
    for period in range(1, len(kinds) // 2 + 1):
        if all(kind == kinds[i % period] for i, kind in enumerate(kinds)):
            return period
    if len(kinds) == 1:
        return 1
    raise ValueError(
        "windows, rope tables, experts or adapters of the layers repeat no pattern: no scan; "
        "set scan_layers to false"
    )
