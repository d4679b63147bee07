"""The one train step: gradients are accumulated over micro-batches, clipped and applied.

SFT, reward modelling and RL differ only in the loss. A loss returns its contribution to the mean
over the whole global mini-batch, whose counts it is given. So contributions add up, and
accumulation equals the full batch to rounding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxrl_llm.distributed.communication import MICRO_BATCHES
from jaxrl_llm.distributed.sharding import in_host_memory
from jaxrl_llm.learner.data_groups import DataGroups, Loss
from jaxrl_llm.learner.forward import LARGEST_PART, MEAN_PART
from jaxrl_llm.learner.losses import NONFINITE, PolicyLoss
from jaxrl_llm.learner.micro_batches import (
    MicroBatches,
    Parts,
    nth,
    split_micro_batches,
    zeros_of,
)
from jaxrl_llm.learner.offline_losses import RecordLoss
from jaxrl_llm.learner.optimizer import Optimizer
from jaxrl_llm.learner.router_balance import balanced
from jaxrl_llm.learner.router_losses import COUNTS, OWN_COUNTS, load_metrics
from jaxrl_llm.learner.rows import Fields
from jaxrl_llm.learner.train_state import CastAhead, Metrics, Params, TrainState
from jaxrl_llm.models.casting import cast
from jaxrl_llm.models.layers import Weight
from jaxrl_llm.models.lora import DROPOUT, Lora, join, merged_ahead

Measure = Callable[[Any, Fields], Metrics]


@dataclass(frozen=True, kw_only=True)
class Base:
    """The frozen parameters below adapters, and the dtype that they are computed in."""

    params: Params
    lora: Lora
    dtype: str
    float32_head: tuple[str, ...] = ()  # path of the head's weights, where they stay float32
    key: Array | None = None  # key of dropout, for the role and the run

    def with_dropout(self, params: Params, step: int | Array, index: int | Array) -> Params:
        """`params` for one micro-batch: with the key of its dropout, if there is any."""
        if self.key is None or not self.lora.dropout:
            return params
        key = jax.random.fold_in(jax.random.fold_in(self.key, step), index)
        return params | {DROPOUT: key}

    def of_step(self, own: Params) -> Params:
        """The parameters that an optimizer step joins `own` to, merged where the adapters merge."""
        if not self.lora.merges_updates:
            return cast(self.params, self.dtype, self.float32_head)
        merged = merged_ahead(join(self.params, own), self.lora, self.dtype)
        return cast(merged, self.dtype, self.float32_head)


@dataclass(frozen=True, kw_only=True)
class MiniBatches:
    """The samples of an iteration in the order in which optimizer steps take them."""

    fields: Fields  # the batch itself, or stacked: [num, B / num_mini_batches, ...]
    num: int  # distinct mini-batches: steps after the last begin again with the first

    def at(self, position: int | Array) -> Fields:
        """The mini-batch of optimizer step `position`, counted from 0."""
        return self.fields if self.num == 1 else nth(self.fields, position % self.num)


def mini_batches(
    fields: Fields,
    *,
    num_mini_batches: int,
    num_epochs: int,
    shard: Callable[[Any], Any],
    shuffle_key: Array | None = None,
) -> MiniBatches:
    """Cut `fields` into consecutive mini-batches of equal size.

    `shuffle_key` first puts the samples in a random order, another one in each epoch. `shard`
    spreads each mini-batch of the stacked arrays over the mesh.
    """
    if num_mini_batches == 1 and num_epochs == 1:
        return MiniBatches(fields=fields, num=1)
    num = num_mini_batches
    if shuffle_key is not None:
        num_samples = jax.tree.leaves(fields)[0].shape[0]
        keys = jax.random.split(shuffle_key, num_epochs)
        orders = [jax.random.permutation(key, num_samples) for key in keys]
        fields = jax.tree.map(lambda x: x[jnp.concatenate(orders)], fields)
        num *= num_epochs
    stacked = split_micro_batches(fields, num)
    return MiniBatches(fields=shard(stacked) if num > 1 else nth(shard(stacked), 0), num=num)


def train_step(
    state: TrainState,
    position: int | Array,
    *,
    batches: MiniBatches,
    loss: Loss,
    optimizer: optax.GradientTransformationExtraArgs | Optimizer,
    learning_rate: optax.Schedule | None,
    max_grad_norm: float,
    cast_ahead: CastAhead | None,
    micro_batches: MicroBatches,
    measure: Measure | None = None,
    base: Base | None = None,
    groups: DataGroups | None = None,
) -> tuple[TrainState, Metrics]:
    """One optimizer step, on mini-batch `position`.

    For `cast_ahead`, `measure`, `base` and `groups` see `accumulate`.
    """
    batch = loss.inputs(batches.at(position), position == 0)
    grads, metrics = accumulate(
        loss,
        state.params,
        batch,
        cast_ahead=cast_ahead,
        micro_batches=micro_batches,
        measure=measure,
        base=base,
        step=state.step,
        groups=groups,
    )
    counts, rate = metrics.pop(OWN_COUNTS, None), 0.0
    if isinstance(loss, PolicyLoss | RecordLoss):
        rate = loss.router.bias_rate
    state, norms = apply_gradients(
        state,
        grads,
        optimizer=optimizer,
        learning_rate=learning_rate,
        max_grad_norm=max_grad_norm,
        balance=(counts, rate),
    )
    return state, metrics | norms


def accumulate(
    loss: Loss,
    params: Params,
    batch: Fields,
    *,
    cast_ahead: CastAhead | None,
    micro_batches: MicroBatches,
    measure: Measure | None = None,
    base: Base | None = None,
    step: int | Array = 0,
    groups: DataGroups | None = None,
) -> tuple[Params, Metrics]:
    """Sum of gradients and of metrics over the micro-batches of `batch`.

    Gradients are summed in float32. The loss gets parameters as they are stored, or in the dtype of
    `cast_ahead` (see `ForwardSettings`). The metric `micro_batches` counts the parts, `row_use`
    says how full their rows are. Where rows are split over devices, `attention_balance` is the work
    of a row's largest part over the mean. With `measure` the loss returns a pair in place of its
    metrics: the metrics, and arrays with one entry a sample. `measure` makes more metrics of these
    arrays once they are complete. The metric OWN_COUNTS is for `apply_gradients`. `base` has frozen
    parameters, which `params` are joined to; `step` draws its dropout. With `groups` the gradients
    of several micro-batches are summed over `data` once.
    """
    parts = micro_batches.split(batch)
    fixed = None if base is None else base.of_step(params)
    several = micro_batches.adds_up
    if groups is not None and several:
        sums = partial(_sums_of_group, loss=loss, groups=groups, base=base, measure=measure)
        totals, collected = groups.mapped(sums, parts)(parts, (params, fixed, step))
        grads, metrics = jax.tree.map(lambda x: x.sum(axis=0), totals)
        metrics["micro_batches"] = jnp.asarray(parts.num, jnp.float32)  # not of all groups
    else:
        computed = _computed(params, cast_ahead, loss, several=several)
        each = _Sums(loss, parts, computed, fixed, step, base=base, measure=measure)
        if isinstance(parts.num, int) and parts.num == 1:
            sums_and_samples = each.add(0, None)
        else:
            first = each.first(jax.eval_shape(partial(each.add, total=None), jnp.int32(0)))
            with jax.named_scope(MICRO_BATCHES):
                sums_and_samples = jax.lax.fori_loop(0, parts.num, each.add, first)
        (grads, metrics), collected = sums_and_samples
    samples = parts.samples(collected)
    metrics["row_use"] = micro_batches.row_use(batch)
    if LARGEST_PART in metrics:
        metrics["attention_balance"] = metrics.pop(LARGEST_PART) / metrics.pop(MEAN_PART)
    if COUNTS in metrics:
        metrics |= load_metrics(metrics.pop(COUNTS))
    return grads, metrics if measure is None else metrics | measure(samples, batch)


def _sums_of_group(
    parts: Parts,
    shared: tuple[Params, Params | None, int | Array],
    *,
    loss: Loss,
    groups: DataGroups,
    base: Base | None,
    measure: Measure | None,
) -> tuple[Any, Any]:
    """The totals of a group of devices along `data`, and what is collected of its samples.

    `shared` are the parameters that learn, what they are joined to, and the step.
    """
    params, fixed, step = shared
    computed = _computed(params, groups.settings.cast_ahead, loss, several=True)
    own = parts.of_group(groups.shard)
    each = _Sums(groups.loss(loss), own, computed, fixed, step, base=base, measure=measure)
    first = each.first(jax.eval_shape(partial(each.add, total=None), jnp.int32(0)))
    with jax.named_scope(MICRO_BATCHES):
        totals, collected = jax.lax.fori_loop(0, own.num, each.add, first)
    return jax.tree.map(lambda x: x[None], totals), collected


@dataclass(frozen=True)
class _Sums:
    """The gradients and metrics of the parts of a mini-batch, added up one by one."""

    loss: Loss
    parts: Parts
    computed: Params
    fixed: Params | None  # what an optimizer step joins them to
    step: int | Array
    base: Base | None
    measure: Measure | None

    def add(self, index: int | Array, total: Any) -> Any:
        """One micro-batch, added to the total of those before; None where it is the first."""
        part = self.parts.at(index)
        if self.base is None:
            gradient = jax.value_and_grad(self.loss, has_aux=True)
            (value, aux), grads = gradient(self.computed, part)
        else:
            fixed = self.base.with_dropout(self.fixed, self.step, index)
            gradient = jax.value_and_grad(self.joined_loss, has_aux=True)
            (value, aux), grads = gradient(self.computed, fixed, part)
        metrics, samples = (aux, ()) if self.measure is None else aux
        metrics = metrics | {"loss": value, "micro_batches": jnp.float32(1)}
        sums = (_in_float32(grads), metrics)
        if total is None:
            return sums, samples
        return jax.tree.map(jnp.add, total[0], sums), self.parts.put(total[1], samples, index)

    def joined_loss(self, own: Params, fixed: Params, part: Fields) -> tuple[Array, Any]:
        """The loss of the parameters that learn, joined to the base."""
        return self.loss(join(fixed, own), part)

    def first(self, shapes: Any) -> Any:
        """A total of zeros; `shapes` are the results of one micro-batch."""
        sums, samples = shapes
        return zeros_of(sums), self.parts.empty(samples)


def _computed(params: Params, ahead: CastAhead | None, loss: Loss, *, several: bool) -> Params:
    """The parameters that every micro-batch computes with: cast ahead, or as they are stored."""
    if ahead is None:
        return params
    computed = cast(params, ahead.dtype, loss.spec.float32_head)
    if ahead.float32_gradients and several:
        computed = jax.tree.map(_with_stored, params, computed)
    return computed


def _with_stored(stored: Array, computed: Array) -> Any:
    """The copy to compute with, joined to its parameter where the gradient is to be float32."""
    wider = stored.dtype == jnp.float32 and computed.dtype != jnp.float32
    return Weight(stored, computed) if wider else stored


def _in_float32(grads: Any) -> Params:
    """The gradients of the stored parameters, float32."""

    def one(gradient: Any) -> Array:
        own = gradient.stored if isinstance(gradient, Weight) else gradient
        return own.astype(jnp.float32)

    return jax.tree.map(one, grads, is_leaf=lambda x: isinstance(x, Weight))


def apply_gradients(
    state: TrainState,
    grads: Params,
    *,
    optimizer: optax.GradientTransformationExtraArgs | Optimizer,
    learning_rate: optax.Schedule | None,
    max_grad_norm: float,
    balance: tuple[Array | None, float] = (None, 0.0),
) -> tuple[TrainState, Metrics]:
    """Clip by the global norm and apply. `balance`: the counts and the rate of `balanced`.

    Guarantees: a gradient that is not finite leaves the state as it was. The metric NONFINITE then
    flags its parameters (one flag a leaf, in tree order).
    """
    squares = jnp.stack([jnp.square(g).sum() for g in jax.tree.leaves(grads)])
    norm = jnp.sqrt(squares.sum())
    finite = jnp.isfinite(norm)
    scale = jnp.minimum(1.0, max_grad_norm / (norm + 1e-6))
    scaled = jax.tree.map(lambda g, p: (g * scale).astype(p.dtype), grads, state.params)
    updates, opt_state = optimizer.update(scaled, state.opt_state, state.params, finite=finite)
    updated = TrainState(
        params=balanced(optax.apply_updates(state.params, updates), state.params, *balance),
        opt_state=opt_state,
        step=state.step + 1,
    )
    # Optimizer state in host memory was selected while it was on the device.
    kept = jax.tree.map(
        lambda new, old: new if in_host_memory(new) else jnp.where(finite, new, old),
        updated,
        state,
    )
    # Finite gradients whose squares overflow count too. If only their sum overflows, all are named.
    flags = ~jnp.isfinite(squares)
    flags |= ~finite & ~flags.any()
    metrics = {"grad_norm": norm, NONFINITE: flags}
    if learning_rate is not None:
        metrics["lr"] = jnp.asarray(learning_rate(state.step), jnp.float32)
    return kept, metrics
