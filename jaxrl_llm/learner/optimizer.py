"""Optimizers with a schedule. The global-norm clip is in the train step, which reports the norm."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

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


class Rates(NamedTuple):
    """The numbers of a schedule. Differences are of float64, so that no bit depends on the way."""

    peak: float
    last: float  # rate at the end of linear
    fall: float  # peak - last
    share: float  # last / peak, for cosine
    rest: float  # 1 - share
    rise: float  # first rate of the warm-up - peak

    @classmethod
    def of(cls, config: OptimizerConfig) -> "Rates":
        """The numbers that a config gives."""
        peak, share = config.learning_rate, config.min_learning_rate_ratio
        first = peak / config.warmup_steps if config.warmup_steps else peak
        return cls(peak, peak * share, peak - peak * share, share, 1 - share, first - peak)


def schedule(
    config: OptimizerConfig, total_steps: int, rates: Rates | None = None
) -> optax.Schedule:
    """Learning rate of an optimizer step (0-based): linear warm-up, then the named decay.

    Linear and cosine end at `total_steps`, unless the config gives another number. The warm-up
    begins at 1/warmup_steps, so that the first step has a rate above 0. A function of yours gets
    the peak and the number of steps after the warm-up; its schedule begins with 0 there.
    `rates` are the numbers of the config, also traced ones. A function of yours gets the config's.
    """
    peak, last, fall, share, rest, rise = Rates.of(config) if rates is None else rates
    decay_steps = max((config.total_steps or total_steps) - config.warmup_steps, 1)
    if config.schedule == "constant":
        decay = optax.constant_schedule(peak)
    elif config.schedule == "linear":
        decay = _between(fall, last, decay_steps)
    elif config.schedule == "cosine":
        decay = _cosine(peak, rest, share, decay_steps)
    else:
        decay = _own(config.schedule, config.learning_rate, decay_steps)
    if config.warmup_steps == 0:
        return decay
    warmup = _between(rise, peak, max(config.warmup_steps - 1, 1))
    return optax.join_schedules([warmup, decay], [config.warmup_steps])


def _cosine(peak: float, rest: float, share: float, steps: int) -> optax.Schedule:
    wave = optax.cosine_decay_schedule(1.0, steps)
    return lambda step: peak * (rest * wave(step) + share)


def _between(difference: float, last: float, steps: int) -> optax.Schedule:
    """From last + difference to last."""
    left = optax.linear_schedule(1.0, 0.0, steps)
    return lambda step: difference * left(step) + last


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["rates", "weight_decay", "max_grad_norm"],
    meta_fields=["config", "total_steps", "axes", "frozen"],
)
@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optimizer of optax whose rates, decay and clip are arguments of the programs.

    `max_grad_norm` is for the train step. `config` says which optimizer and schedule it is.
    """

    config: OptimizerConfig
    total_steps: int
    axes: Any
    frozen: Any  # True where a parameter has no state and stays as it is; None where all learn
    rates: Rates
    weight_decay: float
    max_grad_norm: float

    def init(self, params: Any) -> optax.OptState:
        """The first state."""
        return self._transformation.init(params)

    def update(
        self, updates: Any, state: Any, params: Any = None, *, finite: Any = True
    ) -> tuple[Any, Any]:
        """As optax's. `finite` says whether the step counts; see `_adam`."""
        return self._transformation.update(updates, state, params, finite=finite)

    @property
    def learning_rate(self) -> optax.Schedule | None:
        """The rate as a metric; None for an object of optax, whose rate nobody can read."""
        name = self.config.name
        if isinstance(name, Given) and is_transformation(name.function):
            return None
        return schedule(self.config, self.total_steps, self.rates)

    @cached_property
    def _transformation(self) -> optax.GradientTransformationExtraArgs:
        return _transformation(self)


def make_optimizer(
    config: OptimizerConfig, total_steps: int, axes: Any = None, frozen: Any = None
) -> Optimizer:
    """The optimizer that a config names. Weight decay applies to every parameter, as in verl.

    `axes` are the logical axes of the parameters, which muon needs to see their matrices. `frozen`
    says which parameters do not learn; None says that all do.
    """
    return Optimizer(
        config=config,
        total_steps=total_steps,
        axes=axes,
        frozen=frozen,
        rates=Rates.of(config),
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
    )


def _transformation(optimizer: Optimizer) -> optax.GradientTransformationExtraArgs:
    if (frozen := optimizer.frozen) is not None:
        axes = optimizer.axes
        if axes is not None:
            axes = jax.tree.map(lambda f, names: optax.MaskedNode() if f else names, frozen, axes)
        inner = _transformation(replace(optimizer, axes=axes, frozen=None))
        learned = optax.masked(inner, jax.tree.map(operator.not_, frozen))
        return optax.chain(learned, optax.masked(optax.set_to_zero(), frozen))
    config, decay = optimizer.config, optimizer.weight_decay
    rate = schedule(config, optimizer.total_steps, optimizer.rates)
    dtype = config.moment_dtype
    last = optax.add_decayed_weights(decay), optax.scale_by_learning_rate(rate)
    if config.name == "adamw":
        return optax.chain(_adam(config), *last)
    if config.name == "muon":
        return _offloadable(_muon(config, rate, decay, optimizer.axes))
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


def _muon(config: OptimizerConfig, rate: optax.Schedule, decay: float, axes: Any) -> Any:
    """Muon for matrices of layers; AdamW with Nesterov momentum for tables, norms and biases.

    Updates have the size of AdamW's, so that its learning rates hold (arXiv:2502.16982).
    """
    return optax.contrib.muon(
        rate,
        eps=config.eps,
        weight_decay=decay,
        adam_weight_decay=decay,
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
