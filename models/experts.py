"""Mixture of experts: a router, and grouped matmuls of each expert with its tokens.

No token is dropped. The (token, expert) pairs are sorted by expert, and `grouped_matmul` multiplies
each run of rows with the weights of its expert. Padding goes to no expert.

Shape letters: B batch, T tokens, D hidden, F inner size of an expert, E experts, K experts of a
token, N tokens of a device, M rows of the grouped matmuls.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxrl_llm.distributed.layout import Layout, layout_in_scope
from jaxrl_llm.distributed.mesh import axis_size
from jaxrl_llm.kernels.flash_attention import gathered
from jaxrl_llm.models.config import BALANCE, CENTROIDS, Mixture, ModelConfig
from jaxrl_llm.models.expert_dispatch import exchanges_rows
from jaxrl_llm.models.expert_exchange import rows_by_exchange
from jaxrl_llm.models.expert_rows import Kernels, Stack, Stacked, computed_experts, permuted
from jaxrl_llm.models.frozen import Quantized
from jaxrl_llm.models.layers import FROZEN, MLP, Form, Layer, Projection, is_float8, parameter


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Routing:
    """Which tokens are real, and experts that replace the choice of the routers of all layers."""

    real_BT: jax.Array | None = None  # bool; False is padding. None: every token is real
    # Experts to take in place of the router's own choice; -1 leaves it to the router.
    chosen_BTLK: jax.Array | None = None

    def of_layer(self, layer: int) -> "Routing":
        """The routing of one layer with experts; its `chosen_BTLK` has no dim of layers.

        A negative layer has none.
        """
        if self.chosen_BTLK is None:
            return self
        if layer < 0:
            return Routing(real_BT=self.real_BT)
        return Routing(real_BT=self.real_BT, chosen_BTLK=self.chosen_BTLK[:, :, layer])

    def whole(self, x_BTD: jax.Array, mixture: Mixture) -> "Routing":
        """The routing of one layer with both arrays; absent ones get neutral values."""
        real_BT, chosen_BTK = self.real_BT, self.chosen_BTLK
        if real_BT is None:
            real_BT = jnp.ones(x_BTD.shape[:2], bool)
        if chosen_BTK is None:
            chosen_BTK = jnp.full((*x_BTD.shape[:2], mixture.experts_per_token), -1, jnp.int8)
        return Routing(real_BT=real_BT, chosen_BTLK=chosen_BTK)


class Routed(NamedTuple):
    """Statistics of a layer's router: sums over real tokens, float32."""

    counts_E: jax.Array  # tokens that chose the expert
    probs_E: jax.Array  # probabilities of the expert
    squares: jax.Array  # squared log-sum-exp of the logits
    tokens: jax.Array
    chosen_BTK: jax.Array | None  # int32; E for padding. None in a pipeline, which keeps sums alone
    # Tokens that the router itself would send to the expert, also where `Routing` replaced its
    # choice. None without a balance bias, its only reader.
    own_counts_E: jax.Array | None = None

    @property
    def sums(self) -> "Routed":
        """The statistics without the choices of single tokens."""
        return self._replace(chosen_BTK=None)


class Choice(NamedTuple):
    """A router's choice for each token; experts are int32, E for padding."""

    weights_BTK: jax.Array
    chosen_BTK: jax.Array
    own_BTK: jax.Array  # the router's own choice, also where `Routing` replaced it
    logits_BTE: jax.Array


def nothing_routed(mixture: Mixture, *lead: int) -> Routed:
    """The sums of no tokens, with these leading dims."""
    of_experts = jnp.zeros((*lead, mixture.num_experts), jnp.float32)
    of_all = jnp.zeros(lead, jnp.float32)
    own = of_experts if mixture.scores == "sigmoid" else None
    return Routed(of_experts, of_experts, of_all, of_all, None, own)


