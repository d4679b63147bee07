"""The settings of every algorithm. `algorithms/build.py` composes each from pure functions.

A record that inherits from another has its settings, with another default where it names one.
Names and defaults are verl's online, and the papers' and TRL's offline.
"""

from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Gt, Lt
from pydantic import PlainValidator

from jaxrl_llm.config.thresholds import parse_threshold, rule_names
from jaxrl_llm.typed_records.bounds import (
    Count,
    Fraction,
    Many,
    Maybe,
    NotNegative,
    Positive,
    Text,
    Unbounded,
    UpTo,
    guess,
    tested,
)
from jaxrl_llm.typed_records.record import Custom, Kind, kinds_of, one_of, records_in

Aggregation = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "prompt-mean",
]
CompletionAggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]
# Estimators of the KL. A trailing + takes the gradient of k2 (straight-through).
KLType = Literal[
    "k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "k3_unclamped",
    "k1+", "kl+", "abs+", "k2+", "mse+", "k3+", "low_var_kl+", "k3_unclamped+",
]  # fmt: skip


def _threshold(value: Any) -> Any:
    """Text of a command line: "0.5_2" is a band, which Python would read as the number 0.52."""
    value = guess(value) if isinstance(value, Text) and "_" not in value else value
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("expected a number, or text such as 0.5_2.0")
    return str(value) if isinstance(value, str) else float(value)


Threshold = Annotated[float | str, PlainValidator(_threshold)]
ImportanceThreshold = Annotated[Threshold, tested(parse_threshold)]
RejectionRules = Annotated[str, tested(rule_names)]
DualClip = Annotated[float, Gt(1)]  # largest ratio where the advantage is negative
Smoothing = Annotated[NotNegative, Lt(0.5)]  # share of wrong labels


class Online(Kind):
    """An algorithm that learns from its own samples."""

    offline: ClassVar[bool] = False


class Offline(Kind):
    """An algorithm that learns from fixed records."""

    offline: ClassVar[bool] = True


# ------------------------------------------------------------------------- online


class Shared(Online):
    """Entropy, KL and rollout correction: settings that most online algorithms have.

    A term whose coefficient is 0 is left out. Without a KL term no reference model is loaded.
    """

    loss_scale: Maybe[Count] = None  # length by which seq-mean-token-sum-norm divides
    entropy_coef: float = 0.0  # coefficient of the entropy bonus in the loss
    use_kl_in_reward: bool = False  # whether rewards have a KL penalty to the reference
    kl_reward_type: KLType = "k1"  # estimator of the KL in the reward
    # Controller of kl_coef. "adaptive" moves it until the KL is kl_target.
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: float = 0.001  # coefficient of the KL in the reward
    kl_horizon: Positive = 10000.0  # samples over which an adaptive coefficient changes
    kl_target: Positive = 0.1  # target KL of an adaptive coefficient
    use_kl_loss: bool = False  # whether the loss has a KL term to the reference
    kl_loss_type: KLType = "low_var_kl"  # estimator of the KL in the loss
    kl_loss_coef: float = 0.001  # coefficient of the KL in the loss
    # Whether the KL in the loss is weighted by the ratio to the old policy, as in DeepSeek-V3.2.
    kl_loss_unbiased: bool = False
    # Largest mean gap of log-probs, sampler - policy, of a response with negative advantages. Above
    # it the response has loss 0, as in DeepSeek-V3.2. null: off.
    off_policy_mask: Maybe[Positive] = None
    # Importance weights for the gap between sampler and trainer, of tokens or whole responses.
    rollout_is: Maybe[Literal["token", "sequence"]] = None
    # Largest weight, or a band "0.5_2.0" outside of which weights are 0. null: 2; with
    # config.max_staleness from 2 on see docs/placement.md.
    rollout_is_threshold: Maybe[ImportanceThreshold] = None
    rollout_is_batch_normalize: bool = False  # whether the weights are divided by their mean
    # Rejection rules, e.g. "token_k1,seq_mean_k3".
    rollout_rs: Maybe[RejectionRules] = None
    rollout_rs_threshold: Maybe[Threshold] = None  # thresholds of the rules: one, or one each
    # The sampler's policy as the old policy. The corrections above are then part of the update.
    bypass_mode: bool = False


class Composed(Shared):
    """An advantage estimator and a policy loss, aggregated over tokens."""

    loss_aggregation: Aggregation = "token-mean"  # aggregation of token losses into one number


class Clipped(Composed):
    """PPO's clipped policy loss."""

    clip_low: NotNegative = 0.2  # lower clip: ratios stay above 1 - clip_low
    clip_high: NotNegative = 0.2  # upper clip: ratios stay below 1 + clip_high
    clip_c: DualClip = 3.0  # largest ratio where the advantage is negative (dual clip)


