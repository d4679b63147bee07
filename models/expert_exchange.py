"""All-to-all of (token, expert) rows between the devices that split the experts of a layer.

Each device sends a row only to the device that has its expert, and gets the expert's output back.
Shapes are static, and no row is dropped. Rows go in rounds. In each, every device sends up to
`round_rows` rows to every other one. Balanced routings need one round. The devices agree on the
number of rounds first.

Shape letters: N tokens of a device, K experts of a token, P = N * K rows of a device, G devices,
C rows of a round from one device to another, S = G * C, D hidden, E experts of a device.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxrl_llm.models.expert_dispatch import round_rows
from jaxrl_llm.models.expert_rows import Kernels, computed_experts, permuted
from jaxrl_llm.models.layers import PROJECTION

Axes = tuple[str, ...]


def rows_by_exchange(
    x_ND: jax.Array, chosen_NK: jax.Array, kernels: Kernels, axes: Axes
) -> jax.Array:
    """The outputs [P, D] of the chosen experts, 0 for padding, inside a shard_map over `axes`.

    `kernels` belong to this device's experts. `chosen_NK` counts the experts of all devices; other
    numbers are padding.
    """
    plan = _plan(chosen_NK, kernels[0].kernel.shape[0], axes)
    return checkpoint_name(_exchanged(x_ND, kernels, plan, axes), PROJECTION)


class _Plan(NamedTuple):
    """The place of each row of this device in the exchange."""

    expert_P: jax.Array  # number of the expert on its device; E for padding
    rows_P: jax.Array  # the rows, by device and expert; padding at the end
    counts_G: jax.Array  # rows of a device
    starts_G: jax.Array  # begin of each device's rows in `rows_P`
    round_P: jax.Array  # round of a row; -1 for padding
    slot_P: jax.Array  # place of a row among the S rows of a round
    rounds: jax.Array  # number of rounds, equal on all devices

    @property
    def round_rows(self) -> int:
        return round_rows(self.rows_P.shape[0], self.counts_G.shape[0])


def _plan(chosen_NK: jax.Array, num: int, axes: Axes) -> _Plan:
    G, P = jax.lax.axis_size(axes), chosen_NK.size
    C = round_rows(P, G)
    chosen_P = chosen_NK.reshape(-1)
    is_expert_P = (chosen_P >= 0) & (chosen_P < G * num)
    chosen_P = jnp.where(is_expert_P, chosen_P, G * num)
    device_P = chosen_P // num
    rows_P = jnp.argsort(chosen_P, stable=True)
    place_P = jnp.zeros_like(rows_P).at[rows_P].set(jnp.arange(P), unique_indices=True)
    counts_G = (device_P[:, None] == jnp.arange(G)).sum(axis=0, dtype=jnp.int32)
    starts_G = jnp.cumsum(counts_G) - counts_G
    number_P = place_P - starts_G[jnp.minimum(device_P, G - 1)]  # among its device's rows
    return _Plan(
        expert_P=jnp.where(is_expert_P, chosen_P % num, num),
        rows_P=rows_P,
        counts_G=counts_G,
        starts_G=starts_G,
        round_P=jnp.where(is_expert_P, number_P // C, -1),
        slot_P=jnp.where(is_expert_P, device_P * C + number_P % C, 0),
        rounds=jax.lax.pmax((counts_G.max() + C - 1) // C, axes),
    )


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _exchanged(x_ND: jax.Array, kernels: Kernels, plan: _Plan, axes: Axes) -> jax.Array:
    def one_round(number: jax.Array, y_PD: jax.Array) -> jax.Array:
        x_SD, expert_S, _ = _sent(x_ND, kernels, plan, number)
        return _received(y_PD, _remote(x_SD, kernels, expert_S, axes), plan, number)

    y_PD = jnp.zeros((plan.rows_P.shape[0], x_ND.shape[1]), x_ND.dtype)
    return jax.lax.fori_loop(0, plan.rounds, one_round, y_PD)


def _exchanged_backward(axes: Axes, residuals: Any, gradient_PD: jax.Array) -> Any:
    """Rows are sent and multiplied again. Gradients of weights are added up in float32."""
    x_ND, kernels, plan = residuals
    learned = tuple(each.learned for each in kernels)

    def remote(x_SD: jax.Array, learned: Any, expert_S: jax.Array) -> jax.Array:
        now: Any = tuple(w.with_learned(own) for w, own in zip(kernels, learned, strict=True))
        return _remote(x_SD, now, expert_S, axes)

    def one_round(number: jax.Array, sums: Any) -> Any:
        of_x_PD, of_learned = sums
        x_SD, expert_S, rows_S = _sent(x_ND, kernels, plan, number)
        _, gradient = jax.vjp(partial(remote, expert_S=expert_S), x_SD, learned)
        of_x_SD, of_round = gradient(_taken(gradient_PD, rows_S))
        of_learned = jax.tree.map(jnp.add, of_learned, of_round)
        return _received(of_x_PD, of_x_SD, plan, number), of_learned

    zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), learned)
    start = (jnp.zeros_like(gradient_PD), zeros)
    of_x_PD, of_learned = jax.lax.fori_loop(0, plan.rounds, one_round, start)
    of_x_NKD = of_x_PD.reshape(x_ND.shape[0], -1, x_ND.shape[1])
    of_x_ND = of_x_NKD.sum(axis=1, dtype=jnp.float32).astype(x_ND.dtype)
    of_learned = jax.tree.map(lambda g, w: g.astype(w.dtype), of_learned, learned)
    of_kernels = tuple(
        jax.tree.map(jnp.zeros_like, w).with_learned(g)
        for w, g in zip(kernels, of_learned, strict=True)
    )
    return of_x_ND, of_kernels, None


_exchanged.defvjp(lambda *operands: (_exchanged(*operands), operands[:3]), _exchanged_backward)


def _sent(
    x_ND: jax.Array, kernels: Kernels, plan: _Plan, number: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The inputs that this device sends in a round, 0 in empty places, their experts and rows."""
    P, C = plan.rows_P.shape[0], plan.round_rows
    within_C = number * C + jnp.arange(C)
    place_GC = plan.starts_G[:, None] + within_C
    rows_GC = plan.rows_P[jnp.minimum(place_GC, P - 1)]
    rows_S = jnp.where(within_C < plan.counts_G[:, None], rows_GC, P).reshape(-1)
    K = P // x_ND.shape[0]
    expert_S = plan.expert_P.at[rows_S].get(mode="fill", fill_value=kernels[0].kernel.shape[0])
    return _taken(x_ND, rows_S // K), expert_S, rows_S


def _taken(x: jax.Array, rows_S: jax.Array) -> jax.Array:
    """These rows of x; 0 where there is none."""
    return jnp.take(x, rows_S, axis=0, mode="fill", fill_value=0)


def _received(y_PD: jax.Array, y_SD: jax.Array, plan: _Plan, number: jax.Array) -> jax.Array:
    """`y_PD` with the rows of a round."""
    return jnp.where((plan.round_P == number)[:, None], y_SD[plan.slot_P], y_PD)


def _remote(x_SD: jax.Array, kernels: Kernels, expert_S: jax.Array, axes: Axes) -> jax.Array:
    """The outputs of rows, each computed by the device that its place says."""
    exchange = partial(jax.lax.all_to_all, axis_name=axes, split_axis=0, concat_axis=0, tiled=True)
    expert_S = exchange(expert_S)
    order_S = jnp.argsort(expert_S, stable=True)
    place_S = jnp.zeros_like(order_S).at[order_S].set(jnp.arange(order_S.size), unique_indices=True)
    sizes_E = (expert_S[:, None] == jnp.arange(kernels[0].kernel.shape[0])).sum(0, dtype=jnp.int32)
    y_SD = computed_experts(permuted(exchange(x_SD), order_S, place_S), kernels, sizes_E)
    return exchange(permuted(y_SD, place_S, order_S))
