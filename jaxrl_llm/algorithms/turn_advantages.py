"""Advantage estimators that give credit to the turns of a response.

A turn is what the policy samples between two observations. Each estimator reads `turn_ids`: on a
sampled token the number of its turn in the response, from 0 on. Other tokens are not read. The
reward r_t of a turn is the sum of its tokens' rewards, so the outcome is a part of the last turn's.
An estimator returns (advantages, returns): equal on all tokens of a turn, 0 outside the mask,
without a gradient.

G_t = r_t + gamma G_{t+1} is the return to go: `gamma` discounts by turns, not by tokens.

Requires: turn numbers do not fall along a response, and none is left out.

Shapes: B samples, R response tokens with holes, T turns at most, where T = R.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxrl_llm.algorithms.advantages import _scan_back
from jaxrl_llm.algorithms.group_advantages import (
    GROUP_STD_EPS,
    _group_maximum,
    _over_group,
    _same_group,
    _standardized,
)
from jaxrl_llm.algorithms.shapes import SampleIds, TokenIds, Tokens
from jaxrl_llm.numerics import masked_sum, masked_whiten, safe_divide

Estimate = tuple[Tokens, Tokens]


def turn_gae(
    rewards: Tokens,
    values: Tokens,
    mask: Tokens,
    turn_ids: TokenIds,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Tokens, Tokens]:
    """GAE over turns, whitened over the tokens of the mask.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  return_t = A_t + V_t,
    where V_t is the value before the first token of turn t, and 0 after the last turn.

    With one token a turn it is `advantages.gae`. The critic learns return_t on all tokens of a
    turn, and values inside of turns are not read. ArCHer: Zhou et al. 2024, arXiv:2402.19446;
    VAGEN: Wang et al. 2025, arXiv:2510.16907.
    """
    turns = _turns(turn_ids, mask)
    rewards_BT, values_BT = turns.sums(rewards), turns.at_first(values)
    later_BT = jnp.pad(values_BT[:, 1:], ((0, 0), (0, 1)))
    delta_BT = jnp.where(turns.exists_BT, rewards_BT + gamma * later_BT - values_BT, 0.0)
    raw_BT = _scan_back(jnp.full_like(delta_BT, gamma * lam), delta_BT)
    advantages = masked_whiten(turns.on_tokens(raw_BT), mask)
    return jax.lax.stop_gradient((advantages, turns.on_tokens(raw_BT + values_BT)))


def turn_baseline(
    rewards: Tokens, mask: Tokens, group_ids: SampleIds, turn_ids: TokenIds, *, gamma: float = 1.0
) -> tuple[Tokens, Tokens]:
    """The return to go of a turn against the group's other samples at the same turn.

    A_it = G_it - mean of G_jt over j != i, where G_jt is 0 if sample j ended before turn t

    Unbiased, also where the policy decides when to stop: the baseline does not depend on the
    sample's own actions. A mean over the samples that reached turn t does, and can take the whole
    gradient away. The returns are G_t. A group of one sample has the baseline 0.
    """
    turns = _turns(turn_ids, mask)
    returns_BT = turns.returns_to_go(rewards, gamma)
    same = _same_group(group_ids)
    size_B1 = same.sum(axis=1, dtype=jnp.float32)[:, None]
    # Differences to one sample of the group, so that equal returns give exactly 0.
    below_BT = returns_BT - returns_BT[jnp.argmax(same, axis=1)]
    deviation_BT = below_BT - _over_group(same, below_BT) / size_B1
    against_others_BT = deviation_BT * size_B1 / jnp.maximum(size_B1 - 1.0, 1.0)
    advantages_BT = jnp.where(size_B1 > 1.0, against_others_BT, returns_BT)
    pair = turns.on_tokens(advantages_BT), turns.on_tokens(returns_BT)
    return jax.lax.stop_gradient(pair)


def discounted_turns(
    rewards: Tokens,
    mask: Tokens,
    group_ids: SampleIds,
    turn_ids: TokenIds,
    *,
    gamma: float = 0.4,
    norm_adv_by_std: bool = True,
) -> tuple[Tokens, Tokens]:
    """The discounted return to go of a turn, standardised over all turns of the group.

    A_it = (G_it - mean) / (std + 1e-6), with mean and unbiased std over the turns of all samples

    Samples with many turns weigh more in the mean. A turn alone in its group keeps G. The returns
    are G_t. Kevin: Baronio et al. 2025, arXiv:2507.11948, with gamma 0.4.
    """
    turns = _turns(turn_ids, mask)
    returns_BT = turns.returns_to_go(rewards, gamma)
    same, exists_BT = _same_group(group_ids), turns.exists_BT

    def over_turns(x_BT: Array) -> Array:
        return _over_group(same, jnp.sum(jnp.where(exists_BT, x_BT, 0.0), axis=1))[:, None]

    count_B1 = over_turns(jnp.ones_like(returns_BT))
    highest_B = jnp.max(jnp.where(exists_BT, returns_BT, -jnp.inf), axis=1)
    highest_B = _group_maximum(highest_B, same)  # so that equal returns give exactly 0
    below_BT = returns_BT - jnp.where(jnp.isfinite(highest_B), highest_B, 0.0)[:, None]
    deviation_BT = below_BT - safe_divide(over_turns(below_BT), count_B1)
    if norm_adv_by_std:
        squares_B1 = over_turns(jnp.square(deviation_BT))
        std_B1 = jnp.sqrt(safe_divide(squares_B1, count_B1 - 1.0))
        deviation_BT = deviation_BT / (std_B1 + GROUP_STD_EPS)
    advantages_BT = jnp.where(count_B1 > 1.0, deviation_BT, returns_BT)
    pair = turns.on_tokens(advantages_BT), turns.on_tokens(returns_BT)
    return jax.lax.stop_gradient(pair)


def mt_grpo(
    rewards: Tokens,
    mask: Tokens,
    group_ids: SampleIds,
    turn_ids: TokenIds,
    *,
    turn_weight: float = 1.0,
    norm_adv_by_std: bool = True,
) -> tuple[Tokens, Tokens]:
    """MT-GRPO: GRPO's advantage of the outcome, and one of each turn before the last.

    A_it = (o_i - mean of o) [/ std] + turn_weight (r_it - mean of r_t) [/ std],  t before the last
    A_it = (o_i - mean of o) [/ std],                                             t the last turn

    The outcome o_i is the reward of the last turn. The second mean and std are over the group's
    samples for which turn t is not the last; a turn alone there adds 0. Stds are unbiased, with
    1e-6. The returns are the advantages.

    Assumes that all samples have the same number of turns, as in the paper. Where the policy
    decides when to stop it is biased: take `turn_baseline`. Zeng et al. 2025, arXiv:2505.11821.
    """
    turns = _turns(turn_ids, mask)
    rewards_BT, exists_BT = turns.sums(rewards), turns.exists_BT
    goes_on_BT = jnp.pad(exists_BT[:, 1:], ((0, 0), (0, 1)))
    outcomes = jnp.sum(jnp.where(exists_BT & ~goes_on_BT, rewards_BT, 0.0), axis=1)
    everyone = jnp.ones_like(outcomes, bool)
    outcome = _standardized(outcomes, group_ids, everyone, norm_adv_by_std)
    groups_BT = jnp.broadcast_to(group_ids[:, None], rewards_BT.shape)
    numbers_BT = jnp.broadcast_to(jnp.arange(rewards_BT.shape[1]), rewards_BT.shape)
    step_BT = _among_equals(rewards_BT, (groups_BT, numbers_BT), goes_on_BT, norm_adv_by_std)
    advantages = turns.on_tokens(outcome[:, None] + turn_weight * step_BT)
    return jax.lax.stop_gradient((advantages, advantages))


def gigpo(
    rewards: Tokens,
    mask: Tokens,
    group_ids: SampleIds,
    turn_ids: TokenIds,
    state_keys: TokenIds,
    *,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    norm_adv_by_std: bool = True,
) -> tuple[Tokens, Tokens]:
    """GiGPO: GRPO's advantage of the response, and one of each turn among turns in equal states.

    A_it = (R_i - mean of the group) [/ std] + step_weight (G_it - mean of G) [/ std]

    R_i is the sum of a sample's rewards. The second mean and std are over the turns of the group
    whose `state_keys` are equal, the sample's own among them. The key of a turn is read at its
    first token: an int32 hash of the state, such as the observation before the turn. A state seen
    once adds 0. Stds are unbiased, with 1e-6. The returns are the advantages.

    Feng et al. 2025, arXiv:2505.10978.
    """
    turns = _turns(turn_ids, mask)
    totals = masked_sum(rewards, mask, axis=1)
    outcome = _standardized(totals, group_ids, jnp.ones_like(totals, bool), norm_adv_by_std)
    keys_BT = turns.at_first(state_keys)
    groups_BT = jnp.broadcast_to(group_ids[:, None], keys_BT.shape)
    step_BT = _among_equals(
        turns.returns_to_go(rewards, gamma), (groups_BT, keys_BT), turns.exists_BT, norm_adv_by_std
    )
    advantages = turns.on_tokens(outcome[:, None] + step_weight * step_BT)
    return jax.lax.stop_gradient((advantages, advantages))


# ------------------------------------------------------------------------- turns


class _Turns(NamedTuple):
    """The turns of responses: from tokens [B, R] to turns [B, T], and back."""

    ids_BR: Array  # turn of each token, -1 outside the mask
    first_BT: Array  # position of the first token of each turn
    exists_BT: Array  # False where a response has fewer turns

    def at_first(self, x_BR: Array) -> Array:
        """The entry at the first token of each turn, 0 where there is no turn."""
        return jnp.where(self.exists_BT, jnp.take_along_axis(x_BR, self.first_BT, axis=1), 0)

    def sums(self, x_BR: Array) -> Array:
        """The sum over the tokens of each turn. Added up in the order of tokens, on a GPU too."""
        keep_BR = self.ids_BR >= 0
        # The turn of the next sampled token; after the last one, none.
        coming_BR = jnp.where(keep_BR, self.ids_BR, jnp.iinfo(jnp.int32).max)
        coming_BR = jax.lax.cummin(coming_BR, axis=1, reverse=True)
        next_BR = jnp.pad(coming_BR[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
        goes_on_BR = jnp.where(keep_BR, self.ids_BR == next_BR, True)
        scanned_BR = _scan_back(goes_on_BR.astype(jnp.float32), jnp.where(keep_BR, x_BR, 0.0))
        return self.at_first(scanned_BR)

    def returns_to_go(self, rewards_BR: Array, gamma: float) -> Array:
        """G_t = r_t + gamma G_{t+1}, 0 where there is no turn."""
        rewards_BT = self.sums(rewards_BR)
        return _scan_back(jnp.full_like(rewards_BT, gamma), rewards_BT)

    def on_tokens(self, x_BT: Array) -> Array:
        """The entry of its turn on each sampled token, 0 on other tokens."""
        chosen_BR = jnp.take_along_axis(x_BT, jnp.maximum(self.ids_BR, 0), axis=1)
        return jnp.where(self.ids_BR >= 0, chosen_BR, 0.0)


def _turns(turn_ids: Array, mask: Array) -> _Turns:
    ids_BR = jnp.where(mask != 0, turn_ids, -1)
    reached_BR = jax.lax.cummax(ids_BR, axis=1)
    numbers_T = jnp.arange(mask.shape[1], dtype=reached_BR.dtype)
    first_BT = jax.vmap(lambda ids_R: jnp.searchsorted(ids_R, numbers_T))(reached_BR)
    exists_BT = first_BT < mask.shape[1]
    return _Turns(ids_BR, jnp.where(exists_BT, first_BT, 0), exists_BT)


def _among_equals(x_BT: Array, keys: tuple[Array, ...], counts_BT: Array, by_std: bool) -> Array:
    """(x - mean) [/ (std + eps)] among the entries in `counts_BT` whose keys are all equal.

    Entries are sorted by key. Sums over a run of equal keys are two scans, so that they have the
    same bits in every run; a scatter on a GPU has not.
    """
    flat = [x.reshape(-1) for x in (x_BT, ~counts_BT, *keys)]
    order = jnp.lexsort(flat[:0:-1])
    x, out, *sorted_keys = (column[order] for column in flat)
    changes = [column[1:] != column[:-1] for column in (out, *sorted_keys)]
    begins = jnp.pad(jnp.stack(changes).any(axis=0), (1, 0), constant_values=True)

    def over_run(x: Array) -> Array:
        ends = jnp.pad(begins[1:], (0, 1), constant_values=True)
        forward = _run_sums(x, begins)
        return forward + _run_sums(x[::-1], ends[::-1])[::-1] - x

    size = over_run(jnp.ones_like(x))
    first = jax.lax.cummax(jnp.where(begins, jnp.arange(x.size), 0))
    below = x - x[first]  # equal entries give exactly 0
    deviation = below - over_run(below) / size
    if by_std:
        variance = safe_divide(over_run(jnp.square(deviation)), size - 1.0)
        deviation = deviation / (jnp.sqrt(variance) + GROUP_STD_EPS)
    alone = (size == 1.0) | out
    standardised = (
        jnp.zeros_like(x).at[order].set(jnp.where(alone, 0.0, deviation), unique_indices=True)
    )
    return standardised.reshape(x_BT.shape)


def _run_sums(x: Array, begins: Array) -> Array:
    """Running sums that begin again where `begins` is set."""

    def combine(earlier: tuple[Array, Array], later: tuple[Array, Array]) -> tuple[Array, Array]:
        return earlier[0] | later[0], later[1] + jnp.where(later[0], 0.0, earlier[1])

    return jax.lax.associative_scan(combine, (begins, x))[1]