class PPO(Clipped, kind="ppo"):
    """PPO with a critic: GAE, clipped policy and value losses. arXiv:1707.06347."""

    gamma: Fraction = 1.0  # discount of later rewards
    lam: Fraction = 1.0  # lambda of GAE: 0 trusts the critic, 1 the returns
    cliprange_value: Unbounded = 0.5  # largest move of a value from its old value


class GRPO(Clipped, kind="grpo"):
    """GRPO: a sample is compared with the others of its group. arXiv:2402.03300.

    The KL in the loss follows verl's recipes. The paper aggregates by seq-mean-token-mean.
    """

    norm_adv_by_std: bool = True  # whether advantages are divided by a standard deviation
    # Standard deviation that divides advantages: the group's rewards, all rewards of the batch
    # (TRL's scale_rewards=batch), or all advantages of the batch (ScaleRL).
    std_of: Literal["group", "batch", "advantages"] = "group"
    use_kl_loss: bool = True


class DrGRPO(Clipped, kind="dr_grpo"):
    """Dr. GRPO: not divided by the group's std, nor by a response's length. arXiv:2503.20783."""

    loss_aggregation: Aggregation = "seq-mean-token-sum-norm"


class DAPO(GRPO, kind="dapo"):
    """DAPO: GRPO with a higher upper clip and no KL; see configs/dapo.py. arXiv:2503.14476."""

    clip_high: NotNegative = 0.28
    use_kl_loss: bool = False


class GRPOPassK(Clipped, kind="grpo_passk"):
    """GRPO for pass@k: only the best sample of a group learns. arXiv:2503.19595."""

    norm_adv_by_std: bool = True  # whether advantages are divided by the group's std


class GDPO(Clipped, kind="gdpo"):
    """GDPO: each reward function is standardised by itself. arXiv:2601.05242."""

    reward_weights: Many[float] = ()  # weights of the reward functions; empty: 1 each
    norm_adv_by_std: bool = True  # whether advantages are divided by the group's std


class RLOO(Clipped, kind="rloo"):
    """RLOO: the baseline is the mean of the other samples of a group. arXiv:2402.14740."""


class ReinforcePlusPlus(Clipped, kind="reinforce_plus_plus"):
    """REINFORCE++: returns whitened over the batch; needs no groups. arXiv:2501.03262."""

    gamma: Fraction = 1.0  # discount of later rewards


class ReinforcePlusPlusBaseline(Clipped, kind="reinforce_plus_plus_baseline"):
    """REINFORCE++ with the mean of the group as baseline. arXiv:2501.03262."""


class ReMax(Clipped, kind="remax"):
    """ReMax: the baseline is the reward of a greedy answer; needs no groups. arXiv:2310.10505."""


class OPO(Clipped, kind="opo"):
    """OPO, for one update an iteration: the baseline is weighted by length. arXiv:2505.23585."""


class OptimalTokenBaseline(Clipped, kind="optimal_token_baseline"):
    """A baseline for each token, from the squared size of its gradient."""

    handle_zero_tail: bool = True  # whether the baseline is 0 where one sample of a group is left


class TurnPPO(PPO, kind="turn_ppo"):
    """PPO with GAE over the turns of a response. arXiv:2402.19446, arXiv:2510.16907."""

    gamma: Fraction = 1.0  # discount of the next turn
    lam: Fraction = 1.0  # lambda of GAE over turns


class TurnBaseline(Clipped, kind="turn_baseline"):
    """A turn's return to go is compared with the group's other samples at the same turn."""

    gamma: Fraction = 1.0  # discount of the next turn


class DiscountedTurns(Clipped, kind="discounted_turns"):
    """A turn's discounted return, standardised over the turns of its group. arXiv:2507.11948."""

    gamma: Fraction = 0.4  # discount of the next turn
    norm_adv_by_std: bool = True  # whether advantages are divided by the std of the group's turns


class MTGRPO(Clipped, kind="mt_grpo"):
    """MT-GRPO: GRPO of the outcome, and of each turn before the last. arXiv:2505.11821."""

    turn_weight: NotNegative = 1.0  # weight of the comparison of turns
    norm_adv_by_std: bool = True  # whether both advantages are divided by a standard deviation


class GiGPO(Clipped, kind="gigpo"):
    """GiGPO: GRPO, and turns that begin in equal states are compared. arXiv:2505.10978."""

    gamma: Fraction = 0.95  # discount of the next turn
    step_weight: NotNegative = 1.0  # weight of the comparison of turns
    norm_adv_by_std: bool = True  # whether both advantages are divided by a standard deviation


