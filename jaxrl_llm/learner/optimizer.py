"""AdamW with a schedule. The global-norm clip is in the train step, which reports the norm."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.config import OptimizerConfig
from jaxrl_llm.numerics import round_by_chance

AT_ONCE = 2  # parameters whose moments are on the device, of those that the host keeps


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


def make_optimizer(
    config: OptimizerConfig, total_steps: int
) -> optax.GradientTransformationExtraArgs:
    """AdamW (Loshchilov & Hutter 2019). Weight decay falls on every parameter, as in verl.

    Its `update` also takes `finite`, whether the step counts; see `_where_they_lie`.
    """
    adam = _Adam(
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
        narrow=config.moment_dtype == "bfloat16",
    )
    return optax.chain(
        _where_they_lie(adam),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(schedule(config, total_steps)),
    )


@dataclass(frozen=True)
class _Adam:
    """optax's Adam; `narrow` computes in float32 and keeps both moments in bfloat16."""

    exact: optax.GradientTransformation
    narrow: bool

    def init(self, params: Any) -> Any:
        state = self.exact.init(params)
        return _moments(state, lambda x, _: x.astype(jnp.bfloat16)) if self.narrow else state

    def update(self, updates: Any, state: Any, part: int = 0, parts: int = 1) -> tuple[Any, Any]:
        """`part` of `parts` says which of several calls this is that share a step."""
        if not self.narrow:
            return self.exact.update(updates, state)
        widened = _moments(state, lambda x, _: x.astype(jnp.float32))
        updates, exact = self.exact.update(updates, widened)
        return updates, _moments(
            exact, lambda x, i: round_by_chance(x, state.count + 1, parts * i + part)
        )


def _where_they_lie(adam: _Adam) -> optax.GradientTransformationExtraArgs:
    """`adam`, which fetches moments from the host's memory and puts them back there.

    They visit the device one parameter after the other. Where the step is not `finite`, moments of
    the host stay as they were; to choose those that are on the device is left to the caller.
    """

    def update(
        updates: Any, state: Any, params: Any = None, *, finite: Any = True
    ) -> tuple[Any, Any]:
        del params
        grads, structure = jax.tree.flatten(updates)
        moments = [structure.flatten_up_to(tree) for tree in (state.mu, state.nu)]
        if not in_host_memory(moments[0][0]):
            return adam.update(updates, state)
        found, kept, count = [], [], state.count
        for i, (grad, *old) in enumerate(zip(grads, *moments, strict=True)):
            # Without an order the compiler fetches all of them first, and they would lie on the
            # device at once.
            before = kept[i - AT_ONCE] if i >= AT_ONCE else finite
            old, _ = jax.lax.optimization_barrier((old, before))
            old = jax.device_put(old, jax.memory.Space.Device)
            one = state._replace(mu=old[0], nu=old[1])
            result, new = adam.update(grad, one, part=i, parts=len(grads))
            chosen = [jnp.where(finite, x, y) for x, y in zip((new.mu, new.nu), old, strict=True)]
            found.append(result)
            kept.append(jax.device_put(chosen, jax.memory.Space.Host))
            count = new.count
        mu, nu = (structure.unflatten(tree) for tree in zip(*kept, strict=True))
        return structure.unflatten(found), state._replace(count=count, mu=mu, nu=nu)

    return optax.GradientTransformationExtraArgs(adam.init, update)


def in_host_memory(x: Any) -> bool:
    """Whether an array, or its place in a traced program, is in the host's memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def _moments(state: Any, fn: Callable[[Any, int], Any]) -> Any:
    """`state` with fn(array, its number) for each array of both moments."""
    leaves, structure = jax.tree.flatten((state.mu, state.nu))
    mu, nu = structure.unflatten([fn(x, i) for i, x in enumerate(leaves)])
    return state._replace(mu=mu, nu=nu)
