"""The settings of every algorithm. `algorithms/build.py` composes each from pure functions.

A record that inherits from another has its settings, with another default where it names one.
Names and defaults are verl's online, and those of the papers and TRL offline.
"""

from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Gt, Lt
from pydantic import BeforeValidator

from jaxrl_llm.config.records import (
    Count,
    Custom,
    Fraction,
    Kind,
    Many,
    Maybe,
    NotNegative,
    Positive,
    Text,
    guess,
    one_of,
    record,
)

__all__ = [
    "Online", "Offline", "Shared", "Composed", "Clipped", "PPO", "GRPO", "DrGRPO", "DAPO",
    "GRPOPassK", "GDPO", "RLOO", "ReinforcePlusPlus", "ReinforcePlusPlusBaseline", "ReMax",
    "OPO", "OptimalTokenBaseline", "GroupAdvantage", "GSPO", "CISPO", "SAPO", "GMPO", "ClipCov",
    "KLCov", "DPPOTV", "DPPOKL", "DRO", "GPG", "Pair", "RejectionSampling", "DistillationTopK",
    "Distillation", "SFT", "PairwiseRewardModel", "RewardRegression", "DPO", "IPO", "KTO",
    "ORPO", "SimPO", "CPO", "ALGORITHMS", "AlgorithmSettings",
]  # fmt: skip

Aggregation = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]
CompletionAggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]
# Estimators of the KL; with a + the gradient is that of k2 (straight-through).
KLType = Literal[
    "k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "k3_unclamped",
    "k1+", "kl+", "abs+", "k2+", "mse+", "k3+", "low_var_kl+", "k3_unclamped+",
]  # fmt: skip


def _threshold(value: Any) -> Any:
    """Text of a command line: "0.5_2" is a band, which Python would read as the number 0.52."""
    return guess(value) if isinstance(value, Text) and "_" not in value else value


Threshold = Annotated[float | str, BeforeValidator(_threshold)]
DualClip = Annotated[float, Gt(1)]  # the bound on the ratio where the advantage is negative
Smoothing = Annotated[NotNegative, Lt(0.5)]  # the share of labels taken to be wrong


@record
class Online(Kind):
    """An algorithm that learns from its own samples."""


@record
class Offline(Kind):
    """An algorithm that learns from fixed records."""


# ------------------------------------------------------------------------- online


@record
class Shared(Online):
    """Entropy, KL and rollout correction: settings that most online algorithms have.

    The KL goes into the reward, into the loss, both or neither. A term whose coefficient is 0 is
    left out, and without a KL term no reference model is loaded.
    """

    loss_scale: Maybe[Count] = None  # the length that seq-mean-token-sum-norm divides by
    entropy_coef: float = 0.0
    use_kl_in_reward: bool = False
    kl_reward_type: KLType = "k1"
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: float = 0.001
    kl_horizon: Positive = 10000.0  # samples
    kl_target: Positive = 0.1
    use_kl_loss: bool = False
    kl_loss_type: KLType = "low_var_kl"
    kl_loss_coef: float = 0.001
    # Importance weights for the gap between sampler and trainer. The threshold is an upper bound,
    # or a band "0.5_2.0" outside of which the weight is 0. None is 2, and for samples of
    # config.max_staleness from 2 on what docs/placement.md says.
    rollout_is: Maybe[Literal["token", "sequence"]] = None
    rollout_is_threshold: Maybe[Threshold] = None
    rollout_is_batch_normalize: bool = False
    # Rejection rules, e.g. "token_k1,seq_mean_k3"; one threshold for all or one each.
    rollout_rs: Maybe[str] = None
    rollout_rs_threshold: Maybe[Threshold] = None
    # The sampler's policy is the old one. The corrections above are then part of the update.
    bypass_mode: bool = False


@record
class Composed(Shared):
    """An advantage estimator and a policy loss, aggregated over tokens."""

    loss_aggregation: Aggregation = "token-mean"