class GroupAdvantage(Composed):
    """A policy loss on the advantages of GRPO."""

    norm_adv_by_std: bool = True  # whether advantages are divided by a standard deviation
    # Standard deviation that divides advantages: the group's rewards, all rewards of the batch
    # (TRL's scale_rewards=batch), or all advantages of the batch (ScaleRL).
    std_of: Literal["group", "batch", "advantages"] = "group"


class GSPO(GroupAdvantage, kind="gspo"):
    """GSPO: the ratio of whole responses, clipped tightly. arXiv:2507.18071."""

    clip_low: NotNegative = 0.0003  # lower clip: ratios stay above 1 - clip_low
    clip_high: NotNegative = 0.0004  # upper clip: ratios stay below 1 + clip_high
    loss_aggregation: Aggregation = "seq-mean-token-mean"


class CISPO(GroupAdvantage, kind="cispo"):
    """CISPO: clipped importance weights; every token keeps its gradient. arXiv:2506.13585."""

    clip_low: NotNegative = 1.0  # lower clip: weights stay above 1 - clip_low
    clip_high: NotNegative = 0.2  # upper clip: weights stay below 1 + clip_high


class SAPO(GroupAdvantage, kind="sapo"):
    """SAPO: a soft gate instead of the clip. arXiv:2511.20347."""

    tau_pos: Positive = 1.0  # temperature of the gate where advantages are positive
    tau_neg: Positive = 1.05  # temperature of the gate elsewhere
    loss_aggregation: Aggregation = "seq-mean-token-mean"


class GMPO(GroupAdvantage, kind="gmpo"):
    """GMPO: the geometric mean of a response's ratios. arXiv:2507.20673."""

    clip_low: NotNegative = 0.4  # lower clip: log-ratios stay above -clip_low
    clip_high: NotNegative = 0.4  # upper clip: log-ratios stay below clip_high
    loss_aggregation: Aggregation = "seq-mean-token-mean"


class ClipCov(GroupAdvantage, kind="clip_cov"):
    """Clip-Cov: no gradient for a few tokens of large covariance. arXiv:2505.22617."""

    clip_low: NotNegative = 0.2  # lower clip: ratios stay above 1 - clip_low
    clip_high: NotNegative = 0.2  # upper clip: ratios stay below 1 + clip_high
    clip_cov_ratio: Positive = 0.0002  # share of tokens that lose their gradient
    # Least covariance of such a token.
    clip_cov_lb: Annotated[float, UpTo("clip_cov_ub", itself=False)] = 1.0
    clip_cov_ub: float = 5.0  # largest covariance of such a token


class KLCov(GroupAdvantage, kind="kl_cov"):
    """KL-Cov: a penalty on a few tokens of large covariance. arXiv:2505.22617."""

    kl_cov_ratio: Positive = 0.0002  # share of tokens with the penalty
    ppo_kl_coef: float = 0.1  # coefficient of the penalty


class DPPOTV(GroupAdvantage, kind="dppo_tv"):
    """DPPO: a trust region of total variation for each token. arXiv:2602.04879."""

    divergence_low: NotNegative = 0.2  # largest fall of a token's probability
    divergence_high: NotNegative = 0.2  # largest rise of a token's probability
    clip_c: DualClip = 20.0  # largest ratio


class DPPOKL(DPPOTV, kind="dppo_kl"):
    """DPPO: a trust region of KL for each token. arXiv:2602.04879."""

    divergence_low: NotNegative = 0.05  # largest KL of a token that became less likely, nats
    divergence_high: NotNegative = 0.05  # largest KL of a token that became more likely, nats


class DRO(GroupAdvantage, kind="dro"):
    """DRO: a quadratic penalty on the log-ratio. arXiv:2405.19107."""

    beta: Positive  # strength of the penalty: larger keeps the policy closer to the old one


class GPG(Composed, kind="gpg"):
    """GPG, for one update an iteration: group advantages without a ratio. arXiv:2504.02546."""

    f_norm: Positive = 1.0  # divisor of the advantages


class Pair(Shared, kind="pair"):
    """Any estimator under any policy loss, by verl's names. For other settings take `Custom`."""

    # Estimator of advantages.
    adv_estimator: Literal[
        "gae", "grpo", "grpo_passk", "gdpo", "rloo", "reinforce_plus_plus",
        "reinforce_plus_plus_baseline", "remax", "opo", "gpg", "optimal_token_baseline",
        "turn_gae", "turn_baseline", "discounted_turns", "mt_grpo", "gigpo",
    ] = "gae"  # fmt: skip
    # Policy loss.
    loss_mode: Literal[
        "vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo", "dppo_tv",
        "dppo_kl",
    ] = "vanilla"  # fmt: skip
    loss_aggregation: Maybe[Aggregation] = None  # aggregation of token losses; null: the loss's own


