"""Advantage estimators, and the per-token rewards that they read.

Positional parameters are batch fields, keyword-only parameters are settings. Shapes: B samples,
R response tokens, right-padded. An estimator returns (advantages, returns), 0 outside the mask,
and no gradient flows through it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.numerics import masked_sum, masked_whiten

GROUP_STD_EPS = 1e-6  # added to a group's deviation, as verl does


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


def grpo(
    rewards: Float[Array, "B R"],
    mask: Float[Array, "B R"],
    group_ids: Int[Array, " B"],
    *,
    norm_adv_by_std: bool = True,
) -> tuple[Float[Array, "B R"], Float[Array, "B R"]]:
    """A sample's reward against those of its group, on each of its tokens.

    A_i = (r_i - mean of the group) / (std of the group + 1e-6), with the unbiased deviation and
    r_i the sum of the sample's rewards. A group of one is compared with mean 0 and deviation 1, as
    in verl. Where all rewards of a group are equal the advantages are 0. The returns are the
    advantages.

    Shao et al. 2024, arXiv:2402.03300. `norm_adv_by_std=False` is Dr. GRPO, which does not blow up
    the groups whose rewards hardly differ (Liu et al. 2025, arXiv:2503.20783).
    """
    totals = masked_sum(rewards, mask, axis=1)
    count, mean = _group_mean(totals, group_ids)
    deviation = totals - jnp.where(count > 1, mean, 0.0)
    if norm_adv_by_std:
        _, square = _group_mean(jnp.square(totals - mean), group_ids)
        std = jnp.sqrt(square * count / jnp.maximum(count - 1, 1))
        deviation = deviation / jnp.where(count > 1, std + GROUP_STD_EPS, 1.0)
    advantages = jnp.where(mask != 0, deviation[:, None], 0.0)
    return jax.lax.stop_gradient((advantages, advantages))


def _group_mean(
    x: Float[Array, " B"], group_ids: Int[Array, " B"]
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """(size, mean) of each sample's group; the order of the samples does not matter."""
    same = (group_ids[:, None] == group_ids[None, :]).astype(jnp.float32)
    count = same.sum(axis=1)
    # Elementwise and not a matrix product, which a GPU may round to a shorter float.
    return count, (same * x[None, :]).sum(axis=1) / count
