"""Quantiles of the policy ratio, over the tokens of all optimizer steps of an iteration."""

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.policy_losses import MAX_LOG_RATIO
from jaxrl_llm.learner.rows import Fields
from jaxrl_llm.learner.train_state import Metrics
from jaxrl_llm.numerics import masked_quantiles

LOG_RATIOS = "log_ratios"  # of an optimizer step; RATIO_PERCENTS of them become metrics
RATIO_PERCENTS = (1, 50, 99)


def log_ratios(found: jax.Array, fields: Fields) -> Metrics:
    """What an optimizer step adds to LOG_RATIOS: the log-ratios, and where there are tokens."""
    return {LOG_RATIOS: (found, fields["mask"] != 0)}  # pyright: ignore[reportReturnType]


def ratio_quantiles(found: tuple[jax.Array, jax.Array]) -> Metrics:
    """Quantiles of the ratio over all tokens of all optimizer steps, at most exp(20)."""
    logs = masked_quantiles(*found, RATIO_PERCENTS)
    ratios = jnp.exp(jnp.clip(logs, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return {f"actor/ratio_p{p:02}": ratios[i] for i, p in enumerate(RATIO_PERCENTS)}
