"""Offline algorithms: each a short composition of the losses on fixed data.

A config names one of these functions; `-> OfflineAlgorithm` is what tells the config's check,
which reads the source alone, that the run is offline. Settings are keyword-only, with plain
annotations and literal defaults, those of the papers and of TRL where the two agree.
"""

from functools import partial
from typing import Literal

from jaxrl_llm.algorithms import preference_losses as losses
from jaxrl_llm.algorithms.offline import OfflineAlgorithm


def sft() -> OfflineAlgorithm:
    """Supervised fine-tuning: next-token likelihood of completions, every token weighing alike."""
    return OfflineAlgorithm(token_loss=losses.completion_nll)


def reward_model(*, center: float = 0.0) -> OfflineAlgorithm:
    """A scalar model on preference pairs; `center` draws the scores to 0."""
    _not_negative("center", center)
    return OfflineAlgorithm(loss=partial(losses.bradley_terry, center=center))


def reward_regression() -> OfflineAlgorithm:
    """A scalar model on rated completions: squared error."""
    return OfflineAlgorithm(loss=losses.rating_error)


def dpo(
    *,
    beta: float = 0.1,
    form: Literal["sigmoid", "robust", "ipo", "hinge", "sigmoid_norm"] = "sigmoid",
    label_smoothing: float = 0.0,
    sft_coef: float = 0.0,
) -> OfflineAlgorithm:
    """DPO and its forms, which `preference_losses.dpo` and `dpo_normalised` define.

    `beta` holds the policy to its reference: larger is tighter. `label_smoothing` is the share of
    labels taken to be wrong (sigmoid, sigmoid_norm, robust). `sft_coef` adds the mean negative
    log-likelihood of the chosen completions (Pang et al. 2024, arXiv:2404.19733).
    """
    _positive("beta", beta)
    _check_smoothing(form, label_smoothing, ("sigmoid", "sigmoid_norm", "robust"))
    loss = losses.dpo_normalised if form in ("ipo", "sigmoid_norm") else losses.dpo
    return OfflineAlgorithm(
        loss=partial(loss, beta=beta, form=form, label_smoothing=label_smoothing),
        token_loss=losses.chosen_nll if sft_coef else None,
        token_loss_coef=sft_coef,
    )


def ipo(*, beta: float = 0.1) -> OfflineAlgorithm:
    """IPO: the log-ratio gap is drawn to 1 / (2 beta) instead of growing without bound."""
    _positive("beta", beta)
    return OfflineAlgorithm(loss=partial(losses.dpo_normalised, beta=beta, form="ipo"))


def kto(
    *, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
) -> OfflineAlgorithm:
    """KTO: completions labelled good or bad, one at a time; pairs are taken apart."""
    _positive("beta", beta)
    _not_negative("desirable_weight", desirable_weight)
    _not_negative("undesirable_weight", undesirable_weight)
    loss = partial(
        losses.kto,
        beta=beta,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
    )
    return OfflineAlgorithm(
        loss=loss,
        baseline=losses.mismatched_kl,
        judge_pairs=partial(losses.judged_pairs, beta=beta),
    )


def orpo(*, beta: float = 0.1) -> OfflineAlgorithm:
    """ORPO: likelihood of the chosen row and `beta` times an odds ratio, without a reference."""
    _positive("beta", beta)
    return OfflineAlgorithm(loss=partial(losses.orpo, beta=beta), token_loss=losses.chosen_row_nll)


def simpo(
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
    label_smoothing: float = 0.0,
    sft_coef: float = 0.0,
) -> OfflineAlgorithm:
    """SimPO: the mean log-prob is the reward, the pair must differ by `gamma`; no reference.

    Defaults are the paper's; beta is larger than DPO's, because a mean is smaller than a sum.
    """
    _positive("beta", beta)
    _check_smoothing("simpo", label_smoothing, ("simpo",))
    loss = partial(
        losses.cpo_normalised,
        beta=beta,
        gamma=gamma,
        form="simpo",
        label_smoothing=label_smoothing,
    )
    return OfflineAlgorithm(
        loss=loss, token_loss=losses.chosen_nll if sft_coef else None, token_loss_coef=sft_coef
    )


def cpo(
    *,
    beta: float = 0.1,
    form: Literal["sigmoid", "ipo", "hinge"] = "sigmoid",
    label_smoothing: float = 0.0,
    cpo_alpha: float = 1.0,
) -> OfflineAlgorithm:
    """CPO: DPO without a reference, and `cpo_alpha` times the likelihood of the chosen."""
    _positive("beta", beta)
    _not_negative("cpo_alpha", cpo_alpha)
    _check_smoothing(form, label_smoothing, ("sigmoid",))
    loss = losses.cpo_normalised if form == "ipo" else losses.cpo
    return OfflineAlgorithm(
        loss=partial(loss, beta=beta, form=form, label_smoothing=label_smoothing),
        token_loss=losses.chosen_nll if cpo_alpha else None,
        token_loss_coef=cpo_alpha,
    )


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name}={value}: must be above 0; 0.1 is usual")


def _not_negative(name: str, value: float) -> None:
    if not value >= 0:
        raise ValueError(f"{name}={value}: must be 0 or more")


def _check_smoothing(form: str, value: float, smoothed: tuple[str, ...]) -> None:
    if not 0 <= value < 0.5:
        raise ValueError(
            f"label_smoothing={value}: a share of wrong labels from 0 to below 0.5; 0.1 is usual"
        )
    if value and form not in smoothed:
        raise ValueError(
            f"label_smoothing={value}: form={form} has no smoothing; set it to 0, or take form="
            f"{smoothed[0]}"
        )
