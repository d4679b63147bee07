"""Algorithms: each a short composition of the functions of this room.

A config names one of these functions and its settings (`FunctionConfig`), so settings are
keyword-only, with plain annotations and literal defaults that are read from the source. What all
have in common, the aggregation, KL, entropy and rollout correction, are the settings of
`algorithm.compose`; a function that names one of them has another default for it.

Those that compare the samples of a prompt (all but ppo, reinforce_plus_plus and remax) need two or
more, `rollout.n`. Where a reference model is used by default, `use_kl_loss=False` leaves it out.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from jaxrl_llm.algorithms import advantages, group_advantages
from jaxrl_llm.algorithms.algorithm import Algorithm, compose
from jaxrl_llm.algorithms.covariance_losses import clip_cov as clip_cov_loss
from jaxrl_llm.algorithms.covariance_losses import kl_cov as kl_cov_loss
from jaxrl_llm.algorithms.policy_losses import cispo as cispo_loss
from jaxrl_llm.algorithms.policy_losses import dppo_kl as dppo_kl_loss
from jaxrl_llm.algorithms.policy_losses import dppo_tv as dppo_tv_loss
from jaxrl_llm.algorithms.policy_losses import dro as dro_loss
from jaxrl_llm.algorithms.policy_losses import policy_gradient, ppo_clip
from jaxrl_llm.algorithms.policy_losses import sapo as sapo_loss
from jaxrl_llm.algorithms.sequence_losses import geo_mean
from jaxrl_llm.algorithms.sequence_losses import gspo as gspo_loss
from jaxrl_llm.algorithms.value_losses import clipped_value_loss
from jaxrl_llm.signatures import with_settings_of

__all__ = ["Algorithm", "compose"]


@with_settings_of(compose)
def ppo(
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float = 3.0,
    cliprange_value: float = 0.5,
    **settings: Any,
) -> Algorithm:
    """PPO with a critic: GAE, clipped policy and value losses. arXiv:1707.06347."""
    return compose(
        partial(advantages.gae, gamma=gamma, lam=lam),
        partial(ppo_clip, clip_low=clip_low, clip_high=clip_high, clip_c=clip_c),
        partial(clipped_value_loss, cliprange=cliprange_value),
        **settings,
    )


# ------------------------------------------------------------------------- estimators, PPO's loss


@with_settings_of(compose)
def with_ppo_clip(
    advantage: Callable[..., Any],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float = 3.0,
    **settings: Any,
) -> Algorithm:
    """An advantage estimator under PPO's clipped policy loss, without a critic."""
    loss = partial(ppo_clip, clip_low=clip_low, clip_high=clip_high, clip_c=clip_c)
    return compose(advantage, loss, **settings)


@with_settings_of(with_ppo_clip)
def grpo(*, norm_adv_by_std: bool = True, use_kl_loss: bool = True, **settings: Any) -> Algorithm:
    """GRPO: no critic; a sample is compared with the others that answer its prompt.

    With the KL in the loss, as verl's recipes have it. The paper's own aggregation is
    seq-mean-token-mean. arXiv:2402.03300.
    """
    advantage = partial(group_advantages.grpo, norm_adv_by_std=norm_adv_by_std)
    return with_ppo_clip(advantage, use_kl_loss=use_kl_loss, **settings)


@with_settings_of(with_ppo_clip)
def dr_grpo(*, loss_aggregation: str = "seq-mean-token-sum-norm", **settings: Any) -> Algorithm:
    """Dr. GRPO: GRPO without its two biases, the group's std and the response's length.

    Not divided by the std, and a response's tokens summed over a constant length (`loss_scale`,
    else the maximum length). arXiv:2503.20783.
    """
    advantage = partial(group_advantages.grpo, norm_adv_by_std=False)
    return with_ppo_clip(advantage, loss_aggregation=loss_aggregation, **settings)


@with_settings_of(grpo)
def dapo(*, clip_high: float = 0.28, use_kl_loss: bool = False, **settings: Any) -> Algorithm:
    """DAPO: GRPO with a higher upper clip, the mean over all tokens, and no KL.

    Its other two parts are settings of the run: `rollout.filter_groups` generates again in place
    of groups that teach nothing, and `rewards.overlong` is the penalty for long responses
    (configs/dapo.py has both). arXiv:2503.14476.
    """
    return grpo(clip_high=clip_high, use_kl_loss=use_kl_loss, **settings)


@with_settings_of(with_ppo_clip)
def grpo_passk(*, norm_adv_by_std: bool = True, **settings: Any) -> Algorithm:
    """GRPO for pass@k: only the best of a group learns. arXiv:2503.19595."""
    advantage = partial(group_advantages.grpo_passk, norm_adv_by_std=norm_adv_by_std)
    return with_ppo_clip(advantage, **settings)


