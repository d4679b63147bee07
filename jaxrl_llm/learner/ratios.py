"""Quantiles of the policy ratio, over the tokens of all optimizer steps of an iteration."""

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.policy_losses import MAX_LOG_RATIO
from jaxrl_llm.learner.rows import Fields
from jaxrl_llm.learner.train_state import Metrics
from jaxrl_llm.numerics import masked_quantiles

LOG_RATIOS = "log_ratios"  # log-ratios of a step; their RATIO_PERCENTS become metrics
RATIO_PERCENTS = (1, 50, 99)


def log_ratios(ratios: jax.Array, fields: Fields) -> Metrics:
    """The log-ratios of an optimizer step, and where there are tokens."""
    return {LOG_RATIOS: (ratios, fields["mask"] != 0)}  # pyright: ignore[reportReturnType]


def ratio_quantiles(ratios: tuple[jax.Array, jax.Array]) -> Metrics:
    """Quantiles of the ratio over all tokens of all optimizer steps, at most exp(20)."""
    logs = masked_quantiles(*ratios, RATIO_PERCENTS)
    quantiles = jnp.exp(jnp.clip(logs, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return {f"actor/ratio_p{p:02}": quantiles[i] for i, p in enumerate(RATIO_PERCENTS)}
