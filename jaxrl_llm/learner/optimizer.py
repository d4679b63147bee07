"""Optimizers with a schedule. The global-norm clip is in the train step, which reports the norm."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxrl_llm import references
from jaxrl_llm.config import OptimizerConfig
from jaxrl_llm.config.optimizers import is_transformation
from jaxrl_llm.distributed.sharding import in_host_memory
from jaxrl_llm.learner.train_state import of_moments
from jaxrl_llm.numerics import round_by_chance
from jaxrl_llm.typed_records.python_objects import Given

AT_ONCE = 2  # parameters whose offloaded moments are on the device at the same time

Step = Callable[[list[Array]], tuple[Array, list[Array]]]  # both moments -> update, both moments


def schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Learning rate of an optimizer step (0-based): linear warm-up, then the named decay.

    Linear and cosine end at `total_steps`, unless the config gives another number. The warm-up
    begins at 1/warmup_steps, so that the first step has a rate above 0. A function of yours gets
    the peak and the number of steps after the warm-up; its schedule begins with 0 there.
    """
    peak, end = config.learning_rate, config.learning_rate * config.min_learning_rate_ratio
    decay_steps = max((config.total_steps or total_steps) - config.warmup_steps, 1)
    if config.schedule == "constant":
        decay = optax.constant_schedule(peak)
    elif config.schedule == "linear":
        decay = optax.linear_schedule(peak, end, decay_steps)
    elif config.schedule == "cosine":
        decay = optax.cosine_decay_schedule(peak, decay_steps, config.min_learning_rate_ratio)
    else:
        decay = _own(config.schedule, peak, decay_steps)
    if config.warmup_steps == 0:
        return decay
    start = peak / config.warmup_steps
    warmup = optax.linear_schedule(start, peak, max(config.warmup_steps - 1, 1))
    return optax.join_schedules([warmup, decay], [config.warmup_steps])


def reported_schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule | None:
    """The learning rate as a metric; None for an object of optax, whose rate nobody can read."""
    is_object = isinstance(config.name, Given) and is_transformation(config.name.function)
    return None if is_object else schedule(config, total_steps)


def make_optimizer(
    config: OptimizerConfig, total_steps: int, axes: Any = None
) -> optax.GradientTransformationExtraArgs:
    """The optimizer that a config names. Weight decay applies to every parameter, as in verl.

    `axes` are the logical axes of the parameters, which muon needs to see their matrices. `update`
    also takes `finite`: whether the step counts; see `_adam`.
    """
    rate = schedule(config, total_steps)
    dtype = config.moment_dtype
    last = optax.add_decayed_weights(config.weight_decay), optax.scale_by_learning_rate(rate)
    if config.name == "adamw":
        return optax.chain(_adam(config), *last)
    if config.name == "muon":
        return _offloadable(_muon(config, rate, axes))
    if config.name == "lion":
        b2 = 0.99 if config.b2 is None else config.b2
        return _offloadable(optax.chain(optax.scale_by_lion(config.b1, b2, dtype), *last))
    if config.name == "sgd":
        return _offloadable(optax.chain(optax.trace(config.b1, accumulator_dtype=dtype), *last))
    if config.name == "adafactor":
        # As transformers' Trainer sets it: the rate is no multiple of a parameter's own scale.
        scaled = optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0)
        return _offloadable(optax.chain(*scaled, *last))
    return _offloadable(_own(config.name, rate))


def _own(name: str | Given, *arguments: Any) -> Any:
    """What a function of yours returns; an object of optax is it already."""
    path, function = (
        (name.path, name.function) if isinstance(name, Given) else (name, references.load(name))
    )
    if is_transformation(function):
        return function
    return references.call(path, function, *arguments)


def _muon(config: OptimizerConfig, rate: optax.Schedule, axes: Any) -> Any:
    """Muon for matrices of layers; AdamW with Nesterov momentum for tables, norms and biases.

    Updates have the size of AdamW's, so that its learning rates hold (arXiv:2502.16982).
    """
    return optax.contrib.muon(
        rate,
        eps=config.eps,
        weight_decay=config.weight_decay,
        adam_weight_decay=config.weight_decay,
        mu_dtype=config.moment_dtype,
        adam_b1=config.b1,
        adam_b2=_b2(config),
        muon_weight_dimension_numbers=_matrices(axes),
        consistent_rms=0.2,
    )


def _matrices(axes: Any) -> Any:
    """The inputs and outputs of each parameter that is a matrix of a layer; None for others."""

    def one(path: Any, names: tuple[str, ...]) -> Any:
        if path[-1].key not in ("kernel", "a", "b") or len(names) < 2:
            return None
        first = 1 if names[0] == "expert" else 0
        dims = tuple(range(first, len(names)))
        split = -1 if names[-1] in ("embed", "expert_embed", "rank") else 1
        return optax.contrib.MuonDimensionNumbers(dims[:split], dims[split:])

    return jax.tree.map_with_path(one, axes, is_leaf=lambda x: isinstance(x, tuple))


def _offloadable(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer of optax whose state may be offloaded: all of it is fetched for an update.

    Guarantees: a step that is not `finite` leaves offloaded arrays as they were.
    """

    def update(
        updates: Any, state: Any, params: Any = None, *, finite: Any = True
    ) -> tuple[Any, Any]:
        here = jax.tree.map(
            lambda x: jax.device_put(x, jax.memory.Space.Device) if in_host_memory(x) else x, state
        )
        updates, new = inner.update(updates, here, params)

        def put_back(new: Array, now: Array, old: Array) -> Array:
            if not in_host_memory(old):
                return new
            return jax.device_put(jnp.where(finite, new, now), jax.memory.Space.Host)

        return updates, jax.tree.map(put_back, new, here, state)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _b2(config: OptimizerConfig) -> float:
    return 0.999 if config.b2 is None else config.b2


def _adam(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """m / (sqrt(v) + eps) of the bias-corrected moments (Kingma & Ba 2015), a parameter at a time.

    Moments stay in their memory, on the device or offloaded. Those of a balance bias are None.
    Guarantees: a step that is not `finite` leaves offloaded moments as they were. For moments on
    the device the caller selects.
    """
    narrow, b2 = config.moment_dtype == "bfloat16", _b2(config)

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
        nu = b2 * nu + (1 - b2) * jnp.square(gradient)
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
        factors = _unbiased(config.b1, count), _unbiased(b2, count)
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
