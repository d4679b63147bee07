"""Losses on fixed data: preference pairs, labelled or rated completions, examples.

Shapes: B records. A loss returns one value a record, [B]; the caller averages it over the whole
batch. Log-probs are sums over the tokens of a completion. Metrics have TRL's names: [B], or a pair
(values, weights). `rewards` are implicit rewards: beta times the log-ratio to the reference, or
beta times the log-prob without a reference.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxrl_llm.algorithms.shapes import Samples
from jaxrl_llm.arguments import is_zero

Weighted = tuple[Samples, Samples]
DPOForm = Literal["sigmoid", "robust", "ipo", "hinge", "sigmoid_norm"]
CPOForm = Literal["sigmoid", "ipo", "hinge", "simpo"]


# ------------------------------------------------------------------------- examples


def completion_nll(
    completion_logprobs: Samples, completion_lengths: Samples
) -> tuple[Samples, Samples]:
    """Negative log-likelihood of the completion: sum over its tokens, and their number."""
    return -completion_logprobs, completion_lengths


def chosen_nll(chosen_logprobs: Samples, chosen_lengths: Samples) -> tuple[Samples, Samples]:
    """Negative log-likelihood of the chosen completion: sum over its tokens, and their number."""
    return -chosen_logprobs, chosen_lengths


def chosen_row_nll(
    chosen_row_logprobs: Samples, chosen_row_lengths: Samples
) -> tuple[Samples, Samples]:
    """Negative log-likelihood of prompt and chosen completion: sum over tokens, and their number.

    The likelihood term of ORPO; it includes the prompt, as in the authors' code and in TRL.
    """
    return -chosen_row_logprobs, chosen_row_lengths


# ------------------------------------------------------------------------- reward models


def bradley_terry(
    chosen_scores: Samples, rejected_scores: Samples, margins: Samples, *, center: float = 0.0
) -> tuple[Samples, dict[str, Samples]]:
    """The Bradley-Terry loss of a reward model on pairs.

    loss = -log sigmoid(chosen - rejected - margin) + center (chosen + rejected)^2

    Requires: a margin of 0 where the data have none (margins: Llama 2, arXiv:2307.09288). The loss
    fixes scores only up to a constant; `center` pulls it to 0 (Eisenstein et al. 2023,
    arXiv:2312.09244, with 0.01). Metrics: `accuracy` (chosen above rejected; a tie is 0), `margin`
    (chosen - rejected), `mean_reward` (mean of both). Bradley and Terry 1952.
    """
    gap = chosen_scores - rejected_scores
    total = chosen_scores + rejected_scores
    loss = -jax.nn.log_sigmoid(gap - margins) + center * jnp.square(total)
    metrics = {"accuracy": (gap > 0).astype(jnp.float32), "margin": gap, "mean_reward": 0.5 * total}
    return loss, jax.lax.stop_gradient(metrics)


def rating_error(
    completion_scores: Samples, ratings: Samples
) -> tuple[Samples, dict[str, Samples]]:
    """Squared error of a reward model: loss = (score - rating)^2.

    It assumes that ratings have one scale for all prompts. Where only their order within a prompt
    counts, make pairs and use `bradley_terry`. Metrics: `absolute_error`, `mean_reward`.
    """
    error = completion_scores - ratings
    metrics = {"absolute_error": jnp.abs(error), "mean_reward": completion_scores}
    return jnp.square(error), jax.lax.stop_gradient(metrics)


# ------------------------------------------------------------------------- with a reference


def dpo(
    chosen_logprobs: Samples,
    rejected_logprobs: Samples,
    reference_chosen_logprobs: Samples,
    reference_rejected_logprobs: Samples,
    *,
    beta: float = 0.1,
    form: DPOForm = "sigmoid",
    label_smoothing: float = 0.0,
) -> tuple[Samples, dict[str, Samples]]:
    """Direct preference optimisation on sums of log-probs (Rafailov et al. 2023, arXiv:2305.18290).

    With r = log-ratio of policy to reference, e = label_smoothing and d = r_chosen - r_rejected:

    sigmoid  -(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d); e > 0 is conservative DPO, for
             labels wrong with probability e (Mitchell 2023)
    robust   (-(1 - e) log sigmoid(beta d) + e log sigmoid(-beta d)) / (1 - 2 e): unbiased for such
             labels (Chowdhury et al. 2024, arXiv:2403.00409)
    hinge    max(0, 1 - beta d) (SLiC, Zhao et al. 2023, arXiv:2305.10425)

    Sums favour long completions where the chosen ones are longer; the forms ipo and sigmoid_norm
    of `dpo_normalised` use means over tokens.
    """
    chosen = chosen_logprobs - reference_chosen_logprobs
    rejected = rejected_logprobs - reference_rejected_logprobs
    scaled = beta * (chosen - rejected)
    if form == "hinge":
        loss = jax.nn.relu(1.0 - scaled)
    elif form == "robust":
        clean = -(1.0 - label_smoothing) * jax.nn.log_sigmoid(scaled)
        flipped = -label_smoothing * jax.nn.log_sigmoid(-scaled)
        loss = (clean - flipped) / (1.0 - 2.0 * label_smoothing)
    else:
        loss = _smoothed(scaled, label_smoothing)
    pairs = chosen_logprobs, rejected_logprobs
    references = reference_chosen_logprobs, reference_rejected_logprobs
    return loss, judged_pairs(*pairs, *references, beta=beta)


def dpo_normalised(
    chosen_logprobs: Samples,
    rejected_logprobs: Samples,
    reference_chosen_logprobs: Samples,
    reference_rejected_logprobs: Samples,
    chosen_lengths: Samples,
    rejected_lengths: Samples,
    *,
    beta: float = 0.1,
    form: DPOForm = "sigmoid_norm",
    label_smoothing: float = 0.0,
) -> tuple[Samples, dict[str, Samples]]:
    """DPO on log-ratios averaged over the tokens of a completion. With d of those averages:

    sigmoid_norm  the sigmoid form of `dpo` (Meng et al. 2024, arXiv:2405.14734, appendix)
    ipo           (d - 1 / (2 beta))^2 (Azar et al. 2023, arXiv:2310.12036, eq. 17; the authors'
                  results use averages)

    The reported rewards are sums, as in TRL.
    """
    chosen = chosen_logprobs - reference_chosen_logprobs
    rejected = rejected_logprobs - reference_rejected_logprobs
    gap = chosen / jnp.maximum(chosen_lengths, 1.0) - rejected / jnp.maximum(rejected_lengths, 1.0)
    if form == "ipo":
        loss = jnp.square(gap - 1.0 / (2.0 * beta))
    else:
        loss = _smoothed(beta * gap, label_smoothing)
    pairs = chosen_logprobs, rejected_logprobs
    references = reference_chosen_logprobs, reference_rejected_logprobs
    return loss, judged_pairs(*pairs, *references, beta=beta)


def mismatched_kl(
    mismatched_logprobs: Samples, reference_mismatched_logprobs: Samples, weights: Samples
) -> Samples:
    """KTO's estimate of KL(policy || reference), the same for every record; no gradient.

    max(0, mean of the log-ratio over prompts with the completion of another record of the batch)

    Requires: two or more records a batch. Ethayarajh et al. 2024, arXiv:2402.01306, section 4.1.
    """
    ratio = weights * (mismatched_logprobs - reference_mismatched_logprobs)
    mean = ratio.sum() / jnp.maximum(weights.sum(), 1.0)
    return jax.lax.stop_gradient(jnp.broadcast_to(jnp.maximum(mean, 0.0), ratio.shape))


def kto(
    completion_logprobs: Samples,
    reference_completion_logprobs: Samples,
    labels: Samples,
    baseline: Samples,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[Samples, dict[str, Samples | Weighted]]:
    """Kahneman-Tversky optimisation of single labelled completions (arXiv:2402.01306, eq. 7).

    With r the log-ratio of policy to reference and the baseline z of `mismatched_kl`:
    desirable    desirable_weight (1 - sigmoid(beta (r - z)))
    undesirable  undesirable_weight (1 - sigmoid(beta (z - r)))

    The paper recommends 1 to 4/3 for desirable_weight n_desirable / (undesirable_weight
    n_undesirable). Do not use it for pairs; `dpo` compares their completions. The metric
    `accuracy` is 1 where the ratio is on the right side of z.
    """
    ratio = completion_logprobs - reference_completion_logprobs
    sign = 2.0 * labels - 1.0
    weight = jnp.where(labels > 0, desirable_weight, undesirable_weight)
    loss = weight * (1.0 - jax.nn.sigmoid(beta * sign * (ratio - baseline)))
    rejected, rewards = 1.0 - labels, beta * ratio
    right = jnp.where(labels > 0, ratio > baseline, ratio < baseline).astype(jnp.float32)
    metrics = {
        "rewards/chosen": (rewards, labels),
        "rewards/rejected": (rewards, rejected),
        "logps/chosen": (completion_logprobs, labels),
        "logps/rejected": (completion_logprobs, rejected),
        "accuracy": right,
        "kl": baseline,
    }
    return loss, jax.lax.stop_gradient(metrics)


# ------------------------------------------------------------------------- without a reference


def orpo(
    chosen_logprobs: Samples,
    rejected_logprobs: Samples,
    chosen_lengths: Samples,
    rejected_lengths: Samples,
    *,
    beta: float = 0.1,
) -> tuple[Samples, dict[str, Samples]]:
    """The odds-ratio term of ORPO (Hong et al. 2024, arXiv:2403.07691, eqs. 4 and 7).

    loss = -beta log sigmoid(log odds(chosen) - log odds(rejected)), odds = p / (1 - p)

    log p is the mean log-prob over the tokens of a completion. Requires the likelihood term
    `chosen_row_nll`: without it and without a reference nothing restrains the policy.
    """
    chosen = chosen_logprobs / jnp.maximum(chosen_lengths, 1.0)
    rejected = rejected_logprobs / jnp.maximum(rejected_lengths, 1.0)
    odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    ratio = jax.nn.log_sigmoid(odds)
    metrics = pair_metrics(beta * chosen, beta * rejected, chosen, rejected)
    metrics |= jax.lax.stop_gradient({"log_odds_chosen": odds, "log_odds_ratio": ratio})
    return -beta * ratio, metrics


def cpo(
    chosen_logprobs: Samples,
    rejected_logprobs: Samples,
    *,
    beta: float = 0.1,
    form: CPOForm = "sigmoid",
    label_smoothing: float = 0.0,
) -> tuple[Samples, dict[str, Samples]]:
    """The preference term of CPO: DPO with a uniform reference (Xu et al. 2024, arXiv:2401.08417).

    sigmoid  the sigmoid form of `dpo` on d = chosen_logprobs - rejected_logprobs
    hinge    max(0, 1 - beta d)

    Its likelihood term is `chosen_nll`. The form ipo, on means, is in `cpo_normalised`.
    """
    scaled = beta * (chosen_logprobs - rejected_logprobs)
    loss = jax.nn.relu(1.0 - scaled) if form == "hinge" else _smoothed(scaled, label_smoothing)
    rewards = beta * chosen_logprobs, beta * rejected_logprobs
    return loss, pair_metrics(*rewards, chosen_logprobs, rejected_logprobs)


def cpo_normalised(
    chosen_logprobs: Samples,
    rejected_logprobs: Samples,
    chosen_lengths: Samples,
    rejected_lengths: Samples,
    *,
    beta: float = 0.1,
    gamma: float = 0.5,
    form: CPOForm = "simpo",
    label_smoothing: float = 0.0,
) -> tuple[Samples, dict[str, Samples]]:
    """Forms of CPO on the mean log-prob over the tokens of a completion. With d their difference:

    simpo  -log sigmoid(beta d - gamma), with label smoothing as in `dpo` (SimPO, Meng et al. 2024,
           arXiv:2405.14734, eq. 6)
    ipo    (d - 1 / (2 beta))^2

    The paper's SimPO uses beta 2.0 to 2.5, much larger than for sums.
    """
    chosen = chosen_logprobs / jnp.maximum(chosen_lengths, 1.0)
    rejected = rejected_logprobs / jnp.maximum(rejected_lengths, 1.0)
    gap = chosen - rejected
    if form == "ipo":
        loss = jnp.square(gap - 1.0 / (2.0 * beta))
    else:
        loss = _smoothed(beta * gap - gamma, label_smoothing)
    return loss, pair_metrics(beta * chosen, beta * rejected, chosen, rejected)


# ------------------------------------------------------------------------- shared


def judged_pairs(
    chosen_logprobs: Samples,
    rejected_logprobs: Samples,
    reference_chosen_logprobs: Samples,
    reference_rejected_logprobs: Samples,
    *,
    beta: float = 0.1,
) -> dict[str, Samples]:
    """Metrics of pairs by the implicit reward, beta times the log-ratio to the reference.

    For losses of DPO's family, and for a loss on single completions whose held-out data are pairs.
    """
    chosen = beta * (chosen_logprobs - reference_chosen_logprobs)
    rejected = beta * (rejected_logprobs - reference_rejected_logprobs)
    return pair_metrics(chosen, rejected, chosen_logprobs, rejected_logprobs)


def pair_metrics(
    chosen_rewards: Samples,
    rejected_rewards: Samples,
    chosen_logprobs: Samples,
    rejected_logprobs: Samples,
) -> dict[str, Samples]:
    """TRL's metrics of preference training. An accuracy counts a tie as wrong.

    `logps/accuracies` is ours: how often the policy finds the chosen completion more likely. It has
    a meaning before the first step, when policy and reference are equal and all rewards tie.
    """
    metrics = {
        "rewards/chosen": chosen_rewards,
        "rewards/rejected": rejected_rewards,
        "rewards/accuracies": (chosen_rewards > rejected_rewards).astype(jnp.float32),
        "rewards/margins": chosen_rewards - rejected_rewards,
        "logps/chosen": chosen_logprobs,
        "logps/rejected": rejected_logprobs,
        "logps/accuracies": (chosen_logprobs > rejected_logprobs).astype(jnp.float32),
    }
    return jax.lax.stop_gradient(metrics)


def _smoothed(x: Array, label_smoothing: float) -> Array:
    """-log sigmoid(x), mixed with the loss of the flipped label."""
    right = -(1.0 - label_smoothing) * jax.nn.log_sigmoid(x)
    if is_zero(label_smoothing):  # 0 times an overflow would be NaN
        return right
    return right - label_smoothing * jax.nn.log_sigmoid(-x)


def _log1mexp(x: Array) -> Array:
    """log(1 - exp(x)) for x < 0, accurate at both ends (Maechler 2012).

    x is at most -1e-7: a completion of probability 1 would have infinite odds and give NaN.
    """
    x = jnp.minimum(x, -1e-7)
    near = x > -0.6931472
    # Each branch gets a safe argument; otherwise the branch not taken has a NaN gradient.
    small = jnp.log(-jnp.expm1(jnp.where(near, x, -1.0)))
    large = jnp.log1p(-jnp.exp(jnp.where(near, -1.0, x)))
    return jnp.where(near, small, large)