@record
class Clipped(Composed):
    """PPO's clipped policy loss."""

    clip_low: NotNegative = 0.2
    clip_high: NotNegative = 0.2
    clip_c: DualClip = 3.0


@record
class PPO(Clipped):
    """PPO with a critic: GAE, clipped policy and value losses. arXiv:1707.06347."""

    kind: ClassVar[str] = "ppo"
    gamma: Fraction = 1.0
    lam: Fraction = 1.0
    cliprange_value: Positive = 0.5


@record
class GRPO(Clipped):
    """GRPO: a sample is compared with the others of its group. arXiv:2402.03300.

    The KL is in the loss, as in verl's recipes. The paper aggregates by seq-mean-token-mean.
    """

    kind: ClassVar[str] = "grpo"
    norm_adv_by_std: bool = True
    use_kl_loss: bool = True


@record
class DrGRPO(Clipped):
    """Dr. GRPO: not divided by the group's std, nor by a response's length. arXiv:2503.20783."""

    kind: ClassVar[str] = "dr_grpo"
    loss_aggregation: Aggregation = "seq-mean-token-sum-norm"


@record
class DAPO(GRPO):
    """DAPO: GRPO with a higher upper clip and no KL. arXiv:2503.14476.

    Its other parts are `rollout.filter_groups` and the grader OverlongPenalty (configs/dapo.py).
    """

    kind: ClassVar[str] = "dapo"
    clip_high: NotNegative = 0.28
    use_kl_loss: bool = False


@record
class GRPOPassK(Clipped):
    """GRPO for pass@k: only the best sample of a group learns. arXiv:2503.19595."""

    kind: ClassVar[str] = "grpo_passk"
    norm_adv_by_std: bool = True


@record
class GDPO(Clipped):
    """GDPO: each reward function is standardised by itself. arXiv:2601.05242."""

    kind: ClassVar[str] = "gdpo"
    reward_weights: Many[float] = ()
    norm_adv_by_std: bool = True


@record
class RLOO(Clipped):
    """RLOO: the baseline is the mean of the other samples of a group. arXiv:2402.14740."""

    kind: ClassVar[str] = "rloo"


@record
class ReinforcePlusPlus(Clipped):
    """REINFORCE++: returns whitened over the batch; needs no groups. arXiv:2501.03262."""

    kind: ClassVar[str] = "reinforce_plus_plus"
    gamma: Fraction = 1.0


@record
class ReinforcePlusPlusBaseline(Clipped):
    """REINFORCE++ with the mean of the group as baseline. arXiv:2501.03262."""

    kind: ClassVar[str] = "reinforce_plus_plus_baseline"


@record
class ReMax(Clipped):
    """ReMax: the baseline is the reward of a greedy answer; needs no groups. arXiv:2310.10505."""

    kind: ClassVar[str] = "remax"


@record
class OPO(Clipped):
    """OPO: the baseline is the group's mean weighted by length. arXiv:2505.23585.

    The paper is on-policy: one mini-batch and one epoch an iteration.
    """

    kind: ClassVar[str] = "opo"


@record
class OptimalTokenBaseline(Clipped):
    """A baseline for each token, from the squared size of its gradient."""

    kind: ClassVar[str] = "optimal_token_baseline"
    handle_zero_tail: bool = True


@record
class GroupAdvantage(Composed):
    """A policy loss on the advantages of GRPO."""

    norm_adv_by_std: bool = True


@record
class GSPO(GroupAdvantage):
    """GSPO: the ratio of whole responses, clipped tightly. arXiv:2507.18071."""

    kind: ClassVar[str] = "gspo"
    clip_low: NotNegative = 0.0003
    clip_high: NotNegative = 0.0004
    loss_aggregation: Aggregation = "seq-mean-token-mean"


@record
class CISPO(GroupAdvantage):
    """CISPO: clipped importance weights; every token keeps its gradient. arXiv:2506.13585."""

    kind: ClassVar[str] = "cispo"
    clip_low: NotNegative = 1.0
    clip_high: NotNegative = 0.2