class RejectionSampling(Online, kind="rejection_sampling"):
    """RAFT: supervised learning of the best sample of each group. arXiv:2304.06767."""

    threshold: Maybe[float] = None  # reward above which the best sample is kept; null: always
    # Aggregation of token losses into one number.
    loss_aggregation: CompletionAggregation = "token-mean"
    use_kl_loss: bool = False  # whether the loss has a KL term to the reference
    kl_loss_type: KLType = "low_var_kl"  # estimator of the KL in the loss
    kl_loss_coef: float = 0.001  # coefficient of the KL in the loss


class FromTeacher(Online):
    """On-policy distillation."""

    # Aggregation of token losses into one number.
    loss_aggregation: CompletionAggregation = "token-mean"
    entropy_coef: float = 0.0  # coefficient of the entropy bonus in the loss


class Distillation(FromTeacher, kind="distillation"):
    """On-policy distillation: the reverse KL to a teacher, on own samples. arXiv:2306.13649."""

    # Estimator of the KL. "k1" makes the log-ratio an advantage under PPO's clipped loss. Other
    # estimates are the loss.
    kl_type: KLType = "k1"
    clip_low: NotNegative = 0.2  # lower clip: ratios stay above 1 - clip_low
    clip_high: NotNegative = 0.2  # upper clip: ratios stay below 1 + clip_high
    clip_c: DualClip = 3.0  # largest ratio where the advantage is negative (dual clip)


class DistillationTopK(FromTeacher, kind="distillation_top_k"):
    """On-policy distillation: the forward KL over `teacher.top_k` tokens. arXiv:2306.13649."""


# ------------------------------------------------------------------------- offline


class SFT(Offline, kind="sft"):
    """Supervised fine-tuning: the likelihood of completions; all tokens weigh the same."""


class PairwiseRewardModel(Offline, kind="reward_model"):
    """A scalar model on preference pairs; `center` draws the scores to 0. arXiv:2203.02155."""

    center: NotNegative = 0.0  # coefficient of the squared sum of a pair's scores


class RewardRegression(Offline, kind="reward_regression"):
    """A scalar model on rated completions: squared error."""


class DPO(Offline, kind="dpo"):
    """DPO and its forms (`algorithms/preference_losses.py`). arXiv:2305.18290."""

    beta: Positive = 0.1  # strength of the reference: larger keeps the policy closer to it
    # Shape of the loss.
    form: Literal["sigmoid", "robust", "ipo", "hinge", "sigmoid_norm"] = "sigmoid"
    label_smoothing: Smoothing = 0.0  # share of pairs with a wrong label
    sft_coef: float = 0.0  # coefficient of the chosen completions' mean negative log-likelihood


class IPO(Offline, kind="ipo"):
    """IPO: the log-ratio gap is drawn to 1 / (2 beta). arXiv:2310.12036."""

    beta: Positive = 0.1  # strength of the reference: larger keeps the policy closer to it


class KTO(Offline, kind="kto"):
    """KTO: completions labelled good or bad; pairs are taken apart. arXiv:2402.01306."""

    beta: Positive = 0.1  # strength of the reference: larger keeps the policy closer to it
    desirable_weight: NotNegative = 1.0  # weight of the loss on good completions
    undesirable_weight: NotNegative = 1.0  # weight of the loss on bad completions


class ORPO(Offline, kind="orpo"):
    """ORPO: likelihood of the chosen row and `beta` times an odds ratio. arXiv:2403.07691."""

    beta: Positive = 0.1  # coefficient of the odds-ratio term


class SimPO(Offline, kind="simpo"):
    """SimPO: mean log-probs of a pair must differ by `gamma`; no reference. arXiv:2405.14734."""

    beta: Positive = 2.0  # scale of the mean log-probs
    gamma: float = 1.0  # margin between the scaled log-probs of a pair
    label_smoothing: Smoothing = 0.0  # share of pairs with a wrong label
    sft_coef: float = 0.0  # coefficient of the chosen completions' mean negative log-likelihood


class CPO(Offline, kind="cpo"):
    """CPO: DPO without a reference, and a likelihood of the chosen. arXiv:2401.08417."""

    beta: Positive = 0.1  # scale of the log-probs
    form: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"  # shape of the loss
    label_smoothing: Smoothing = 0.0  # share of pairs with a wrong label
    cpo_alpha: NotNegative = 1.0  # coefficient of the chosen completions' likelihood


ALGORITHMS = (*kinds_of(Online, Offline), Custom)
AlgorithmSettings = Annotated[Online | Offline | Custom, one_of(*ALGORITHMS)]
__all__ = records_in(__name__, "ALGORITHMS", "AlgorithmSettings")  # pyright: ignore
