"""Advantage estimators, and the per-token rewards that they read.

Those that compare the samples of a prompt with each other are in `group_advantages.py`.
Positional parameters are batch fields, keyword-only parameters are settings. Shapes: B samples,
R response tokens, right-padded. An estimator returns (advantages, returns), 0 outside the mask,
and no gradient flows through it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.numerics import masked_whiten


def score_to_rewards(scores: Float[Array, " B"], mask: Float[Array, "B R"]) -> Float[Array, "B R"]:
    """Per-token rewards that are 0 but at the last token of the mask, which gets the score.

    A row with no token in the mask has nowhere to put its score and stays 0.
    """
    positions = jnp.arange(mask.shape[1])
    last = jnp.max(jnp.where(mask != 0, positions, -1), axis=1)
    return jnp.where(positions == last[:, None], scores[:, None], 0.0)


def gae(
    rewards: Float[Array, "B R"],
    values: Float[Array, "B R"],
    mask: Float[Array, "B R"],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Float[Array, "B R"], Float[Array, "B R"]]:
    """Generalised advantage estimation, whitened over the mask.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  return_t = A_t + V_t,
    where t + 1 is the next token of the mask: tokens of an observation (mask 0 inside a response)
    are stepped over without discount and their rewards are not read. The value after the last
    token is 0, so a response that was cut at the maximum length counts as finished, as in verl.
    The returns are of the advantages before whitening.

    Schulman et al. 2016, arXiv:1506.02438; masking as in verl. The critic's error enters through
    lam < 1; at gamma = lam = 1, the default, this is the Monte-Carlo return less the value.
    Raises ValueError unless gamma and lam are within 0 and 1.
    """
    if not (0.0 <= gamma <= 1.0 and 0.0 <= lam <= 1.0):
        raise ValueError(f"gamma is {gamma} and lam {lam}; both must be within 0 and 1")
    keep = mask != 0
    rewards, values = jnp.where(keep, rewards, 0.0), jnp.where(keep, values, 0.0)
    # Value of the next token of the mask: V_t where the mask is 1, what came after it elsewhere.
    carried_values = _scan_back(jnp.where(keep, 0.0, 1.0), values)
    next_values = jnp.pad(carried_values[:, 1:], ((0, 0), (0, 1)))
    delta = jnp.where(keep, rewards + gamma * next_values - values, 0.0)
    raw = _scan_back(jnp.where(keep, gamma * lam, 1.0), delta)
    advantages = masked_whiten(raw, mask)
    returns = jnp.where(keep, raw + values, 0.0)
    return jax.lax.stop_gradient((advantages, returns))


def _scan_back(decay: Float[Array, "B R"], x: Float[Array, "B R"]) -> Float[Array, "B R"]:
    """y_t = x_t + decay_t y_{t+1} from the right, y after the end 0; log2(R) deep, not R."""

    def combine(later, earlier):
        return earlier[0] * later[0], earlier[1] + earlier[0] * later[1]

    return jax.lax.associative_scan(combine, (decay, x), reverse=True, axis=1)[1]


def returns_to_go(
    rewards: Float[Array, "B R"], mask: Float[Array, "B R"], *, gamma: float = 1.0
) -> Float[Array, "B R"]:
    """G_t = r_t + gamma G_{t+1} over the tokens of the mask; those outside are stepped over."""
    keep = mask != 0
    returns = _scan_back(jnp.where(keep, gamma, 1.0), jnp.where(keep, rewards, 0.0))
    return jnp.where(keep, returns, 0.0)


def reinforce_plus_plus(
    rewards: Float[Array, "B R"], mask: Float[Array, "B R"], *, gamma: float = 1.0
) -> tuple[Float[Array, "B R"], Float[Array, "B R"]]:
    """REINFORCE++: the discounted return to go, whitened over the tokens of the batch.

    A_t = (G_t - mean) / sqrt(var + 1e-8), G_t = r_t + gamma G_{t+1}. No critic and no groups; the
    mean of the batch is the only baseline, so prompts of unequal difficulty add variance. It is
    meant to go with the KL in the reward. The returns are those before whitening.

    Hu 2025, arXiv:2501.03262. Raises ValueError unless gamma is within 0 and 1.
    """
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma is {gamma}; it must be within 0 and 1")
    returns = returns_to_go(rewards, mask, gamma=gamma)
    return jax.lax.stop_gradient((masked_whiten(returns, mask), returns))


def remax(
    rewards: Float[Array, "B R"], greedy_scores: Float[Array, " B"], mask: Float[Array, "B R"]
) -> tuple[Float[Array, "B R"], Float[Array, "B R"]]:
    """ReMax: the return to go less the score of the greedy answer to the same prompt.

    A_t = G_t - r(greedy), G_t = r_t + G_{t+1}. One sample a prompt is enough, at the price of one
    more rollout and its reward. A KL in the reward is in G_t and not in the baseline, as in verl.

    Li et al. 2023, arXiv:2310.10505.
    """
    returns = returns_to_go(rewards, mask)
    advantages = jnp.where(mask != 0, returns - greedy_scores[:, None], 0.0)
    return jax.lax.stop_gradient((advantages, returns))
