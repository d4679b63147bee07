"""Algorithms: each a short composition of the functions of this room.

A config names one of these functions and its settings (`FunctionConfig`), so settings are
keyword-only, with plain annotations and literal defaults that are read from the source.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import advantages
from jaxrl_llm.algorithms.advantages import gae
from jaxrl_llm.algorithms.aggregation import aggregation
from jaxrl_llm.algorithms.fields import check_fields, field_names
from jaxrl_llm.algorithms.importance import importance_weighted, token_truncated
from jaxrl_llm.algorithms.kl import (
    FixedKL,
    KLController,
    kl_in_reward,
    kl_penalty,
    make_kl_controller,
)
from jaxrl_llm.algorithms.policy_losses import ppo_clip
from jaxrl_llm.algorithms.value_losses import clipped_value_loss


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """What one iteration computes. The positional parameters of each function are batch fields.

    The planner reads them (`fields.field_names`): a function that asks for `values` brings in the
    critic, one that asks for `reference_logprobs` the reference model; None brings in nothing.
    """

    advantage: Callable[..., Any]  # fields -> (advantages [B, R], returns [B, R])
    policy_loss: Callable[..., Any]  # fields -> (loss [B, R], metrics of [B, R])
    aggregate: Callable[..., Any]  # see aggregation.py; also used for the value loss and entropy
    value_loss: Callable[..., Any] | None = None  # fields -> (loss [B, R], metrics of [B, R])
    # (scores, mask, old_logprobs, reference_logprobs, *, coef) -> (rewards, kl), [B, R] each;
    # None gives rewards by `advantages.score_to_rewards`
    kl_reward: Callable[..., Any] | None = None
    kl_controller: KLController = FixedKL(0.0)  # the `coef` of kl_reward
    kl_loss: Callable[..., Any] | None = None  # (logprobs, reference_logprobs) -> kl [B, R]
    kl_loss_coef: float = 0.0  # of the aggregated kl_loss, added to the policy loss
    entropy_coef: float = 0.0  # of the aggregated entropy, subtracted from the policy loss
    # (old_logprobs, rollout_logprobs, mask) -> the field importance_weights [B, R]; the policy
    # loss reads that field itself, so nobody else multiplies by it
    importance: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        rollout = {"advantage": self.advantage, "kl_reward": self.kl_reward}
        rollout["importance"] = self.importance
        update = {"policy_loss": self.policy_loss, "value_loss": self.value_loss}
        update["kl_loss"] = self.kl_loss
        for role, fn in rollout.items():
            if fn is not None:
                check_fields(role, fn)
        for role, fn in update.items():
            if fn is not None:
                check_fields(role, fn, update=True)
        if (self.kl_loss is None) != (self.kl_loss_coef == 0.0):
            raise ValueError(
                f"kl_loss_coef is {self.kl_loss_coef} and kl_loss {self.kl_loss}: give both, or "
                "leave both out; a coefficient of 0 would run the reference model for nothing"
            )


def ppo(
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float = 3.0,
    cliprange_value: float = 0.5,
    loss_aggregation: Literal[
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
    ] = "token-mean",
    loss_scale: int | None = None,
    entropy_coef: float = 0.0,
    use_kl_in_reward: bool = False,
    kl_reward_type: str = "k1",
    kl_controller: Literal["fixed", "adaptive"] = "fixed",
    kl_coef: float = 0.001,
    kl_horizon: float = 10000.0,
    kl_target: float = 0.1,
    use_kl_loss: bool = False,
    kl_loss_type: str = "low_var_kl",
    kl_loss_coef: float = 0.001,
    importance_threshold: float | None = None,
) -> Algorithm:
    """PPO with a critic: GAE, clipped policy and value losses, optional KL and rollout correction.

    Defaults are verl's. The KL goes into the reward (`use_kl_in_reward`; `kl_coef` steered by a
    `fixed` or `adaptive` controller towards `kl_target` over `kl_horizon` samples), into the loss
    (`use_kl_loss`), both or neither; a term whose coefficient is 0 is left out, and with both left
    out no reference model is loaded. `importance_threshold` (2.0 is usual) turns on truncated
    importance weights for the gap between sampler and trainer. `loss_scale` is the length that
    seq-mean-token-sum-norm divides by.
    Raises ValueError for an unknown name or a setting out of range.
    """
    policy_loss = partial(ppo_clip, clip_low=clip_low, clip_high=clip_high, clip_c=clip_c)
    advantage = partial(gae, gamma=gamma, lam=lam)
    value_loss = partial(clipped_value_loss, cliprange=cliprange_value)
    for fn in (advantage, policy_loss, value_loss):
        _check_settings(fn)
    return Algorithm(
        advantage=advantage,
        aggregate=aggregation(loss_aggregation, scale=loss_scale),
        value_loss=value_loss,
        entropy_coef=entropy_coef,
        **_corrected(policy_loss, importance_threshold),
        **_kl_in_reward(
            use_kl_in_reward, kl_reward_type, kl_controller, kl_coef, kl_horizon, kl_target
        ),
        **_kl_in_loss(use_kl_loss, kl_loss_type, kl_loss_coef),
    )


def grpo(
    *,
    norm_adv_by_std: bool = True,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float = 3.0,
    loss_aggregation: Literal[
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
    ] = "token-mean",
    loss_scale: int | None = None,
    entropy_coef: float = 0.0,
    use_kl_in_reward: bool = False,
    kl_reward_type: str = "k1",
    kl_controller: Literal["fixed", "adaptive"] = "fixed",
    kl_coef: float = 0.001,
    kl_horizon: float = 10000.0,
    kl_target: float = 0.1,
    use_kl_loss: bool = True,
    kl_loss_type: str = "low_var_kl",
    kl_loss_coef: float = 0.001,
    importance_threshold: float | None = None,
) -> Algorithm:
    """GRPO: no critic; a sample is compared with the others that answer its prompt.

    The clipped policy loss of PPO on group-relative advantages, with the KL in the loss, as verl's
    recipes for GRPO have it; `kl_loss_coef=0` leaves out the reference model. The paper's own
    aggregation is seq-mean-token-mean; Dr. GRPO is `norm_adv_by_std=False` with
    seq-mean-token-sum-norm. The other settings are those of `ppo`. Needs two samples a prompt.
    Raises ValueError for an unknown name or a setting out of range.
    """
    policy_loss = partial(ppo_clip, clip_low=clip_low, clip_high=clip_high, clip_c=clip_c)
    _check_settings(policy_loss)
    return Algorithm(
        advantage=partial(advantages.grpo, norm_adv_by_std=norm_adv_by_std),
        aggregate=aggregation(loss_aggregation, scale=loss_scale),
        entropy_coef=entropy_coef,
        **_corrected(policy_loss, importance_threshold),
        **_kl_in_reward(
            use_kl_in_reward, kl_reward_type, kl_controller, kl_coef, kl_horizon, kl_target
        ),
        **_kl_in_loss(use_kl_loss, kl_loss_type, kl_loss_coef),
    )


# What several algorithms share, as fields of an Algorithm.


def _corrected(policy_loss: Callable[..., Any], threshold: float | None) -> dict[str, Any]:
    """The loss, weighted for the gap between sampler and trainer where a threshold is given."""
    if threshold is None:
        return {"policy_loss": policy_loss}
    importance = partial(token_truncated, threshold=threshold)
    _check_settings(importance)
    return {"policy_loss": importance_weighted(policy_loss), "importance": importance}


def _kl_in_reward(
    on: bool, kind: str, controller: str, coef: float, horizon: float, target: float
) -> dict[str, Any]:
    made = make_kl_controller(controller, coef=coef, horizon=horizon, target=target)
    estimator = kl_penalty(kind)
    if not on or coef == 0.0:
        return {}
    return {"kl_reward": partial(kl_in_reward, estimator=estimator), "kl_controller": made}


def _kl_in_loss(on: bool, kind: str, coef: float) -> dict[str, Any]:
    estimator = kl_penalty(kind)
    if not on or coef == 0.0:
        return {}
    return {"kl_loss": estimator, "kl_loss_coef": coef}


def _check_settings(fn: Callable[..., Any]) -> None:
    """Trace `fn` on an abstract batch, so that a bad setting is refused now, not in the first step.

    For functions whose fields are all [B, R].
    """
    token = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    jax.eval_shape(fn, *[token] * len(field_names(fn)))