@record
class SAPO(GroupAdvantage):
    """SAPO: a soft gate instead of the clip. arXiv:2511.20347."""

    kind: ClassVar[str] = "sapo"
    tau_pos: Positive = 1.0
    tau_neg: Positive = 1.05
    loss_aggregation: Aggregation = "seq-mean-token-mean"


@record
class GMPO(GroupAdvantage):
    """GMPO: the geometric mean of a response's ratios. arXiv:2507.20673."""

    kind: ClassVar[str] = "gmpo"
    clip_low: NotNegative = 0.4
    clip_high: NotNegative = 0.4
    loss_aggregation: Aggregation = "seq-mean-token-mean"


@record
class ClipCov(GroupAdvantage):
    """Clip-Cov: no gradient for a few tokens of large covariance. arXiv:2505.22617."""

    kind: ClassVar[str] = "clip_cov"
    clip_low: NotNegative = 0.2
    clip_high: NotNegative = 0.2
    clip_cov_ratio: Positive = 0.0002
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0


@record
class KLCov(GroupAdvantage):
    """KL-Cov: a penalty on a few tokens of large covariance. arXiv:2505.22617."""

    kind: ClassVar[str] = "kl_cov"
    kl_cov_ratio: Positive = 0.0002
    ppo_kl_coef: float = 0.1


@record
class DPPOTV(GroupAdvantage):
    """DPPO: a trust region of total variation for each token. arXiv:2602.04879."""

    kind: ClassVar[str] = "dppo_tv"
    divergence_low: NotNegative = 0.2
    divergence_high: NotNegative = 0.2
    clip_c: DualClip = 20.0


@record
class DPPOKL(DPPOTV):
    """DPPO: a trust region of KL for each token. arXiv:2602.04879."""

    kind: ClassVar[str] = "dppo_kl"
    divergence_low: NotNegative = 0.05
    divergence_high: NotNegative = 0.05


@record
class DRO(GroupAdvantage):
    """DRO: a quadratic penalty on the log-ratio. arXiv:2405.19107."""

    kind: ClassVar[str] = "dro"
    beta: Positive


@record
class GPG(Composed):
    """GPG: policy gradient on group advantages; no ratio, no old policy. arXiv:2504.02546.

    Take one mini-batch and one epoch an iteration: later steps would be off-policy.
    """

    kind: ClassVar[str] = "gpg"
    f_norm: Positive = 1.0


@record
class Pair(Shared):
    """Any estimator under any policy loss, by verl's two names, each with its own defaults.

    For other settings of the two, and for DRO's loss, write a function and take `Custom`.
    """

    kind: ClassVar[str] = "pair"
    adv_estimator: Literal[
        "gae", "grpo", "grpo_passk", "gdpo", "rloo", "reinforce_plus_plus",
        "reinforce_plus_plus_baseline", "remax", "opo", "gpg", "optimal_token_baseline",
    ] = "gae"  # fmt: skip
    loss_mode: Literal[
        "vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo", "dppo_tv",
        "dppo_kl",
    ] = "vanilla"  # fmt: skip
    loss_aggregation: Maybe[Aggregation] = None  # None takes the loss's own


@record
class RejectionSampling(Online):
    """RAFT: supervised learning of the best sample of each group. arXiv:2304.06767."""

    kind: ClassVar[str] = "rejection_sampling"
    threshold: Maybe[float] = None  # the best sample is kept if its reward is above it
    loss_aggregation: CompletionAggregation = "token-mean"
    use_kl_loss: bool = False
    kl_loss_type: KLType = "low_var_kl"
    kl_loss_coef: float = 0.001


@record
class DistillationTopK(Online):
    """On-policy distillation by the forward KL over the teacher's likeliest tokens.

    `teacher.top_k` is how many tokens. arXiv:2306.13649.
    """

    kind: ClassVar[str] = "distillation_top_k"
    loss_aggregation: CompletionAggregation = "token-mean"
    entropy_coef: float = 0.0


