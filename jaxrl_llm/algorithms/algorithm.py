"""What an online algorithm is, and the settings that all of them share."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.aggregation import aggregation
from jaxrl_llm.algorithms.fields import check_fields, field_names, with_renamed_fields
from jaxrl_llm.algorithms.importance import (
    corrected_in_the_update,
    importance_weighted,
    parse_threshold,
    sequence_weights,
    token_weights,
)
from jaxrl_llm.algorithms.kl import (
    FixedKL,
    KLController,
    kl_in_reward,
    kl_penalty,
    make_kl_controller,
)
from jaxrl_llm.algorithms.rejection import parse_rules, reject

# What each stands for when the sampler's policy is also the old one.
TWO_POLICIES = {"old_logprobs": "rollout_logprobs"}


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """What one iteration computes. The positional parameters of each function are batch fields.

    The planner reads them (`fields.field_names`): a function that asks for `values` brings in the
    critic, one that asks for `reference_logprobs` the reference model, one that asks for
    `greedy_scores` a greedy rollout and its reward; None brings in nothing.
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
    # fields -> (the field importance_weights [B, R], metrics); the policy loss reads that field
    # itself, so nobody else multiplies by it
    importance: Callable[..., Any] | None = None
    # fields -> (the field loss_mask [B, R], metrics), which the update then takes for its `mask`:
    # what it leaves out is in no loss and no mean
    rejection: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        rollout = {"advantage": self.advantage, "kl_reward": self.kl_reward}
        rollout |= {"importance": self.importance, "rejection": self.rejection}
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
        readers = (self.advantage, self.policy_loss, self.value_loss, self.importance)
        read = {name for fn in readers if fn is not None for name in field_names(fn)}
        if self.kl_reward is not None and "rewards" not in read:
            raise ValueError(
                "the KL is in the reward (use_kl_in_reward), and nothing of this algorithm reads "
                "the rewards of tokens: use_kl_loss=True puts it into the loss"
            )


def compose(
    advantage: Callable[..., Any],
    policy_loss: Callable[..., Any],
    value_loss: Callable[..., Any] | None = None,
    *,
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
    rollout_is: Literal["token", "sequence"] | None = None,
    rollout_is_threshold: float | str = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
    bypass_mode: bool = False,
) -> Algorithm:
    """An algorithm of an estimator, a policy loss and these settings, which all have in common.

    Names and defaults are verl's. `loss_scale` is the length that seq-mean-token-sum-norm divides
    by. The KL goes into the reward (`use_kl_in_reward`; `kl_coef` steered by a `fixed` or
    `adaptive` controller towards `kl_target` over `kl_horizon` samples), into the loss
    (`use_kl_loss`), both or neither; a term whose coefficient is 0 is left out, and with both left
    out no reference model is loaded.

    Rollout correction, for the gap between sampler and trainer: `rollout_is` weighs each token or
    sequence by its ratio, cut at `rollout_is_threshold` (a number), or 0 outside of a band
    ("0.5_2.0", IcePop); `rollout_rs` names rejection rules ("token_k1,seq_mean_k3"; `rejection.py`)
    with `rollout_rs_threshold`, one for all or one each. `bypass_mode` takes the sampler's policy
    for the old one: no pass computes `old_logprobs`, a ratio of the loss is that to the sampler,
    and what is given of the above is computed in the update, from the current policy.

    Raises ValueError for an unknown name, a setting out of range, and for weights in bypass mode
    beside a loss that has that ratio already.
    """
    for fn in (advantage, policy_loss, value_loss):
        if fn is not None:
            check_settings(fn)
    correction = _correction(
        policy_loss,
        _importance(rollout_is, rollout_is_threshold, rollout_is_batch_normalize),
        _rejection(rollout_rs, rollout_rs_threshold),
        bypass=bypass_mode,
    )
    kl_reward = _kl_in_reward(
        use_kl_in_reward, kl_reward_type, kl_controller, kl_coef, kl_horizon, kl_target
    )
    if bypass_mode:
        advantage = with_renamed_fields(advantage, TWO_POLICIES)
        if kl_reward:
            kl_reward["kl_reward"] = with_renamed_fields(kl_reward["kl_reward"], TWO_POLICIES)
    return Algorithm(
        advantage=advantage,
        aggregate=aggregation(loss_aggregation, scale=loss_scale),
        value_loss=value_loss,
        entropy_coef=entropy_coef,
        **correction,
        **kl_reward,
        **_kl_in_loss(use_kl_loss, kl_loss_type, kl_loss_coef),
    )


def check_settings(fn: Callable[..., Any]) -> None:
    """Trace `fn` on an abstract batch, so that a bad setting is refused now, not in the first step.

    Raises what `fn` raises.
    """
    shapes = {
        "group_ids": jax.ShapeDtypeStruct((1,), jnp.int32),
        "greedy_scores": jax.ShapeDtypeStruct((1,), jnp.float32),
        "scores": jax.ShapeDtypeStruct((1,), jnp.float32),
    }
    token = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    names = field_names(fn)
    if "reward_parts" not in names:  # how many parts there are only the run knows
        jax.eval_shape(fn, *(shapes.get(name, token) for name in names))


# What the settings make, as fields of an Algorithm.


def _importance(
    level: str | None, threshold: float | str, normalize: bool
) -> Callable[..., Any] | None:
    if level is None:
        return None
    lower, upper = parse_threshold(threshold)
    weights = {"token": token_weights, "sequence": sequence_weights}[level]
    return partial(weights, upper=upper, lower=lower, normalize=normalize)


def _rejection(names: str | None, thresholds: float | str | None) -> Callable[..., Any] | None:
    if names is None and thresholds is None:
        return None
    return partial(reject, rules=parse_rules(names, thresholds))


def _correction(
    policy_loss: Callable[..., Any],
    importance: Callable[..., Any] | None,
    rejection: Callable[..., Any] | None,
    *,
    bypass: bool,
) -> dict[str, Any]:
    """The policy loss with what is needed to correct it."""
    if not bypass:
        if importance is not None:
            policy_loss = importance_weighted(policy_loss)
        return {"policy_loss": policy_loss, "importance": importance, "rejection": rejection}
    if importance is not None and "old_logprobs" in field_names(policy_loss):
        raise ValueError(
            "bypass_mode with rollout_is weighs twice: the ratio of this policy loss is then that "
            "of the current policy to the sampler. Leave out rollout_is, or take a loss without a "
            "ratio, such as that of gpg"
        )
    policy_loss = with_renamed_fields(policy_loss, TWO_POLICIES)
    return {"policy_loss": corrected_in_the_update(policy_loss, importance, rejection)}


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
