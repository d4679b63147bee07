"""Advantage estimators, and the rewards for each token that they read.

Estimators that compare the samples of one prompt are in `group_advantages.py`. Positional
parameters are batch fields, keyword-only parameters are settings. Shapes: B samples, R response
tokens, right-padded. An estimator returns (advantages, returns), both 0 outside the mask and
without a gradient.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.shapes import Samples, Tokens
from jaxrl_llm.numerics import masked_whiten


def score_to_rewards(scores: Samples, mask: Tokens) -> Tokens:
    """The score at the last token of the mask, 0 at all others.

    A row with an empty mask stays 0: its score is lost.
    """
    positions = jnp.arange(mask.shape[1])
    last = jnp.max(jnp.where(mask != 0, positions, -1), axis=1)
    return jnp.where(positions == last[:, None], scores[:, None], 0.0)


def spread_to_steps(rewards: Tokens, step_rewards: Tokens, mask: Tokens) -> Tokens:
    """`rewards` with the part `step_rewards` of each score moved from the last token to its steps.

    The sum over the tokens stays, so estimators of groups read the whole score.
    """
    kept = jnp.where(mask != 0, step_rewards, 0.0)
    return rewards + kept - score_to_rewards(jnp.sum(kept, axis=1), mask)


def gae(
    rewards: Tokens, values: Tokens, mask: Tokens, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tokens, Tokens]:
    """Generalised advantage estimation, whitened over the mask.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  return_t = A_t + V_t,
    where t + 1 is the next token of the mask. Tokens of an observation (mask 0 inside a response)
    are skipped without discount, and their rewards are not read. The value after the last token
    is 0: a response cut at the maximum length counts as finished, as in verl. The returns use the
    advantages before whitening.

    With gamma = lam = 1, the default, an advantage is the Monte-Carlo return minus the value; with
    lam < 1 the error of the critic biases it. Do not use it without a critic.
    Schulman et al. 2016, arXiv:1506.02438; masking as in verl. Requires: gamma and lam
    between 0 and 1.
    """
    keep = mask != 0
    rewards, values = jnp.where(keep, rewards, 0.0), jnp.where(keep, values, 0.0)
    # V_t where the mask is 1; elsewhere the value of the next token of the mask.
    carried_values = _scan_back(jnp.where(keep, 0.0, 1.0), values)
    next_values = jnp.pad(carried_values[:, 1:], ((0, 0), (0, 1)))
    delta = jnp.where(keep, rewards + gamma * next_values - values, 0.0)
    raw = _scan_back(jnp.where(keep, gamma * lam, 1.0), delta)
    advantages = masked_whiten(raw, mask)
    returns = jnp.where(keep, raw + values, 0.0)
    return jax.lax.stop_gradient((advantages, returns))


def _scan_back(decay: Tokens, x: Tokens) -> Tokens:
    """y_t = x_t + decay_t y_{t+1}, with y = 0 after the end, in log2(R) steps instead of R."""

    def combine(later, earlier):
        return earlier[0] * later[0], earlier[1] + earlier[0] * later[1]

    return jax.lax.associative_scan(combine, (decay, x), reverse=True, axis=1)[1]


def returns_to_go(rewards: Tokens, mask: Tokens, *, gamma: float = 1.0) -> Tokens:
    """G_t = r_t + gamma G_{t+1} over the tokens of the mask; all other tokens are skipped."""
    keep = mask != 0
    returns = _scan_back(jnp.where(keep, gamma, 1.0), jnp.where(keep, rewards, 0.0))
    return jnp.where(keep, returns, 0.0)


def reinforce_plus_plus(
    rewards: Tokens, mask: Tokens, *, gamma: float = 1.0
) -> tuple[Tokens, Tokens]:
    """REINFORCE++: the discounted return to go, whitened over the tokens of the batch.

    A_t = (G_t - mean) / sqrt(var + 1e-8), G_t = r_t + gamma G_{t+1}. The returns are G_t.

    It needs no critic and no groups. The mean of the batch is the only baseline, so prompts of
    unequal difficulty add variance. With several samples a prompt, prefer an estimator of groups.
    The paper puts the KL into the reward. Hu 2025, arXiv:2501.03262. Requires: gamma between 0
    and 1.
    """
    returns = returns_to_go(rewards, mask, gamma=gamma)
    return jax.lax.stop_gradient((masked_whiten(returns, mask), returns))


def remax(rewards: Tokens, greedy_scores: Samples, mask: Tokens) -> tuple[Tokens, Tokens]:
    """ReMax: the return to go minus the score of the greedy answer to the same prompt.

    A_t = G_t - r(greedy), G_t = r_t + G_{t+1}. The returns are G_t.

    One sample a prompt is enough; the greedy answer costs one more rollout and reward. A KL in the
    reward is in G_t and not in the baseline, as in verl. Li et al. 2023, arXiv:2310.10505.
    """
    returns = returns_to_go(rewards, mask)
    advantages = jnp.where(mask != 0, returns - greedy_scores[:, None], 0.0)
    return jax.lax.stop_gradient((advantages, returns))
