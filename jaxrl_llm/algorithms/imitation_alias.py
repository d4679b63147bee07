"""Algorithms of `imitation.py`; a config names one of these functions, as those of `alias.py`."""

from dataclasses import replace
from functools import partial
from typing import Literal

from jaxrl_llm.algorithms.algorithm import Algorithm, compose
from jaxrl_llm.algorithms.imitation import (
    best_of_n,
    forward_kl_top_k,
    keep_chosen,
    nll,
    no_advantage,
    reverse_kl,
    teacher_advantage,
)
from jaxrl_llm.algorithms.kl import kl_penalty
from jaxrl_llm.algorithms.policy_losses import ppo_clip


def rejection_sampling(
    *,
    threshold: float | None = None,
    loss_aggregation: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean"
    ] = "token-mean",
    use_kl_loss: bool = False,
    kl_loss_type: str = "low_var_kl",
    kl_loss_coef: float = 0.001,
) -> Algorithm:
    """Rejection-sampling fine-tuning (RAFT): supervised learning of the best answer to each prompt.

    Of the `rollout.n` samples of a prompt the best is kept, if its reward is over `threshold`;
    every iteration is a round, on the samples of the policy as it is by then. The loss is a mean
    over what is kept. arXiv:2304.06767.
    """
    algorithm = compose(
        partial(best_of_n, threshold=threshold),
        nll,
        loss_aggregation=loss_aggregation,
        use_kl_loss=use_kl_loss,
        kl_loss_type=kl_loss_type,
        kl_loss_coef=kl_loss_coef,
    )
    return replace(algorithm, rejection=keep_chosen)


def distillation(
    *,
    kl_type: str = "k1",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float = 3.0,
    loss_aggregation: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean"
    ] = "token-mean",
    entropy_coef: float = 0.0,
) -> Algorithm:
    """On-policy distillation: the reverse KL to a teacher, on the student's own samples.

    With `kl_type` k1 the teacher's log-prob less the policy's is the advantage of each token, under
    PPO's clipped loss. With another estimator (k2, k3, or straight-through: k1+, k3+) the estimate
    is the loss. arXiv:2306.13649. Raises ValueError for an estimator that does not exist.
    """
    if kl_type in ("k1", "kl"):
        return compose(
            teacher_advantage,
            partial(ppo_clip, clip_low=clip_low, clip_high=clip_high, clip_c=clip_c),
            loss_aggregation=loss_aggregation,
            entropy_coef=entropy_coef,
        )
    return compose(
        no_advantage,
        partial(reverse_kl, estimator=kl_penalty(kl_type)),
        loss_aggregation=loss_aggregation,
        entropy_coef=entropy_coef,
    )


def distillation_top_k(
    *,
    loss_aggregation: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean"
    ] = "token-mean",
    entropy_coef: float = 0.0,
) -> Algorithm:
    """On-policy distillation by the forward KL over the teacher's likeliest tokens.

    At each position of the student's own samples; `config.teacher.top_k` says how many tokens.
    arXiv:2306.13649.
    """
    return compose(
        no_advantage,
        forward_kl_top_k,
        loss_aggregation=loss_aggregation,
        entropy_coef=entropy_coef,
    )
