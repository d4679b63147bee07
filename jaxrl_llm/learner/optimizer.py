"""AdamW with a schedule. The global-norm clip is in the train step, which reports the norm."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.config import OptimizerConfig
from jaxrl_llm.numerics import round_by_chance


def schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Learning rate of an optimizer step (0-based): linear warm-up, then the named decay.

    `total_steps` is where linear and cosine end unless the config says. The warm-up counts
    from 1/warmup_steps, so the first step is never wasted on a rate of 0.
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
        raise ValueError(
            f"optimizer.schedule is {config.schedule!r}; use constant, linear or cosine"
        )
    if config.warmup_steps == 0:
        return decay
    start = peak / config.warmup_steps
    warmup = optax.linear_schedule(start, peak, max(config.warmup_steps - 1, 1))
    return optax.join_schedules([warmup, decay], [config.warmup_steps])


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019). Weight decay falls on every parameter, as in verl."""
    adam = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
    if config.moment_dtype == "bfloat16":
        adam = _with_bfloat16_moments(adam)
    return optax.chain(
        adam,
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(schedule(config, total_steps)),
    )


def _with_bfloat16_moments(adam: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same update computed in float32, with both moments kept in bfloat16 between steps."""

    def init(params: Any) -> Any:
        return _moments(adam.init(params), lambda x, _: x.astype(jnp.bfloat16))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        widened = _moments(state, lambda x, _: x.astype(jnp.float32))
        updates, exact = adam.update(updates, widened, params)
        return updates, _moments(exact, lambda x, leaf: round_by_chance(x, state.count + 1, leaf))

    return optax.GradientTransformation(init, update)


def _moments(state: Any, fn: Any) -> Any:
    """`state` with fn(array, its number) for each array of both moments."""
    leaves, structure = jax.tree.flatten((state.mu, state.nu))
    mu, nu = structure.unflatten([fn(x, i) for i, x in enumerate(leaves)])
    return state._replace(mu=mu, nu=nu)