class Router(Layer):
    """Chooses K experts for each token. Logits, probabilities and weights are float32.

    With sigmoid scores, a bias that is not in the weights balances the choice (arXiv:2408.15664).
    Then the parameters are float32 in every dtype of the model, as in transformers.
    """

    def __init__(self, config: ModelConfig, mixture: Mixture, *, dtype: DTypeLike) -> None:
        self.mixture = mixture
        # Small, and every device needs all of it: only the storage is split.
        shape = (config.hidden_size, mixture.num_experts)
        kernel = partial(parameter, shape, ("embed", "norm"), "normal")
        biased = config.expert_bias
        self.bias = parameter(shape[1:], ("norm",), "zeros", dtype) if biased else None
        if mixture.scores == "sigmoid":
            setattr(self, CENTROIDS, kernel(jnp.float32))
            setattr(self, BALANCE, parameter(shape[1:], ("norm",), "zeros", jnp.float32))
        else:
            self.kernel = kernel(dtype)

    def __call__(self, x_BTD: jax.Array, routing: Routing) -> Choice:
        """Choose the experts of each token. Any dims may be in place of B and T."""
        E, K = self.mixture.num_experts, self.mixture.experts_per_token
        if self.mixture.scores == "sigmoid":
            x_BTD, kernel_DE = x_BTD.astype(jnp.float32), getattr(self, CENTROIDS)[...]
        else:
            kernel_DE = self.kernel[...].astype(x_BTD.dtype)
        logits_BTE = jnp.einsum(
            "...D,DE->...E",
            x_BTD,
            kernel_DE,
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        if self.bias is not None:
            logits_BTE += self.bias[...].astype(jnp.float32)
        scores_BTE, _ = self._scores(logits_BTE)
        _, own_BTK = jax.lax.top_k(jax.lax.stop_gradient(self._for_choice(scores_BTE)), K)
        chosen_BTK = own_BTK
        if routing.chosen_BTLK is not None:
            replayed_BTK = routing.chosen_BTLK.astype(jnp.int32)
            is_replayed = (replayed_BTK >= 0) & (replayed_BTK < E)
            chosen_BTK = jnp.where(is_replayed, replayed_BTK, chosen_BTK)
        weights_BTK = jnp.take_along_axis(scores_BTE, chosen_BTK, axis=-1)
        if self.mixture.normalized:
            total_BT1 = weights_BTK.sum(axis=-1, keepdims=True)
            if routing.chosen_BTLK is None:
                weights_BTK /= total_BT1
            else:
                # The softmax over the chosen logits is the same number. All probabilities of
                # replayed experts may be 0 in float32.
                logits_BTK = jnp.take_along_axis(logits_BTE, chosen_BTK, axis=-1)
                weights_BTK = jnp.where(
                    total_BT1 > 0,
                    weights_BTK / jnp.where(total_BT1 > 0, total_BT1, 1.0),
                    jax.nn.softmax(logits_BTK, axis=-1),
                )
        if (scaling := self.mixture.scaling) != 1.0:
            weights_BTK *= scaling
        if (real_BT := routing.real_BT) is not None:
            own_BTK, chosen_BTK = (
                jnp.where(real_BT[..., None], x, E) for x in (own_BTK, chosen_BTK)
            )
        return Choice(weights_BTK, chosen_BTK, own_BTK, logits_BTE)

    def routed(self, choice: Choice, routing: Routing) -> Routed:
        """Sums over real tokens of the choices."""
        E, logits_BTE = self.mixture.num_experts, choice.logits_BTE
        real_BT = routing.real_BT
        if real_BT is None:
            real_BT = jnp.ones(logits_BTE.shape[:2], bool)
        of_real_BT = real_BT.astype(jnp.float32)
        _, probs_BTE = self._scores(logits_BTE)
        squares_BT = jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1))
        biased = self.mixture.scores == "sigmoid"
        return Routed(
            counts_E=_counts(choice.chosen_BTK, E),
            probs_E=(probs_BTE * of_real_BT[..., None]).sum(axis=(0, 1)),
            squares=(squares_BT * of_real_BT).sum(),
            tokens=of_real_BT.sum(),
            chosen_BTK=choice.chosen_BTK,
            own_counts_E=_counts(choice.own_BTK, E) if biased else None,
        )

    def _scores(self, logits_BTE: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The experts' scores, and their probabilities, which add up to 1."""
        if self.mixture.scores == "softmax":
            probs_BTE = jax.nn.softmax(logits_BTE, axis=-1)
            return probs_BTE, probs_BTE
        # A score of 0 would be divided by itself.
        scores_BTE = jnp.maximum(jax.nn.sigmoid(logits_BTE), jnp.finfo(jnp.float32).tiny)
        return scores_BTE, scores_BTE / scores_BTE.sum(axis=-1, keepdims=True)

    def _for_choice(self, scores_BTE: jax.Array) -> jax.Array:
        """The values whose largest are chosen; groups that are not open have -inf."""
        if self.mixture.scores == "sigmoid":
            scores_BTE = scores_BTE + getattr(self, BALANCE)[...]
        groups, open_groups = self.mixture.num_groups, self.mixture.groups_per_token
        if groups == open_groups:
            return scores_BTE
        shape = scores_BTE.shape
        scores_BTGX = scores_BTE.reshape(*shape[:-1], groups, shape[-1] // groups)
        best_BTG = jax.lax.top_k(scores_BTGX, 2)[0].sum(axis=-1)
        _, open_BTX = jax.lax.top_k(best_BTG, open_groups)
        is_open_BTG = jax.nn.one_hot(open_BTX, groups, dtype=bool).any(axis=-2)
        return jnp.where(is_open_BTG[..., None], scores_BTGX, -jnp.inf).reshape(shape)


def _counts(chosen_BTK: jax.Array, num: int) -> jax.Array:
    """Tokens of each of `num` experts, float32 [E]; what is no expert is padding."""
    return jax.nn.one_hot(chosen_BTK, num, dtype=jnp.float32).sum(axis=(0, 1, 2))


class Experts(Layer):
    """The experts of one layer: the sum of weight * down(silu(gate(x)) * up(x)) over the chosen.

    `config.swiglu_limit` selects another activation, `config.expert_bias` adds biases. Shared
    experts, if there are any, are one MLP that every token uses; its output is added.

    In float8, the weights of the experts are float8 and their inputs are not. Shared experts are
    in float8 like a dense MLP. The router keeps its dtype.
    """

    def __init__(
        self, config: ModelConfig, mixture: Mixture, *, form: Form, dtype: DTypeLike
    ) -> None:
        D, F, E = config.hidden_size, mixture.expert_size, mixture.num_experts
        float8 = form == FROZEN or is_float8(form)
        self.mixture = mixture
        self.router = Router(config, mixture, dtype=dtype)
        self.limit = config.swiglu_limit
        stack = partial(Stack, dtype=dtype, float8=float8, bias=config.expert_bias)
        self.gate = stack((E, D, F), ("expert", "expert_embed", "mlp"))
        self.up = stack((E, D, F), ("expert", "expert_embed", "mlp"))
        self.down = stack((E, F, D), ("expert", "mlp", "expert_embed"))
        if mixture.shared_size:
            # Never merged: see `base.merge_projections`.
            forms: dict[Form, Form] = {"merged": "separate", "float8": "float8_separate"}
            form = forms.get(form, form)
            self.shared = MLP(config, size=mixture.shared_size, form=form, dtype=dtype)
        if mixture.shared_gate:
            self.shared_gate = Projection((D, 1), ("embed", "value"), dtype=dtype)

    def __call__(
        self, x_BTD: jax.Array, routing: Routing | None = None
    ) -> tuple[jax.Array, Routed]:
        """The layer's output [B, T, D], and the statistics of its router."""
        routing = routing or Routing()
        choice = self.router(x_BTD, routing)
        weights_BTK, chosen_BTK = choice.weights_BTK, choice.chosen_BTK
        kernels, bias_ED = self._kernels(x_BTD.dtype)
        y_BTD = experts_of_tokens(x_BTD, weights_BTK, chosen_BTK, kernels)
        if bias_ED is not None:
            y_BTD += _weighted_rows(weights_BTK, chosen_BTK, bias_ED).astype(y_BTD.dtype)
        if self.mixture.shared_size:
            shared_BTD = self.shared(x_BTD)
            if self.mixture.shared_gate:
                shared_BTD *= jax.nn.sigmoid(self.shared_gate(x_BTD))
            y_BTD += shared_BTD
        return y_BTD, self.router.routed(choice, routing)

    def strictly(self, x_CD: jax.Array, routing: Routing) -> tuple[jax.Array, Choice]:
        """The output of a chunk of rows, whose bits depend on each row alone; see strict.py."""
        choice = self.router(x_CD, routing)
        kernels, bias_ED = self._kernels(x_CD.dtype)
        assert bias_ED is None and not self.mixture.shared_size, "refused: see `strict_of`"
        # Sums over experts must not be joined with what the router computes.
        weights_CK, chosen_CK = jax.lax.optimization_barrier(choice[:2])
        y_CD = _one_by_one(x_CD, weights_CK, chosen_CK, kernels)
        return y_CD.astype(x_CD.dtype), choice

    def _kernels(self, dtype: DTypeLike) -> tuple[Kernels, jax.Array | None]:
        """The weights that a pass in `dtype` computes with, and the biases of `down`."""
        gate, up, down = (each.weights(dtype) for each in (self.gate, self.up, self.down))
        return (replace(gate, limit=self.limit), up, replace(down, bias=None)), down.bias


def _weighted_rows(weights_BTK: jax.Array, chosen_BTK: jax.Array, bias_ED: jax.Array) -> jax.Array:
    """The biases of each token's experts times their weights, float32 [B, T, D].

    They are added once to the sum over experts. Devices that hold parts of an expert would each add
    the bias. A matmul, because the gradient of a gather has no fixed order on a GPU.
    """
    hot_BTKE = jax.nn.one_hot(chosen_BTK, len(bias_ED), dtype=jnp.float32)
    of_experts_BTE = (hot_BTKE * weights_BTK[..., None]).sum(axis=2)
    return jnp.einsum(
        "BTE,ED->BTD",
        of_experts_BTE,
        bias_ED.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )


def experts_of_tokens(
    x_BTD: jax.Array, weights_BTK: jax.Array, chosen_BTK: jax.Array, kernels: Kernels
) -> jax.Array:
    """The weighted sum over the chosen experts, in the dtype of x, without biases of `down`.

    Where the mesh axis `expert` splits the experts, the devices of a group exchange tokens: see
    `exchanges_rows`.
    """
    layout = layout_in_scope()
    if layout is not None:
        return _split_experts(layout, x_BTD, weights_BTK, chosen_BTK, kernels)
    B, T, D = x_BTD.shape
    x_ND, weights_NK, chosen_NK = (x.reshape(B * T, -1) for x in (x_BTD, weights_BTK, chosen_BTK))
    y_ND = _own_experts(x_ND, weights_NK, chosen_NK, kernels, first=0)
    return y_ND.astype(x_BTD.dtype).reshape(B, T, D)


def _split_experts(
    layout: Layout,
    x_BTD: jax.Array,
    weights_BTK: jax.Array,
    chosen_BTK: jax.Array,
    kernels: Kernels,
) -> jax.Array:
    """`experts_of_tokens` on the devices of a layout, each with its own tokens."""
    B, T, _ = x_BTD.shape
    rows = () if B % layout.num_replicas else layout.axes("batch")
    tokens = () if T % layout.size("tokens") else layout.axes("tokens")
    experts, heads = layout.axes("expert"), layout.axes("mlp")
    # Devices along these axes have the same tokens and parts of the sum.
    parts = (*(axis for axis in experts if axis not in rows), *heads)
    group = tuple(axis for axis in experts if axis in rows)
    # Devices along these axes have other tokens and the same weights.
    apart = tuple(axis for axis in (*rows, *tokens) if axis not in experts)
    size = axis_size(layout.mesh, *experts)

    def local(
        x_1BTD: jax.Array, weights_1BTK: jax.Array, chosen_BTK: jax.Array, copies: Kernels
    ) -> jax.Array:
        _, B, T, D = x_1BTD.shape
        own: Kernels = jax.tree.map(lambda w: w[0, 0], copies)
        split = group == experts and size > 1
        if split and exchanges_rows(B * T, chosen_BTK.shape[-1], size, x_1BTD.dtype.itemsize):
            x_ND, weights_NK, chosen_NK = (
                x.reshape(B * T, -1) for x in (x_1BTD, weights_1BTK, chosen_BTK)
            )
            y_PD = rows_by_exchange(x_ND, chosen_NK, own, experts)
            y_ND = _weighted_sum(y_PD, weights_NK)
        else:
            x_1ND, weights_1NK, chosen_1NK = (
                _gathered(x.reshape(1, B * T, -1), group)
                for x in (x_1BTD, weights_1BTK, chosen_BTK)
            )
            first = _number(layout, experts) * own[0].kernel.shape[0]
            y_ND = _own_experts(x_1ND[0], weights_1NK[0], chosen_1NK[0], own, first)
            y_ND = _scattered_sum(y_ND, group)
        return y_ND.astype(x_1BTD.dtype).reshape(1, B, T, D)

    # The tokens of a tensor group are gathered, as before a dense layer.
    x_BTD, weights_BTK, chosen_BTK = (
        layout.constrain(x, "batch", "tokens", None) for x in (x_BTD, weights_BTK, chosen_BTK)
    )
    token = P(parts, rows, tokens)
    placed = (_copied(layout, w, inner, apart) for w, inner in zip(kernels, (2, 2, 1), strict=True))
    copies, specs = zip(*placed, strict=True)
    # All axes are manual: the partitioner cannot split a sort, nor a grouped matmul.
    in_scope = jax.sharding.get_abstract_mesh()
    mesh = layout.mesh.abstract_mesh if in_scope.empty else in_scope
    others = {a for a, size in mesh.shape.items() if size > 1 and a not in mesh.manual_axes}
    # One copy for each device that computes a part. Of one array for all, the gradient would be
    # summed inside the shard_map, and XLA's CPU compiler crashes on such a sum in bfloat16.
    y_SBTD = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(token, token, P(rows, tokens), specs),
        out_specs=token,
        axis_names={*rows, *tokens, *experts, *heads, *others},
        check_vma=False,
    )(
        _copies(layout, parts, x_BTD),
        _copies(layout, parts, weights_BTK),
        chosen_BTK,
        copies,
    )
    if y_SBTD.shape[0] == 1:
        return y_SBTD[0]
    return jax.lax.reduce(y_SBTD, jnp.zeros((), y_SBTD.dtype), jax.lax.add, (0,))


def _copied(
    layout: Layout, weights: Stacked, inner: int, apart: tuple[str, ...]
) -> tuple[Stacked, Stacked]:
    """A copy of the weights for each device along `apart`, and the specs of the copies.

    `inner` is the dim of the kernel that heads split; storage splits the other one. An adapter's
    matrix without an inner dim is shared along heads too.
    """
    experts, heads = layout.axes("expert"), layout.axes("mlp")
    stored = layout.axes("expert_embed")
    far = tuple(axis for axis in apart if axis not in stored)

    def one(x: jax.Array, split: int | None, kept: int | None) -> tuple[jax.Array, P]:
        near = tuple(axis for axis in apart if axis in stored) + (() if split else heads)
        dims = [heads if dim == split else None for dim in (1, 2)]
        x = _copies(layout, far, x)
        if kept and axis_size(layout.mesh, *far) > 1:
            # So the gradient is scattered over `stored` first, and its shards are summed over
            # `far`. Left to itself, the partitioner sums the whole gradient over both.
            held = (stored if dim == kept else own for dim, own in zip((1, 2), dims, strict=True))
            x = _constrained(layout, x, P(far, experts, *held))
        return _copies(layout, near, x), P(near, far, experts, *dims)

    outer = 3 - inner
    of_kernel: Any = weights.kernel
    if isinstance(of_kernel, Quantized):
        values, values_spec = one(of_kernel.values, inner, outer)
        scale, scale_spec = one(of_kernel.scale, 2 if inner == 2 else None, None)
        kernel: Any = Quantized(values, scale)
        kernel_spec: Any = Quantized(values_spec, scale_spec)  # pyright: ignore[reportArgumentType]
    else:
        kernel, kernel_spec = one(of_kernel, inner, outer)
    copies, specs = replace(weights, kernel=kernel), replace(weights, kernel=kernel_spec)
    if weights.bias is not None:
        near = tuple(axis for axis in apart if axis in stored)
        bias = _copies(layout, near, _copies(layout, far, weights.bias))
        copies = replace(copies, bias=bias)
        specs = replace(specs, bias=P(near, far, experts, heads))
    if weights.a is None:
        return copies, specs
    a, a_spec = one(weights.a, *((1, None) if inner == 1 else (None, 1)))
    b, b_spec = one(weights.b, *((2, None) if inner == 2 else (None, 2)))
    return replace(copies, a=a, b=b), replace(specs, a=a_spec, b=b_spec)


def _constrained(layout: Layout, x: jax.Array, spec: P) -> jax.Array:
    in_scope = jax.sharding.get_abstract_mesh()
    mesh = layout.mesh if in_scope.empty else in_scope
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def _copies(layout: Layout, axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(x, (axis_size(layout.mesh, *axes), *x.shape))


def _number(layout: Layout, axes: tuple[str, ...]) -> jax.Array | int:
    """The number of this device along `axes`, inside a shard_map."""
    return jax.lax.axis_index(axes) if axis_size(layout.mesh, *axes) > 1 else 0


def _gathered(x_1N: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return gathered(x_1N, axes) if axes else x_1N


def _scattered_sum(y_ND: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The sum over a group of devices of float32 rows, each row on the device of its token."""
    return jax.lax.psum_scatter(y_ND, axes, scatter_dimension=0, tiled=True) if axes else y_ND


def _own_experts(
    x_ND: jax.Array,
    weights_NK: jax.Array,
    chosen_NK: jax.Array,
    kernels: Kernels,
    first: jax.Array | int,
) -> jax.Array:
    """The part of the sum of those experts whose weights these are, counted from `first` on.

    The result is float32.
    """
    (N, K), num = chosen_NK.shape, kernels[0].kernel.shape[0]
    own_NK = chosen_NK - first
    own_P = jnp.where((own_NK >= 0) & (own_NK < num), own_NK, num).reshape(-1)
    order_P = jnp.argsort(own_P, stable=True)
    place_P = jnp.zeros_like(order_P).at[order_P].set(jnp.arange(N * K), unique_indices=True)
    sizes_E = (own_P[:, None] == jnp.arange(num)).sum(axis=0, dtype=jnp.int32)
    # A token is in one row of each of its experts, so no more rows than these are used.
    rows = N * min(K, num)
    used = sizes_E.sum()
    # Rows after the last expert's belong to no token: they are left out.
    order_M = jnp.where(jnp.arange(rows) < used, order_P[:rows], N * K)
    place_P = jnp.where(place_P < used, place_P, rows)
    x_PD = jnp.broadcast_to(x_ND[:, None], (N, K, x_ND.shape[1])).reshape(N * K, -1)
    y_MD = computed_experts(permuted(x_PD, order_M, place_P), kernels, sizes_E)
    return _weighted_sum(permuted(y_MD, place_P, order_M), weights_NK)


def _weighted_sum(y_PD: jax.Array, weights_NK: jax.Array) -> jax.Array:
    """The sum over the experts of a token, float32."""
    y_NKD = y_PD.reshape(*weights_NK.shape, -1)
    return jnp.einsum("NKD,NK->ND", y_NKD.astype(jnp.float32), weights_NK)


@jax.custom_vjp
def _one_by_one(
    x_CD: jax.Array, weights_CK: jax.Array, chosen_CK: jax.Array, kernels: Kernels
) -> jax.Array:
    """The weighted sum over the chosen experts, float32: each computes all rows, in their order.

    The gradient equals `_own_experts`', which computes the rows of each expert alone.
    """

    def add(y_CD: jax.Array, expert: Any) -> tuple[jax.Array, None]:
        number, one = expert
        chose_CK = chosen_CK == number
        weight_C1 = jnp.where(chose_CK, weights_CK, 0).sum(axis=1, keepdims=True)
        found_CD = computed_experts(x_CD, one, jnp.full(1, len(x_CD), jnp.int32))
        sum_CD, found_CD = jax.lax.optimization_barrier((y_CD, found_CD.astype(jnp.float32)))
        return jnp.where(chose_CK.any(axis=1)[:, None], sum_CD + found_CD * weight_C1, sum_CD), None

    # A dim of one expert, of which a grouped matmul makes a plain one.
    each = jax.tree.map(lambda w: w[:, None], kernels)
    number = jnp.arange(kernels[0].kernel.shape[0])
    return jax.lax.scan(add, jnp.zeros(x_CD.shape, jnp.float32), (number, each))[0]


def _one_by_one_backward(residuals: Any, gradient_CD: jax.Array) -> Any:
    x_CD, weights_CK, chosen_CK, kernels = residuals

    def own(x_CD: jax.Array, weights_CK: jax.Array, kernels: Kernels) -> jax.Array:
        return _own_experts(x_CD, weights_CK, chosen_CK, kernels, first=0)

    of_x, of_weights, of_kernels = jax.vjp(own, x_CD, weights_CK, kernels)[1](gradient_CD)
    return of_x, of_weights, None, of_kernels


_one_by_one.defvjp(lambda *operands: (_one_by_one(*operands), operands), _one_by_one_backward)