@with_settings_of(with_ppo_clip)
def gdpo(
    *,
    reward_weights: tuple[float, ...] = (),
    norm_adv_by_std: bool = True,
    **settings: Any,
) -> Algorithm:
    """GDPO: several reward functions, each standardised by itself. arXiv:2601.05242."""
    advantage = partial(
        group_advantages.gdpo, reward_weights=reward_weights, norm_adv_by_std=norm_adv_by_std
    )
    return with_ppo_clip(advantage, **settings)


@with_settings_of(with_ppo_clip)
def rloo(**settings: Any) -> Algorithm:
    """RLOO: the baseline of a sample is the mean of the others of its group. arXiv:2402.14740."""
    return with_ppo_clip(group_advantages.rloo, **settings)


@with_settings_of(with_ppo_clip)
def reinforce_plus_plus(*, gamma: float = 1.0, **settings: Any) -> Algorithm:
    """REINFORCE++: returns whitened over the batch; one sample a prompt does. arXiv:2501.03262."""
    return with_ppo_clip(partial(advantages.reinforce_plus_plus, gamma=gamma), **settings)


@with_settings_of(with_ppo_clip)
def reinforce_plus_plus_baseline(**settings: Any) -> Algorithm:
    """REINFORCE++ with the mean of the group for a baseline. arXiv:2501.03262."""
    return with_ppo_clip(group_advantages.reinforce_plus_plus_baseline, **settings)


@with_settings_of(with_ppo_clip)
def remax(**settings: Any) -> Algorithm:
    """ReMax: the baseline is the reward of a greedy answer; one sample does. arXiv:2310.10505."""
    return with_ppo_clip(advantages.remax, **settings)


@with_settings_of(with_ppo_clip)
def opo(**settings: Any) -> Algorithm:
    """OPO: the baseline is the group's mean weighted by length. arXiv:2505.23585.

    The paper is exactly on-policy: one mini-batch and one epoch an iteration.
    """
    return with_ppo_clip(group_advantages.opo, **settings)


@with_settings_of(with_ppo_clip)
def optimal_token_baseline(*, handle_zero_tail: bool = True, **settings: Any) -> Algorithm:
    """A baseline for each token, from the squared size of its gradient."""
    corrected = settings.get("rollout_is") is not None
    advantage = group_advantages.optimal_token_baseline
    if corrected:
        advantage = group_advantages.corrected_optimal_token_baseline
    return with_ppo_clip(partial(advantage, handle_zero_tail=handle_zero_tail), **settings)


# ------------------------------------------------------------------------- losses, GRPO's advantage


@with_settings_of(compose)
def with_group_advantage(
    policy_loss: Callable[..., Any], *, norm_adv_by_std: bool = True, **settings: Any
) -> Algorithm:
    """A policy loss on the advantages of GRPO."""
    advantage = partial(group_advantages.grpo, norm_adv_by_std=norm_adv_by_std)
    return compose(advantage, policy_loss, **settings)


@with_settings_of(with_group_advantage)
def gspo(
    *,
    clip_low: float = 0.0003,
    clip_high: float = 0.0004,
    loss_aggregation: str = "seq-mean-token-mean",
    **settings: Any,
) -> Algorithm:
    """GSPO: the ratio of whole responses, clipped tightly. arXiv:2507.18071."""
    loss = partial(gspo_loss, clip_low=clip_low, clip_high=clip_high)
    return with_group_advantage(loss, loss_aggregation=loss_aggregation, **settings)


@with_settings_of(with_group_advantage)
def cispo(*, clip_low: float = 1.0, clip_high: float = 0.2, **settings: Any) -> Algorithm:
    """CISPO: clipped importance weights; every token keeps its gradient. arXiv:2506.13585."""
    loss = partial(cispo_loss, clip_low=clip_low, clip_high=clip_high)
    return with_group_advantage(loss, **settings)


@with_settings_of(with_group_advantage)
def sapo(
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    loss_aggregation: str = "seq-mean-token-mean",
    **settings: Any,
) -> Algorithm:
    """SAPO: a soft gate in the place of the clip. arXiv:2511.20347."""
    loss = partial(sapo_loss, tau_pos=tau_pos, tau_neg=tau_neg)
    return with_group_advantage(loss, loss_aggregation=loss_aggregation, **settings)


@with_settings_of(with_group_advantage)
def gmpo(
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    loss_aggregation: str = "seq-mean-token-mean",
    **settings: Any,
) -> Algorithm:
    """GMPO: the geometric mean of a response's ratios. arXiv:2507.20673."""
    loss = partial(geo_mean, clip_low=clip_low, clip_high=clip_high)
    return with_group_advantage(loss, loss_aggregation=loss_aggregation, **settings)


