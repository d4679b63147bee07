"""Algorithms: one short composition of this room's functions for each record of settings.

The defaults are in `config/algorithms.py`. Algorithms that compare the samples of a prompt (all but
PPO, REINFORCE++ and ReMax) need two or more, `rollout.n`.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from jax.tree_util import Partial

from jaxrl_llm import config as c
from jaxrl_llm.algorithms import (
    advantages,
    covariance_losses,
    group_advantages,
    imitation,
    policy_losses,
    preference_losses,
    sequence_losses,
    turn_advantages,
)
from jaxrl_llm.algorithms.algorithm import Algorithm, compose
from jaxrl_llm.algorithms.kl import kl_penalty
from jaxrl_llm.algorithms.offline import OfflineAlgorithm
from jaxrl_llm.algorithms.value_losses import clipped_value_loss
from jaxrl_llm.config.algorithms import Shared
from jaxrl_llm.references import call, check_settings, load


def build_algorithm(settings: c.AlgorithmSettings) -> Algorithm | OfflineAlgorithm:
    """The algorithm that `settings` describe.

    Raises:
        ValueError: a setting out of range, or a function of the user's that cannot be loaded, does
            not have a setting, or returns something else.
    """
    if isinstance(settings, c.Custom):
        return _custom(settings)
    algorithm = BUILDERS[type(settings)](settings)
    return replace(algorithm, by_sample=not _compares_samples(settings))


def build_online(settings: c.AlgorithmSettings) -> Algorithm:
    """`build_algorithm` of settings that are known to be online."""
    algorithm = build_algorithm(settings)
    assert isinstance(algorithm, Algorithm), settings
    return algorithm


def build_offline(settings: c.AlgorithmSettings) -> OfflineAlgorithm:
    """`build_algorithm` of settings that are known to be offline."""
    algorithm = build_algorithm(settings)
    assert isinstance(algorithm, OfflineAlgorithm), settings
    return algorithm


def _compares_samples(settings: c.AlgorithmSettings) -> bool:
    """True if a policy loss takes means, or chooses tokens, over all samples of a micro-batch."""
    if isinstance(settings, Shared) and settings.bypass_mode:
        return True  # weights are normalised over samples
    covariance = isinstance(settings, c.ClipCov | c.KLCov)
    return covariance or (isinstance(settings, c.Pair) and settings.loss_mode.endswith("_cov"))


def _custom(settings: c.Custom) -> Algorithm | OfflineAlgorithm:
    function = load(settings.path)
    check_settings(settings.path, function, settings.settings)
    algorithm = call(settings.path, function, **settings.settings)
    expected = OfflineAlgorithm if settings.offline else Algorithm
    if not isinstance(algorithm, expected):
        hint = f"; set offline={not settings.offline}" * isinstance(
            algorithm, Algorithm | OfflineAlgorithm
        )
        raise ValueError(
            f"{settings.path} returned {type(algorithm).__name__}, and a Custom algorithm with "
            f"offline={settings.offline} returns {expected.__name__}{hint}"
        )
    return algorithm


# ------------------------------------------------------------------------- online


def ppo(s: c.PPO) -> Algorithm:
    advantage = Partial(advantages.gae, gamma=s.gamma, lam=s.lam)
    return compose(s, advantage, _clip(s), Partial(clipped_value_loss, cliprange=s.cliprange_value))


def grpo(s: c.GRPO) -> Algorithm:
    return compose(s, _group_advantage(s), _clip(s))


def dr_grpo(s: c.DrGRPO) -> Algorithm:
    return compose(s, Partial(group_advantages.grpo, norm_adv_by_std=False), _clip(s))


def grpo_passk(s: c.GRPOPassK) -> Algorithm:
    advantage = Partial(group_advantages.grpo_passk, norm_adv_by_std=s.norm_adv_by_std)
    return compose(s, advantage, _clip(s))


def gdpo(s: c.GDPO) -> Algorithm:
    advantage = Partial(
        group_advantages.gdpo, reward_weights=s.reward_weights, norm_adv_by_std=s.norm_adv_by_std
    )
    return compose(s, advantage, _clip(s))


def rloo(s: c.RLOO) -> Algorithm:
    return compose(s, group_advantages.rloo, _clip(s))


def reinforce_plus_plus(s: c.ReinforcePlusPlus) -> Algorithm:
    return compose(s, Partial(advantages.reinforce_plus_plus, gamma=s.gamma), _clip(s))


def reinforce_plus_plus_baseline(s: c.ReinforcePlusPlusBaseline) -> Algorithm:
    return compose(s, group_advantages.reinforce_plus_plus_baseline, _clip(s))


def remax(s: c.ReMax) -> Algorithm:
    return compose(s, advantages.remax, _clip(s))


def opo(s: c.OPO) -> Algorithm:
    return compose(s, group_advantages.opo, _clip(s))


def optimal_token_baseline(s: c.OptimalTokenBaseline) -> Algorithm:
    advantage = group_advantages.optimal_token_baseline
    if s.rollout_is is not None:
        advantage = group_advantages.corrected_optimal_token_baseline
    return compose(s, Partial(advantage, handle_zero_tail=s.handle_zero_tail), _clip(s))


def turn_ppo(s: c.TurnPPO) -> Algorithm:
    advantage = Partial(turn_advantages.turn_gae, gamma=s.gamma, lam=s.lam)
    return compose(s, advantage, _clip(s), Partial(clipped_value_loss, cliprange=s.cliprange_value))


def turn_baseline(s: c.TurnBaseline) -> Algorithm:
    return compose(s, Partial(turn_advantages.turn_baseline, gamma=s.gamma), _clip(s))


def discounted_turns(s: c.DiscountedTurns) -> Algorithm:
    advantage = Partial(
        turn_advantages.discounted_turns, gamma=s.gamma, norm_adv_by_std=s.norm_adv_by_std
    )
    return compose(s, advantage, _clip(s))


def mt_grpo(s: c.MTGRPO) -> Algorithm:
    advantage = Partial(
        turn_advantages.mt_grpo, turn_weight=s.turn_weight, norm_adv_by_std=s.norm_adv_by_std
    )
    return compose(s, advantage, _clip(s))


def gigpo(s: c.GiGPO) -> Algorithm:
    advantage = Partial(
        turn_advantages.gigpo,
        gamma=s.gamma,
        step_weight=s.step_weight,
        norm_adv_by_std=s.norm_adv_by_std,
    )
    return compose(s, advantage, _clip(s))


def gspo(s: c.GSPO) -> Algorithm:
    loss = Partial(sequence_losses.gspo, clip_low=s.clip_low, clip_high=s.clip_high)
    return compose(s, _group_advantage(s), loss)


def cispo(s: c.CISPO) -> Algorithm:
    loss = Partial(policy_losses.cispo, clip_low=s.clip_low, clip_high=s.clip_high)
    return compose(s, _group_advantage(s), loss)


def sapo(s: c.SAPO) -> Algorithm:
    loss = Partial(policy_losses.sapo, tau_pos=s.tau_pos, tau_neg=s.tau_neg)
    return compose(s, _group_advantage(s), loss)


def gmpo(s: c.GMPO) -> Algorithm:
    loss = Partial(sequence_losses.geo_mean, clip_low=s.clip_low, clip_high=s.clip_high)
    return compose(s, _group_advantage(s), loss)


def clip_cov(s: c.ClipCov) -> Algorithm:
    loss = Partial(
        covariance_losses.clip_cov,
        clip_low=s.clip_low,
        clip_high=s.clip_high,
        clip_cov_ratio=s.clip_cov_ratio,
        clip_cov_lb=s.clip_cov_lb,
        clip_cov_ub=s.clip_cov_ub,
    )
    return compose(s, _group_advantage(s), loss)


def kl_cov(s: c.KLCov) -> Algorithm:
    loss = Partial(covariance_losses.kl_cov, kl_cov_ratio=s.kl_cov_ratio, ppo_kl_coef=s.ppo_kl_coef)
    return compose(s, _group_advantage(s), loss)


def dppo_tv(s: c.DPPOTV) -> Algorithm:
    return compose(s, _group_advantage(s), _trust_region(s, policy_losses.dppo_tv))


def dppo_kl(s: c.DPPOKL) -> Algorithm:
    return compose(s, _group_advantage(s), _trust_region(s, policy_losses.dppo_kl))


def dro(s: c.DRO) -> Algorithm:
    return compose(s, _group_advantage(s), Partial(policy_losses.dro, beta=s.beta))


def gpg(s: c.GPG) -> Algorithm:
    advantage = Partial(group_advantages.gpg, f_norm=s.f_norm)
    return compose(s, advantage, policy_losses.policy_gradient)


def pair(s: c.Pair) -> Algorithm:
    shared: dict[str, Any] = {entry.name: getattr(s, entry.name) for entry in fields(c.Shared)}
    if s.loss_aggregation is not None:
        shared["loss_aggregation"] = s.loss_aggregation
    loss = build_online(LOSSES[s.loss_mode](**shared))
    if s.bypass_mode:
        # The update has the weights. The estimator's own policy loss is dropped, so its ratio is no
        # reason to refuse them.
        shared["rollout_is"] = None
    estimator = build_online(ESTIMATORS[s.adv_estimator](**shared))
    return replace(loss, advantage=estimator.advantage, value_loss=estimator.value_loss)


def rejection_sampling(s: c.RejectionSampling) -> Algorithm:
    shared = c.Composed(
        loss_aggregation=s.loss_aggregation,
        use_kl_loss=s.use_kl_loss,
        kl_loss_type=s.kl_loss_type,
        kl_loss_coef=s.kl_loss_coef,
    )
    advantage = Partial(imitation.best_of_n, threshold=s.threshold)
    return replace(compose(shared, advantage, imitation.nll), rejection=imitation.keep_chosen)


def distillation(s: c.Distillation) -> Algorithm:
    if s.kl_type in ("k1", "kl"):
        loss = imitation.with_distance(_clip(s))
        return compose(_of_completions(s), imitation.teacher_advantage, loss)
    loss = Partial(imitation.reverse_kl, estimator=kl_penalty(s.kl_type))
    return compose(_of_completions(s), imitation.no_advantage, loss)


def distillation_top_k(s: c.DistillationTopK) -> Algorithm:
    return compose(_of_completions(s), imitation.no_advantage, imitation.forward_kl_top_k)


def _of_completions(s: c.FromTeacher) -> c.Composed:
    return c.Composed(loss_aggregation=s.loss_aggregation, entropy_coef=s.entropy_coef)


def _clip(s: c.Clipped | c.Distillation) -> Callable[..., Any]:
    return Partial(
        policy_losses.ppo_clip, clip_low=s.clip_low, clip_high=s.clip_high, clip_c=s.clip_c
    )


def _group_advantage(s: c.GRPO | c.GroupAdvantage) -> Callable[..., Any]:
    return Partial(group_advantages.grpo, norm_adv_by_std=s.norm_adv_by_std, std_of=s.std_of)


def _trust_region(s: c.DPPOTV, loss: Callable[..., Any]) -> Callable[..., Any]:
    return Partial(
        loss,
        divergence_low=s.divergence_low,
        divergence_high=s.divergence_high,
        clip_c=s.clip_c,
    )


# The two names of `Pair`: the algorithm whose advantage or loss each takes. They are verl's, which
# has no estimators of turns.
ESTIMATORS: dict[str, type[c.Composed]] = {
    "gae": c.PPO,
    "grpo": c.GRPO,
    "grpo_passk": c.GRPOPassK,
    "gdpo": c.GDPO,
    "rloo": c.RLOO,
    "reinforce_plus_plus": c.ReinforcePlusPlus,
    "reinforce_plus_plus_baseline": c.ReinforcePlusPlusBaseline,
    "remax": c.ReMax,
    "opo": c.OPO,
    "gpg": c.GPG,
    "optimal_token_baseline": c.OptimalTokenBaseline,
    "turn_gae": c.TurnPPO,
    "turn_baseline": c.TurnBaseline,
    "discounted_turns": c.DiscountedTurns,
    "mt_grpo": c.MTGRPO,
    "gigpo": c.GiGPO,
}
LOSSES: dict[str, type[c.Composed]] = {
    "vanilla": c.PPO,
    "gspo": c.GSPO,
    "sapo": c.SAPO,
    "gpg": c.GPG,
    "clip_cov": c.ClipCov,
    "kl_cov": c.KLCov,
    "geo_mean": c.GMPO,
    "cispo": c.CISPO,
    "dppo_tv": c.DPPOTV,
    "dppo_kl": c.DPPOKL,
}


# ------------------------------------------------------------------------- offline


def sft(s: c.SFT) -> OfflineAlgorithm:
    return OfflineAlgorithm(token_loss=preference_losses.completion_nll)


def reward_model(s: c.PairwiseRewardModel) -> OfflineAlgorithm:
    return OfflineAlgorithm(loss=Partial(preference_losses.bradley_terry, center=s.center))


def reward_regression(s: c.RewardRegression) -> OfflineAlgorithm:
    return OfflineAlgorithm(loss=preference_losses.rating_error)


def dpo(s: c.DPO) -> OfflineAlgorithm:
    _check_smoothing(s.form, s.label_smoothing, ("sigmoid", "sigmoid_norm", "robust"))
    normalised = s.form in ("ipo", "sigmoid_norm")
    loss = preference_losses.dpo_normalised if normalised else preference_losses.dpo
    return OfflineAlgorithm(
        loss=Partial(loss, beta=s.beta, form=s.form, label_smoothing=s.label_smoothing),
        token_loss=preference_losses.chosen_nll if s.sft_coef else None,
        token_loss_coef=s.sft_coef,
    )


def ipo(s: c.IPO) -> OfflineAlgorithm:
    return OfflineAlgorithm(loss=Partial(preference_losses.dpo_normalised, beta=s.beta, form="ipo"))


def kto(s: c.KTO) -> OfflineAlgorithm:
    loss = Partial(
        preference_losses.kto,
        beta=s.beta,
        desirable_weight=s.desirable_weight,
        undesirable_weight=s.undesirable_weight,
    )
    return OfflineAlgorithm(
        loss=loss,
        baseline=preference_losses.mismatched_kl,
        judge_pairs=Partial(preference_losses.judged_pairs, beta=s.beta),
    )


def orpo(s: c.ORPO) -> OfflineAlgorithm:
    return OfflineAlgorithm(
        loss=Partial(preference_losses.orpo, beta=s.beta),
        token_loss=preference_losses.chosen_row_nll,
    )


def simpo(s: c.SimPO) -> OfflineAlgorithm:
    loss = Partial(
        preference_losses.cpo_normalised,
        beta=s.beta,
        gamma=s.gamma,
        form="simpo",
        label_smoothing=s.label_smoothing,
    )
    return OfflineAlgorithm(
        loss=loss,
        token_loss=preference_losses.chosen_nll if s.sft_coef else None,
        token_loss_coef=s.sft_coef,
    )


def cpo(s: c.CPO) -> OfflineAlgorithm:
    _check_smoothing(s.form, s.label_smoothing, ("sigmoid",))
    loss = preference_losses.cpo_normalised if s.form == "ipo" else preference_losses.cpo
    return OfflineAlgorithm(
        loss=Partial(loss, beta=s.beta, form=s.form, label_smoothing=s.label_smoothing),
        token_loss=preference_losses.chosen_nll if s.cpo_alpha else None,
        token_loss_coef=s.cpo_alpha,
    )


def _check_smoothing(form: str, value: float, smoothed: tuple[str, ...]) -> None:
    if value and form not in smoothed:
        raise ValueError(
            f"label_smoothing={value}: form={form} has no smoothing; set it to 0, or take form="
            f"{smoothed[0]}"
        )


BUILDERS: dict[type[Any], Callable[[Any], Algorithm | OfflineAlgorithm]] = {
    c.PPO: ppo,
    c.GRPO: grpo,
    c.DrGRPO: dr_grpo,
    c.DAPO: grpo,
    c.GRPOPassK: grpo_passk,
    c.GDPO: gdpo,
    c.RLOO: rloo,
    c.ReinforcePlusPlus: reinforce_plus_plus,
    c.ReinforcePlusPlusBaseline: reinforce_plus_plus_baseline,
    c.ReMax: remax,
    c.OPO: opo,
    c.OptimalTokenBaseline: optimal_token_baseline,
    c.TurnPPO: turn_ppo,
    c.TurnBaseline: turn_baseline,
    c.DiscountedTurns: discounted_turns,
    c.MTGRPO: mt_grpo,
    c.GiGPO: gigpo,
    c.GSPO: gspo,
    c.CISPO: cispo,
    c.SAPO: sapo,
    c.GMPO: gmpo,
    c.ClipCov: clip_cov,
    c.KLCov: kl_cov,
    c.DPPOTV: dppo_tv,
    c.DPPOKL: dppo_kl,
    c.DRO: dro,
    c.GPG: gpg,
    c.Pair: pair,
    c.RejectionSampling: rejection_sampling,
    c.Distillation: distillation,
    c.DistillationTopK: distillation_top_k,
    c.SFT: sft,
    c.PairwiseRewardModel: reward_model,
    c.RewardRegression: reward_regression,
    c.DPO: dpo,
    c.IPO: ipo,
    c.KTO: kto,
    c.ORPO: orpo,
    c.SimPO: simpo,
    c.CPO: cpo,
}