@record
class Distillation(DistillationTopK):
    """On-policy distillation: the reverse KL to a teacher, on the student's own samples.

    With k1 the teacher's log-prob less the policy's is a token's advantage under PPO's clipped
    loss. With another estimator the estimate is the loss. arXiv:2306.13649.
    """

    kind: ClassVar[str] = "distillation"
    kl_type: KLType = "k1"
    clip_low: NotNegative = 0.2
    clip_high: NotNegative = 0.2
    clip_c: DualClip = 3.0


# ------------------------------------------------------------------------- offline


@record
class SFT(Offline):
    """Supervised fine-tuning: the likelihood of completions; all tokens weigh the same."""

    kind: ClassVar[str] = "sft"


@record
class PairwiseRewardModel(Offline):
    """A scalar model on preference pairs; `center` draws the scores to 0. arXiv:2203.02155."""

    kind: ClassVar[str] = "reward_model"
    center: NotNegative = 0.0


@record
class RewardRegression(Offline):
    """A scalar model on rated completions: squared error."""

    kind: ClassVar[str] = "reward_regression"


@record
class DPO(Offline):
    """DPO and its forms (`algorithms/preference_losses.py`). arXiv:2305.18290."""

    kind: ClassVar[str] = "dpo"
    beta: Positive = 0.1  # larger holds the policy closer to its reference
    form: Literal["sigmoid", "robust", "ipo", "hinge", "sigmoid_norm"] = "sigmoid"
    label_smoothing: Smoothing = 0.0
    sft_coef: float = 0.0  # of the mean negative log-likelihood of the chosen completions


@record
class IPO(Offline):
    """IPO: the log-ratio gap is drawn to 1 / (2 beta). arXiv:2310.12036."""

    kind: ClassVar[str] = "ipo"
    beta: Positive = 0.1


@record
class KTO(Offline):
    """KTO: completions labelled good or bad; pairs are taken apart. arXiv:2402.01306."""

    kind: ClassVar[str] = "kto"
    beta: Positive = 0.1
    desirable_weight: NotNegative = 1.0
    undesirable_weight: NotNegative = 1.0


@record
class ORPO(Offline):
    """ORPO: likelihood of the chosen row and `beta` times an odds ratio. arXiv:2403.07691."""

    kind: ClassVar[str] = "orpo"
    beta: Positive = 0.1


@record
class SimPO(Offline):
    """SimPO: mean log-probs of a pair must differ by `gamma`; no reference. arXiv:2405.14734."""

    kind: ClassVar[str] = "simpo"
    beta: Positive = 2.0
    gamma: float = 1.0
    label_smoothing: Smoothing = 0.0
    sft_coef: float = 0.0


@record
class CPO(Offline):
    """CPO: DPO without a reference, and a likelihood of the chosen. arXiv:2401.08417."""

    kind: ClassVar[str] = "cpo"
    beta: Positive = 0.1
    form: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    label_smoothing: Smoothing = 0.0
    cpo_alpha: NotNegative = 1.0  # of the likelihood of the chosen


ALGORITHMS: tuple[type[Kind], ...] = (
    PPO, GRPO, DrGRPO, DAPO, GRPOPassK, GDPO, RLOO, ReinforcePlusPlus, ReinforcePlusPlusBaseline,
    ReMax, OPO, OptimalTokenBaseline, GSPO, CISPO, SAPO, GMPO, ClipCov, KLCov, DPPOTV, DPPOKL, DRO,
    GPG, Pair, RejectionSampling, Distillation, DistillationTopK,
    SFT, PairwiseRewardModel, RewardRegression, DPO, IPO, KTO, ORPO, SimPO, CPO,
    Custom,
)  # fmt: skip
AlgorithmSettings = Annotated[Online | Offline | Custom, one_of(*ALGORITHMS)]