@with_settings_of(with_group_advantage)
def clip_cov(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_cov_ratio: float = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
    **settings: Any,
) -> Algorithm:
    """Clip-Cov: no gradient for a few tokens of large covariance. arXiv:2505.22617."""
    loss = partial(
        clip_cov_loss,
        clip_low=clip_low,
        clip_high=clip_high,
        clip_cov_ratio=clip_cov_ratio,
        clip_cov_lb=clip_cov_lb,
        clip_cov_ub=clip_cov_ub,
    )
    return with_group_advantage(loss, **settings)


@with_settings_of(with_group_advantage)
def kl_cov(*, kl_cov_ratio: float = 0.0002, ppo_kl_coef: float = 0.1, **settings: Any) -> Algorithm:
    """KL-Cov: a penalty on a few tokens of large covariance. arXiv:2505.22617."""
    loss = partial(kl_cov_loss, kl_cov_ratio=kl_cov_ratio, ppo_kl_coef=ppo_kl_coef)
    return with_group_advantage(loss, **settings)


@with_settings_of(with_group_advantage)
def dppo_tv(
    *,
    divergence_low: float = 0.2,
    divergence_high: float = 0.2,
    clip_c: float = 20.0,
    **settings: Any,
) -> Algorithm:
    """DPPO: a trust region of total variation a token. arXiv:2602.04879."""
    loss = partial(
        dppo_tv_loss, divergence_low=divergence_low, divergence_high=divergence_high, clip_c=clip_c
    )
    return with_group_advantage(loss, **settings)


@with_settings_of(with_group_advantage)
def dppo_kl(
    *,
    divergence_low: float = 0.05,
    divergence_high: float = 0.05,
    clip_c: float = 20.0,
    **settings: Any,
) -> Algorithm:
    """DPPO: a trust region of KL a token. arXiv:2602.04879."""
    loss = partial(
        dppo_kl_loss, divergence_low=divergence_low, divergence_high=divergence_high, clip_c=clip_c
    )
    return with_group_advantage(loss, **settings)


@with_settings_of(with_group_advantage)
def dro(*, beta: float, **settings: Any) -> Algorithm:
    """DRO: a quadratic penalty on the log-ratio. arXiv:2405.19107."""
    return with_group_advantage(partial(dro_loss, beta=beta), **settings)


# ------------------------------------------------------------------------- both of its own


@with_settings_of(compose)
def gpg(*, f_norm: float = 1.0, **settings: Any) -> Algorithm:
    """GPG: plain policy gradient on group advantages; no ratio, no old policy. arXiv:2504.02546.

    One mini-batch and one epoch an iteration: what comes after the first step is off-policy.
    """
    return compose(partial(group_advantages.gpg, f_norm=f_norm), policy_gradient, **settings)


# ------------------------------------------------------------------------- any two of them


@with_settings_of(compose)
def pair(
    *,
    adv_estimator: Literal[
        "gae",
        "grpo",
        "grpo_passk",
        "gdpo",
        "rloo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
        "opo",
        "gpg",
        "optimal_token_baseline",
    ] = "gae",
    loss_mode: Literal[
        "vanilla",
        "gspo",
        "sapo",
        "gpg",
        "clip_cov",
        "kl_cov",
        "geo_mean",
        "cispo",
        "dppo_tv",
        "dppo_kl",
    ] = "vanilla",
    **settings: Any,
) -> Algorithm:
    """Any estimator under any policy loss, by verl's two names, each with its own defaults.

    The aggregation is the loss's unless `loss_aggregation` is given. For other settings of the two,
    and for `dro`, whose `beta` has no default, compose a function of your own.
    """
    settings = {"use_kl_loss": False} | settings
    estimator, loss = _ESTIMATORS[adv_estimator](**settings), _LOSSES[loss_mode](**settings)
    return replace(estimator, policy_loss=loss.policy_loss, aggregate=loss.aggregate)


_ESTIMATORS: dict[str, Callable[..., Algorithm]] = {
    "gae": ppo,
    "grpo": grpo,
    "grpo_passk": grpo_passk,
    "gdpo": gdpo,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "opo": opo,
    "gpg": gpg,
    "optimal_token_baseline": optimal_token_baseline,
}
_LOSSES: dict[str, Callable[..., Algorithm]] = {
    "vanilla": rloo,
    "gspo": gspo,
    "sapo": sapo,
    "gpg": gpg,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "geo_mean": gmpo,
    "cispo": cispo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
}
