"""The one train step: gradients accumulated over micro-batches, clipped, applied.

SFT, reward modelling and RL differ only in the loss that they give. A loss returns its
contribution to the mean over the whole global mini-batch (it is given that batch's counts), so
contributions add and accumulation equals the full batch to rounding.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxrl_llm.distributed.sharding import in_host_memory
from jaxrl_llm.learner.micro_batches import MicroBatches, split_micro_batches
from jaxrl_llm.learner.rows import Fields
from jaxrl_llm.learner.train_state import CastAhead, Params, TrainState, cast
from jaxrl_llm.models.layers import Weight

Metrics = dict[str, Array]
# (parameters, part) -> (value, Metrics; see `accumulate`). A leaf may be a `Weight`, so a loss
# reads parameters by `forward.prepare`, or a leaf by `[...]`.
Loss = Callable[[Params, Any], tuple[Array, Any]]
Measure = Callable[[Any, Fields], Metrics]
NONFINITE = "nonfinite_gradients"  # bool a parameter; the loop turns it into names


def accumulate(
    loss: Loss,
    params: Params,
    batch: Fields,
    *,
    cast_ahead: CastAhead | None,
    micro_batches: MicroBatches,
    measure: Measure | None = None,
) -> tuple[Params, Metrics]:
    """Sum of gradients and of metrics over the micro-batches of `batch`.

    Gradients are summed in float32. The loss gets parameters as they are stored, or in the dtype
    of `cast_ahead` (see `ForwardSettings`). The metric `micro_batches` counts the parts, `row_use`
    says how full their rows are. With `measure` the loss gives a pair: its metrics, and arrays with
    one entry a sample, of which, once they are there for the whole batch, `measure` makes more
    metrics.
    """
    computed, of_computed = params, loss
    if cast_ahead is not None:
        copies = cast(params, cast_ahead.dtype)
        if cast_ahead.float32_gradients and micro_batches.adds_up:
            of_computed = _of_weights(loss, copies)
        else:
            computed = copies
    grad = jax.value_and_grad(of_computed, has_aux=True)

    def run(part: Fields) -> tuple[Any, Any]:
        (value, metrics), grads = grad(computed, part)
        metrics, samples = (metrics, ()) if measure is None else metrics
        metrics = metrics | {"loss": value, "micro_batches": jnp.float32(1)}
        return (jax.tree.map(lambda x: x.astype(jnp.float32), grads), metrics), samples

    (grads, metrics), samples = micro_batches.walk(run, batch)
    metrics["row_use"] = micro_batches.row_use(batch)
    return grads, metrics if measure is None else metrics | measure(samples, batch)


def _of_weights(loss: Loss, copies: Params) -> Loss:
    """The loss by the stored parameters, computed with their copies in another dtype."""

    def weight(stored: Array, computed: Array) -> Any:
        wider = stored.dtype == jnp.float32 and computed.dtype != jnp.float32
        return Weight(stored, computed) if wider else stored

    return lambda params, part: loss(jax.tree.map(weight, params, copies), part)


def apply_gradients(
    state: TrainState,
    grads: Params,
    *,
    optimizer: optax.GradientTransformationExtraArgs,
    learning_rate: optax.Schedule,
    max_grad_norm: float,
) -> tuple[TrainState, Metrics]:
    """Clip by the global norm and apply. A gradient that is not finite leaves the state as it was.

    The metrics name the guilty parameters (one flag a leaf, in tree order), so that the run
    stops with the last good state in hand.
    """
    squares = jnp.stack([jnp.square(g).sum() for g in jax.tree.leaves(grads)])
    norm = jnp.sqrt(squares.sum())
    finite = jnp.isfinite(norm)
    scale = jnp.minimum(1.0, max_grad_norm / (norm + 1e-6))
    scaled = jax.tree.map(lambda g, p: (g * scale).astype(p.dtype), grads, state.params)
    updates, opt_state = optimizer.update(scaled, state.opt_state, state.params, finite=finite)
    updated = TrainState(
        params=optax.apply_updates(state.params, updates),
        opt_state=opt_state,
        step=state.step + 1,
    )
    # What the host keeps was chosen when it was on the device.
    kept = jax.tree.map(
        lambda new, old: new if in_host_memory(new) else jnp.where(finite, new, old),
        updated,
        state,
    )
    # Finite gradients whose squares overflow count too; where only their sum does, all are named.
    flags = ~jnp.isfinite(squares)
    flags |= ~finite & ~flags.any()
    lr = jnp.asarray(learning_rate(state.step), jnp.float32)
    metrics = {"grad_norm": norm, "lr": lr, NONFINITE: flags}
    return kept, metrics


def train_step(
    state: TrainState,
    batch: Any,
    *,
    loss: Loss,
    optimizer: optax.GradientTransformationExtraArgs,
    learning_rate: optax.Schedule,
    max_grad_norm: float,
    cast_ahead: CastAhead | None,
    micro_batches: MicroBatches,
    measure: Measure | None = None,
) -> tuple[TrainState, Metrics]:
    """One optimizer step on a global mini-batch whose rows are the leading axis of every array.

    For `cast_ahead` and `measure` see `accumulate`.
    """
    grads, metrics = accumulate(
        loss,
        state.params,
        batch,
        cast_ahead=cast_ahead,
        micro_batches=micro_batches,
        measure=measure,
    )
    state, norms = apply_gradients(
        state,
        grads,
        optimizer=optimizer,
        learning_rate=learning_rate,
        max_grad_norm=max_grad_norm,
    )
    return state, metrics | norms


def over_mini_batches(
    state: TrainState,
    batch: Any,
    *,
    step: Callable[[TrainState, Any, Array], tuple[TrainState, Metrics]],
    num_mini_batches: int,
    num_epochs: int,
    shard: Callable[[Any], Any],
    shuffle_key: Array | None = None,
) -> tuple[TrainState, Metrics]:
    """`num_epochs` passes over consecutive mini-batches; metrics [epochs * mini-batches] each.

    `step(state, mini_batch, first)` is told with a bool array whether the parameters are still
    those that the iteration began with. `shuffle_key` puts the samples in a random order, another
    in each epoch, before they are divided.
    """
    if num_mini_batches == 1 and num_epochs == 1:
        state, metrics = step(state, batch, jnp.bool_(True))
        return state, jax.tree.map(lambda x: x[None], metrics)
    num_stacked = num_mini_batches
    if shuffle_key is not None:
        num_samples = jax.tree.leaves(batch)[0].shape[0]
        keys = jax.random.split(shuffle_key, num_epochs)
        orders = [jax.random.permutation(key, num_samples) for key in keys]
        batch = jax.tree.map(lambda x: x[jnp.concatenate(orders)], batch)
        num_stacked *= num_epochs
    stacked = shard(split_micro_batches(batch, num_stacked))

    def body(state: TrainState, position: Array):
        mini_batch = jax.tree.map(lambda x: x[position % num_stacked], stacked)
        return step(state, mini_batch, position == 0)

    return jax.lax.scan(body, state, jnp.arange(num_mini_batches * num_epochs))
