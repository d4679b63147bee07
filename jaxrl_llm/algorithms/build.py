"""Algorithms: one short composition of this room's functions for each record of settings.

The defaults are in `config/algorithms.py`. Algorithms that compare the samples of a prompt (all but
PPO, REINFORCE++ and ReMax) need two or more, `rollout.n`.
"""

import inspect
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
    return compose(s, _with(advantages.gae, s), _clip(s), _value_loss(s))


def grpo(s: c.GRPO) -> Algorithm:
    return compose(s, _group_advantage(s), _clip(s))


def dr_grpo(s: c.DrGRPO) -> Algorithm:
    return compose(s, Partial(group_advantages.grpo, norm_adv_by_std=False), _clip(s))


def optimal_token_baseline(s: c.OptimalTokenBaseline) -> Algorithm:
    advantage = group_advantages.optimal_token_baseline
    if s.rollout_is is not None:
        advantage = group_advantages.corrected_optimal_token_baseline
    return compose(s, _with(advantage, s), _clip(s))


def turn_ppo(s: c.TurnPPO) -> Algorithm:
    return compose(s, _with(turn_advantages.turn_gae, s), _clip(s), _value_loss(s))


def gpg(s: c.GPG) -> Algorithm:
    return compose(s, _with(group_advantages.gpg, s), policy_losses.policy_gradient)


def _clipped(advantage: Callable[..., Any]) -> Callable[[Any], Algorithm]:
    """An estimator of advantages with PPO's loss."""
    return lambda s: compose(s, _with(advantage, s), _clip(s))


def _grouped(loss: Callable[..., Any]) -> Callable[[Any], Algorithm]:
    """A policy loss with GRPO's advantages."""
    return lambda s: compose(s, _group_advantage(s), _with(loss, s))


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
    algorithm = compose(shared, _with(imitation.best_of_n, s), imitation.nll)
    return replace(algorithm, rejection=imitation.keep_chosen)


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


def _with(fn: Callable[..., Any], s: c.AlgorithmSettings) -> Callable[..., Any]:
    """`fn` with the settings that its keyword-only parameters name; each must be one of `s`."""
    parameters = inspect.signature(fn).parameters.values()
    names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    return Partial(fn, **{name: getattr(s, name) for name in names}) if names else fn


def _clip(s: c.Clipped | c.Distillation) -> Callable[..., Any]:
    return _with(policy_losses.ppo_clip, s)


def _group_advantage(s: c.GRPO | c.GroupAdvantage) -> Callable[..., Any]:
    return _with(group_advantages.grpo, s)


def _value_loss(s: c.PPO | c.TurnPPO) -> Callable[..., Any]:
    return Partial(clipped_value_loss, cliprange=s.cliprange_value)


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
    return OfflineAlgorithm(loss=_with(preference_losses.bradley_terry, s))


def reward_regression(s: c.RewardRegression) -> OfflineAlgorithm:
    return OfflineAlgorithm(loss=preference_losses.rating_error)


def dpo(s: c.DPO) -> OfflineAlgorithm:
    _check_smoothing(s.form, s.label_smoothing, ("sigmoid", "sigmoid_norm", "robust"))
    normalised = s.form in ("ipo", "sigmoid_norm")
    loss = preference_losses.dpo_normalised if normalised else preference_losses.dpo
    return OfflineAlgorithm(
        loss=_with(loss, s),
        token_loss=preference_losses.chosen_nll if s.sft_coef else None,
        token_loss_coef=s.sft_coef,
    )


def ipo(s: c.IPO) -> OfflineAlgorithm:
    return OfflineAlgorithm(loss=Partial(preference_losses.dpo_normalised, beta=s.beta, form="ipo"))


def kto(s: c.KTO) -> OfflineAlgorithm:
    return OfflineAlgorithm(
        loss=_with(preference_losses.kto, s),
        baseline=preference_losses.mismatched_kl,
        judge_pairs=_with(preference_losses.judged_pairs, s),
    )


def orpo(s: c.ORPO) -> OfflineAlgorithm:
    return OfflineAlgorithm(
        loss=_with(preference_losses.orpo, s), token_loss=preference_losses.chosen_row_nll
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
    loss = _with(preference_losses.cpo, s)
    if s.form == "ipo":
        loss = Partial(preference_losses.cpo_normalised, beta=s.beta, form=s.form)
    return OfflineAlgorithm(
        loss=loss,
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
    c.GRPOPassK: _clipped(group_advantages.grpo_passk),
    c.GDPO: _clipped(group_advantages.gdpo),
    c.RLOO: _clipped(group_advantages.rloo),
    c.ReinforcePlusPlus: _clipped(advantages.reinforce_plus_plus),
    c.ReinforcePlusPlusBaseline: _clipped(group_advantages.reinforce_plus_plus_baseline),
    c.ReMax: _clipped(advantages.remax),
    c.OPO: _clipped(group_advantages.opo),
    c.OptimalTokenBaseline: optimal_token_baseline,
    c.TurnPPO: turn_ppo,
    c.TurnBaseline: _clipped(turn_advantages.turn_baseline),
    c.DiscountedTurns: _clipped(turn_advantages.discounted_turns),
    c.MTGRPO: _clipped(turn_advantages.mt_grpo),
    c.GiGPO: _clipped(turn_advantages.gigpo),
    c.GSPO: _grouped(sequence_losses.gspo),
    c.CISPO: _grouped(policy_losses.cispo),
    c.SAPO: _grouped(policy_losses.sapo),
    c.GMPO: _grouped(sequence_losses.geo_mean),
    c.ClipCov: _grouped(covariance_losses.clip_cov),
    c.KLCov: _grouped(covariance_losses.kl_cov),
    c.DPPOTV: _grouped(policy_losses.dppo_tv),
    c.DPPOKL: _grouped(policy_losses.dppo_kl),
    c.DRO: _grouped(policy_losses.dro),
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
