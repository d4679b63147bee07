"""Advantage estimators that compare the samples of a prompt with each other.

Each reads `group_ids`, which are equal for samples of one prompt. Samples may be in any order. An
estimator returns (advantages, returns), both 0 outside the mask and without a gradient. Unless its
docstring says otherwise:

- the returns are the advantages,
- r_i is the sum of a sample's rewards over its tokens,
- a group of one sample has the baseline 0, as in verl,
- where all rewards of a group are equal, the advantages are 0.

Shapes: B samples, R response tokens, right-padded, K reward parts.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algorithms.advantages import returns_to_go
from jaxrl_llm.algorithms.sample_masks import in_a_group, num_samples
from jaxrl_llm.algorithms.shapes import SampleIds, Samples, Tokens
from jaxrl_llm.numerics import masked_count, masked_sum, masked_var, masked_whiten, safe_divide

GROUP_STD_EPS = 1e-6  # added to the standard deviation of a group, as in verl

Estimate = tuple[Tokens, Tokens]


def grpo(
    rewards: Tokens,
    mask: Tokens,
    group_ids: SampleIds,
    *,
    norm_adv_by_std: bool = True,
    std_of: Literal["group", "batch", "advantages"] = "group",
) -> tuple[Tokens, Tokens]:
    """GRPO: a sample's reward relative to its group, the same on each of its tokens.

    A_i = (r_i - mean of the group) / (std + 1e-6), with the unbiased std of one of these:

    - `group`: rewards of the group. The std of a group of one is 1.
    - `batch`: rewards of all samples, as TRL's `scale_rewards="batch"`. arXiv:2508.08221.
    - `advantages`: r_j - mean of the group of j, of all samples. ScaleRL, arXiv:2510.13786.

    The std of the group amplifies groups whose rewards hardly differ; the others scale all groups
    alike. `norm_adv_by_std=False` omits the division: Dr. GRPO, Liu et al. 2025, arXiv:2503.20783.
    Do not use it with one sample a prompt. Shao et al. 2024, arXiv:2402.03300.
    """
    totals = masked_sum(rewards, mask, axis=1)
    everyone = jnp.ones_like(totals, bool)
    if not norm_adv_by_std or std_of == "group":
        return _on_tokens(_standardized(totals, group_ids, everyone, norm_adv_by_std), mask)
    deviation = _standardized(totals, group_ids, everyone, by_std=False)
    spread = totals if std_of == "batch" else deviation
    std = jnp.sqrt(masked_var(spread, in_a_group(group_ids)))
    return _on_tokens(deviation / (std + GROUP_STD_EPS), mask)


def grpo_passk(
    rewards: Tokens, mask: Tokens, group_ids: SampleIds, *, norm_adv_by_std: bool = True
) -> tuple[Tokens, Tokens]:
    """Pass@k: only the best sample of a group has an advantage, its lead over the second best.

    A_i = max(r_i - max of r_j over j != i, 0) [/ (std of the group + 1e-6)]

    If two samples share the first place, the group teaches nothing; a group of one neither (verl
    refuses it). Use it where the best of k answers counts, not the average one.
    Walder and Karkhanis 2025, arXiv:2505.15201; verl's form: arXiv:2503.19595.
    """
    totals = masked_sum(rewards, mask, axis=1)
    others = _same_group(group_ids) & ~jnp.eye(totals.shape[0], dtype=bool)
    best_other = jnp.max(jnp.where(others, totals[None, :], -jnp.inf), axis=1, initial=-jnp.inf)
    lead = jnp.where(jnp.any(others, axis=1), jnp.maximum(totals - best_other, 0.0), 0.0)
    if norm_adv_by_std:
        _, std, _ = _deviation(totals, group_ids, jnp.ones_like(totals, bool))
        lead = lead / (std + GROUP_STD_EPS)
    return _on_tokens(lead, mask)


def gdpo(
    reward_parts: Float[Array, "B K"],
    mask: Tokens,
    group_ids: SampleIds,
    *,
    reward_weights: tuple[float, ...] = (),
    norm_adv_by_std: bool = True,
) -> tuple[Tokens, Tokens]:
    """GDPO: each part of the reward is standardised in its group before the parts are added.

    A_i = whiten(sum over k of w_k grpo(part k)_i), whitened over the tokens of the batch

    So a part with a large spread does not hide another. `reward_weights` are w_k, by default 1;
    `config.reward.weights` do not apply to the parts. A part that does not apply to a sample (NaN)
    adds 0 and is in no mean. Rewards of tokens are not read: do not combine it with a KL in the
    reward.

    Liu et al. 2026, arXiv:2601.05242. Raises ValueError unless there is one weight a part.
    """
    weights = reward_weights or (1.0,) * reward_parts.shape[1]
    if len(weights) != reward_parts.shape[1]:
        raise ValueError(
            f"{len(weights)} reward_weights for {reward_parts.shape[1]} reward functions: "
            "give one each, or none for 1 each"
        )
    total = jnp.zeros(reward_parts.shape[0])
    for k, weight in enumerate(weights):
        part = reward_parts[:, k]
        applies = ~jnp.isnan(part)
        part = jnp.where(applies, part, 0.0)
        total += weight * _standardized(part, group_ids, applies, norm_adv_by_std)
    advantages = masked_whiten(jnp.broadcast_to(total[:, None], mask.shape), mask)
    return jax.lax.stop_gradient((advantages, advantages))


def rloo(rewards: Tokens, mask: Tokens, group_ids: SampleIds) -> tuple[Tokens, Tokens]:
    """RLOO: the reward of a sample minus the mean reward of the others of its group.

    A_i = r_i - mean of r_j over j != i = n / (n - 1) (r_i - mean of the group)

    The baseline is unbiased because it leaves out the sample itself. It needs two or more samples
    a prompt. Ahmadian et al. 2024, arXiv:2402.14740.
    """
    totals = masked_sum(rewards, mask, axis=1)
    deviation, _, size = _deviation(totals, group_ids, jnp.ones_like(totals, bool))
    against_others = deviation * size / jnp.maximum(size - 1, 1)
    return _on_tokens(jnp.where(size > 1, against_others, totals), mask)


def reinforce_plus_plus_baseline(
    rewards: Tokens, mask: Tokens, group_ids: SampleIds
) -> tuple[Tokens, Tokens]:
    """REINFORCE++ with a baseline: minus the mean of the group, then whitened over all tokens.

    A = whiten(r_i - mean of the group)

    The std is taken over the batch and not over the group, so a group whose rewards hardly differ
    keeps small advantages. Hu 2025, arXiv:2501.03262.
    """
    totals = masked_sum(rewards, mask, axis=1)
    deviation = _standardized(totals, group_ids, jnp.ones_like(totals, bool), by_std=False)
    advantages = masked_whiten(jnp.broadcast_to(deviation[:, None], mask.shape), mask)
    return jax.lax.stop_gradient((advantages, advantages))


def opo(rewards: Tokens, mask: Tokens, group_ids: SampleIds) -> tuple[Tokens, Tokens]:
    """OPO: minus the mean reward of the group, weighted by the lengths of its samples.

    A_i = r_i - sum of l_j r_j / sum of l_j, l_j in tokens

    This baseline has the least variance if the gradients of tokens are independent and of equal
    size. Hao et al. 2025, arXiv:2505.23585.
    """
    totals, lengths = masked_sum(rewards, mask, axis=1), masked_count(mask, axis=1)
    same = _same_group(group_ids)
    below = totals - _group_maximum(totals, same)  # so that equal rewards give exactly 0
    baseline = safe_divide(_over_group(same, lengths * below), _over_group(same, lengths))
    alone = same.sum(axis=1) == 1
    return _on_tokens(jnp.where(alone, totals, below - baseline), mask)


def gpg(
    rewards: Tokens, mask: Tokens, group_ids: SampleIds, *, f_norm: float = 1.0
) -> tuple[Tokens, Tokens]:
    """GPG: minus the mean of the group, scaled up where few samples of the batch got any reward.

    A_i = alpha (r_i - mean of the group) / f_norm, alpha = number of samples / number of samples
    whose reward is not 0 (at least 1), as in verl

    It assumes that a reward of 0 means failure: do not use it with negative or shifted rewards.
    Chu et al. 2025, arXiv:2504.02546. Requires: a positive f_norm.
    """
    totals = masked_sum(rewards, mask, axis=1)
    alpha = num_samples(group_ids) / jnp.maximum(jnp.sum(totals != 0, dtype=jnp.float32), 1.0)
    deviation = _standardized(totals, group_ids, jnp.ones_like(totals, bool), by_std=False)
    return _on_tokens(alpha * deviation / f_norm, mask)


def optimal_token_baseline(
    rewards: Tokens,
    mask: Tokens,
    group_ids: SampleIds,
    old_logprobs: Tokens,
    sum_pi_squared: Tokens,
    *,
    handle_zero_tail: bool = True,
) -> tuple[Tokens, Tokens]:
    """OTB: the return to go minus a baseline for each token position.

    A_t = G_t - sum over the group of G_t W_t / (sum of W_t + 1e-8)
    W_t = sum over j <= t of (1 - 2 pi_j + sum over the vocabulary of pi^2)

    Sums are over the samples of the group that have a token t. W_t is the squared norm of the
    gradient in a sample's logits, accumulated up to t. The returns are G_t. With
    `handle_zero_tail` the baseline is 0 where one sample is left, whose advantage would be 0.
    `sum_pi_squared` [B, R] costs a pass over the vocabulary.

    Use it for responses of one turn: t is a position, and holes in the mask shift nothing.
    As verl's `optimal_token_baseline` (Li et al. 2025).
    """
    fields = rewards, mask, group_ids, old_logprobs, sum_pi_squared, jnp.ones_like(mask)
    return corrected_optimal_token_baseline(*fields, handle_zero_tail=handle_zero_tail)


def corrected_optimal_token_baseline(
    rewards: Tokens,
    mask: Tokens,
    group_ids: SampleIds,
    old_logprobs: Tokens,
    sum_pi_squared: Tokens,
    importance_weights: Tokens,
    *,
    handle_zero_tail: bool = True,
) -> tuple[Tokens, Tokens]:
    """`optimal_token_baseline` with importance weights: each term of W_t is times their square."""
    keep = mask != 0
    returns = returns_to_go(rewards, mask)
    square = 1.0 - 2.0 * jnp.exp(jnp.where(keep, old_logprobs, 0.0)) + sum_pi_squared
    square = jnp.where(keep, square * jnp.square(importance_weights), 0.0)
    gathered = jnp.where(keep, jnp.cumsum(square, axis=1), 0.0)
    same = _same_group(group_ids)
    total = _over_group(same, gathered)
    baseline = _over_group(same, returns * gathered) / (total + 1e-8)
    alive = _over_group(same, keep.astype(jnp.float32))
    alone = same.sum(axis=1)[:, None] == 1
    if handle_zero_tail:
        alone = alone | (alive == 1)
    advantages = jnp.where(keep, returns - jnp.where(alone, 0.0, baseline), 0.0)
    return jax.lax.stop_gradient((advantages, returns))


# ------------------------------------------------------------------------- groups


def _same_group(group_ids: SampleIds) -> Array:
    return group_ids[:, None] == group_ids[None, :]


def _over_group(same: Array, x: Array) -> Array:
    """Sum of x, [B] or [B, R], over the group of each sample."""
    if x.ndim == 1:
        # Not a matmul: a GPU may round its inputs to a shorter float.
        return jnp.where(same, x[None, :], 0.0).sum(axis=1)
    return jnp.matmul(same.astype(jnp.float32), x, precision=jax.lax.Precision.HIGHEST)


def _deviation(x: Samples, group_ids: SampleIds, counts: Array) -> tuple[Array, Array, Array]:
    """(x - mean, unbiased std, size) of each sample's group, over the samples in `counts`.

    Guarantees: the order of samples does not matter; x - mean is exactly 0 where all are equal. For
    that the mean is taken of differences to the maximum. In float32 the mean of three times 0.7 is
    not 0.7, and a rounding error divided by a tiny std is large.
    """
    same = _same_group(group_ids) & counts[None, :]
    size = same.sum(axis=1, dtype=jnp.float32)
    below = x - _group_maximum(x, same)
    deviation = below - safe_divide(_over_group(same, below), size)
    squares = _over_group(same, jnp.square(deviation))
    return deviation, jnp.sqrt(safe_divide(squares, size - 1)), size


def _group_maximum(x: Array, same: Array) -> Array:
    highest = jnp.max(jnp.where(same, x[None, :], -jnp.inf), axis=1, initial=-jnp.inf)
    return jnp.where(jnp.any(same, axis=1), highest, 0.0)


def _standardized(x: Array, group_ids: Array, counts: Array, by_std: bool) -> Array:
    """(x - mean) [/ (std + eps)] in each sample's group. A group of one has mean 0 and std 1."""
    deviation, std, size = _deviation(x, group_ids, counts)
    if by_std:
        deviation = deviation / (std + GROUP_STD_EPS)
    return jnp.where(counts, jnp.where(size > 1, deviation, x), 0.0)


def _on_tokens(x: Samples, mask: Tokens) -> Estimate:
    advantages = jnp.where(mask != 0, x[:, None], 0.0)
    return jax.lax.stop_gradient((advantages, advantages))
