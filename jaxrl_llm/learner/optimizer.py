"""AdamW with a schedule. The global-norm clip is in the train step, which reports the norm."""

import optax

from jaxrl_llm.config import OptimizerConfig


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
    return optax.adamw(
        schedule(config, total_steps),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
    )
