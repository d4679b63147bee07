"""AdamW with a schedule. The global-norm clip is in the train step, which reports the norm."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxrl_llm.config import OptimizerConfig
from jaxrl_llm.distributed.sharding import in_host_memory
from jaxrl_llm.learner.train_state import of_moments
from jaxrl_llm.numerics import round_by_chance

AT_ONCE = 2  # parameters whose offloaded moments are on the device at the same time

Step = Callable[[list[Array]], tuple[Array, list[Array]]]  # both moments -> update, both moments


def schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Learning rate of an optimizer step (0-based): linear warm-up, then the named decay.

    Linear and cosine end at `total_steps`, unless the config gives another number. The warm-up
    begins at 1/warmup_steps, so that the first step has a rate above 0.
    """
    peak, end = config.learning_rate, config.learning_rate * config.min_learning_rate_ratio
    decay_steps = max((config.total_steps or total_steps) - config.warmup_steps, 1)
    if config.schedule == "constant":
        decay = optax.constant_schedule(peak)
    elif config.schedule == "linear":
        decay = optax.linear_schedule(peak, end, decay_steps)
    else:
        decay = optax.cosine_decay_schedule(peak, decay_steps, config.min_learning_rate_ratio)
    if config.warmup_steps == 0:
        return decay
    start = peak / config.warmup_steps
    warmup = optax.linear_schedule(start, peak, max(config.warmup_steps - 1, 1))
    return optax.join_schedules([warmup, decay], [config.warmup_steps])


def make_optimizer(
    config: OptimizerConfig, total_steps: int
) -> optax.GradientTransformationExtraArgs:
    """AdamW (Loshchilov & Hutter 2019). Weight decay applies to every parameter, as in verl.

    `update` also takes `finite`: whether the step counts; see `_adam`.
    """
    return optax.chain(
        _adam(config),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(schedule(config, total_steps)),
    )


def _adam(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """m / (sqrt(v) + eps) of the bias-corrected moments (Kingma & Ba 2015), a parameter at a time.

    Moments stay in their memory, on the device or offloaded. Those of a balance bias are None.
    Guarantees: a step that is not `finite` leaves offloaded moments as they were. For moments on
    the device the caller selects.
    """
    narrow = config.moment_dtype == "bfloat16"

    def init(params: Any) -> optax.ScaleByAdamState:
        def zeros() -> Any:
            return of_moments(lambda x: jnp.zeros_like(x, config.moment_dtype), params)

        return optax.ScaleByAdamState(count=jnp.zeros((), jnp.int32), mu=zeros(), nu=zeros())

    # Traced and lowered once a shape, not once a parameter. XLA inlines it again.
    @jax.jit
    def step(
        count: Array,
        factors: tuple[Array, Array],
        streams: tuple[Array, Array],
        gradient: Array,
        moments: list[Array],
    ) -> tuple[Array, list[Array]]:
        gradient, mu, nu = (x.astype(jnp.float32) for x in (gradient, *moments))
        mu = config.b1 * mu + (1 - config.b1) * gradient
        nu = config.b2 * nu + (1 - config.b2) * jnp.square(gradient)
        first, second = (x * factor for x, factor in zip((mu, nu), factors, strict=True))
        if narrow:
            mu, nu = (
                round_by_chance(moment, count, stream)
                for moment, stream in zip((mu, nu), streams, strict=True)
            )
        return first / (jnp.sqrt(second) + config.eps), [mu, nu]

    def update(
        updates: Any, state: Any, params: Any = None, *, finite: Any = True
    ) -> tuple[Any, Any]:
        del params
        count = state.count + 1
        factors = _unbiased(config.b1, count), _unbiased(config.b2, count)
        leaves, structure = jax.tree.flatten(updates)
        mus, nus = structure.flatten_up_to(state.mu), structure.flatten_up_to(state.nu)

        results: list[Array] = []
        kept: list[list[Any]] = []
        fetched: list[list[Any]] = []  # new moments of offloaded parameters
        for i, (mu, nu) in enumerate(zip(mus, nus, strict=True)):
            if mu is None:
                results.append(jnp.zeros_like(leaves[i]))
                kept.append([None, None])
                continue
            streams = jnp.uint32(i), jnp.uint32(i + len(leaves))
            visit: Step = partial(step, count, factors, streams, leaves[i])
            if in_host_memory(mu):
                late = len(fetched) >= AT_ONCE
                visit = _visit(visit, finite, after=fetched[-AT_ONCE] if late else finite)
            result, new = visit([mu, nu])
            if in_host_memory(mu):
                fetched.append(new)
            results.append(result)
            kept.append(new)
        mu, nu = (structure.unflatten(moments) for moments in zip(*kept, strict=True))
        return structure.unflatten(results), optax.ScaleByAdamState(count=count, mu=mu, nu=nu)

    return optax.GradientTransformationExtraArgs(init, update)


def _unbiased(decay: float, count: Array) -> Array:
    """1 / (1 - decay^count), by which a moment of float32 grows: it begins at 0."""
    # A factor, not a division: programs divide differently, and results would depend on whether
    # moments are offloaded.
    return 1 / (1 - jnp.float32(decay) ** count)


def _visit(step: Step, finite: Array, *, after: Any) -> Step:
    """`step` for offloaded moments: they are fetched to the device for it and then put back.

    They are fetched once `after` is computed. Without an order the compiler fetches the moments of
    all parameters first, and all would be on the device at once.
    """

    def visit(stored: list[Array]) -> tuple[Array, list[Array]]:
        stored, _ = jax.lax.optimization_barrier((stored, after))
        old = jax.device_put(stored, jax.memory.Space.Device)
        result, new = step(old)
        chosen = [jnp.where(finite, x, y) for x, y in zip(new, old, strict=True)]
        return result, jax.device_put(chosen, jax.memory.Space.Host)

    return visit
