"""The record of an online algorithm, and the settings that all of them share."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from jaxrl_llm.algorithms.aggregation import aggregation
from jaxrl_llm.algorithms.fields import check_fields, field_names, with_renamed_fields
from jaxrl_llm.algorithms.importance import (
    corrected_in_the_update,
    importance_weighted,
    off_policy_masked,
    sequence_weights,
    token_weights,
)
from jaxrl_llm.algorithms.kl import (
    FixedKL,
    KLController,
    kl_in_reward,
    kl_penalty,
    make_kl_controller,
    unbiased,
)
from jaxrl_llm.algorithms.rejection import reject
from jaxrl_llm.arguments import is_zero
from jaxrl_llm.config import Composed
from jaxrl_llm.config.thresholds import parse_rules, parse_threshold

# Bypass mode: the field that replaces each one, since the sampler's policy is the old one.
TWO_POLICIES = {"old_logprobs": "rollout_logprobs"}
IMPORTANCE_THRESHOLD = 2.0  # where the settings have none


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        *("advantage", "policy_loss", "aggregate", "value_loss", "kl_reward", "kl_controller"),
        *("kl_loss", "kl_loss_coef", "entropy_coef", "importance", "rejection"),
    ],
    meta_fields=["own_fields", "by_sample"],
)
@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """The functions of one iteration. Their positional parameters are batch fields.

    Its coefficients are arguments of the programs, and so are the keywords of a function that is a
    `jax.tree_util.Partial`. Keywords of `functools.partial` are constants.

    The plan reads them (`fields.field_names`). A function that reads `values` needs the critic,
    one that reads `reference_logprobs` the reference model, and one that reads `greedy_scores` a
    greedy rollout and its reward. A function that is None needs nothing.
    """

    advantage: Callable[..., Any]  # fields -> (advantages [B, R], returns [B, R])
    policy_loss: Callable[..., Any]  # fields -> (loss [B, R], metrics of [B, R])
    aggregate: Callable[..., Any]  # see aggregation.py; also used for the value loss and entropy
    value_loss: Callable[..., Any] | None = None  # fields -> (loss [B, R], metrics of [B, R])
    # (scores, mask, old_logprobs, reference_logprobs, *, coef) -> (rewards, kl), [B, R] each;
    # None gives rewards by `advantages.score_to_rewards`
    kl_reward: Callable[..., Any] | None = None
    kl_controller: KLController = FixedKL(0.0)  # the `coef` of kl_reward
    # fields of log-probs, such as (logprobs, reference_logprobs) -> kl [B, R]
    kl_loss: Callable[..., Any] | None = None
    kl_loss_coef: float = 0.0  # coefficient of the aggregated kl_loss in the loss
    entropy_coef: float = 0.0  # coefficient of the aggregated entropy, which is subtracted
    # fields -> (the field importance_weights [B, R], metrics); the policy loss multiplies by it
    importance: Callable[..., Any] | None = None
    # fields -> (the field loss_mask [B, R], metrics); the update takes it as its `mask`, so tokens
    # outside it are in no loss and no mean
    rejection: Callable[..., Any] | None = None
    own_fields: tuple[str, ...] = ()  # fields of the user's stages that the functions read
    # Whether a sample changes the losses of no other sample of its micro-batch. Then gradients are
    # summed over the mesh axis `data` once an optimizer step, and else in every micro-batch.
    by_sample: bool = False

    def __post_init__(self) -> None:
        rollout = {"advantage": self.advantage, "kl_reward": self.kl_reward}
        rollout |= {"importance": self.importance, "rejection": self.rejection}
        update = {"policy_loss": self.policy_loss, "value_loss": self.value_loss}
        update["kl_loss"] = self.kl_loss
        for role, fn in rollout.items():
            if fn is not None:
                check_fields(role, fn, own=self.own_fields)
        for role, fn in update.items():
            if fn is not None:
                check_fields(role, fn, update=True, own=self.own_fields)
        if (self.kl_loss is None) != is_zero(self.kl_loss_coef):
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


def corrected_for_staleness(algorithm: Algorithm, level: str, upper: float) -> Algorithm:
    """`algorithm` with weights up to `upper`, unless it deals with an older sampler itself.

    It does if it has weights, or if one of its functions reads the sampler's log-probs.
    """
    functions = (algorithm.advantage, algorithm.policy_loss, algorithm.rejection)
    read = {name for fn in functions if fn is not None for name in field_names(fn)}
    if algorithm.importance is not None or "rollout_logprobs" in read:
        return algorithm
    return replace(
        algorithm,
        importance=_importance(level, upper, False),
        policy_loss=importance_weighted(algorithm.policy_loss),
    )


def compose(
    s: Composed,
    advantage: Callable[..., Any],
    policy_loss: Callable[..., Any],
    value_loss: Callable[..., Any] | None = None,
) -> Algorithm:
    """An algorithm of an estimator, a policy loss and the settings that all have in common.

    Raises ValueError for an unknown name in `rollout_rs`, a setting that a function refuses, and
    for weights in bypass mode with a loss that has the same ratio already.
    """
    for fn in (advantage, policy_loss, value_loss):
        if fn is not None:
            check_settings(fn)
    if s.off_policy_mask is not None:
        policy_loss = off_policy_masked(policy_loss, most=s.off_policy_mask)
    correction = _correction(
        policy_loss,
        _importance(
            s.rollout_is,
            IMPORTANCE_THRESHOLD if s.rollout_is_threshold is None else s.rollout_is_threshold,
            s.rollout_is_batch_normalize,
        ),
        _rejection(s.rollout_rs, s.rollout_rs_threshold),
        bypass=s.bypass_mode,
    )
    kl_reward = _kl_in_reward(s)
    kl_loss = _kl_in_loss(s.use_kl_loss, s.kl_loss_type, s.kl_loss_coef, s.kl_loss_unbiased)
    if s.bypass_mode:
        advantage = with_renamed_fields(advantage, TWO_POLICIES)
        if kl_reward:
            kl_reward["kl_reward"] = with_renamed_fields(kl_reward["kl_reward"], TWO_POLICIES)
        if kl_loss:
            kl_loss["kl_loss"] = with_renamed_fields(kl_loss["kl_loss"], TWO_POLICIES)
    return Algorithm(
        advantage=advantage,
        aggregate=aggregation(s.loss_aggregation, scale=s.loss_scale),
        value_loss=value_loss,
        entropy_coef=s.entropy_coef,
        **correction,
        **kl_reward,
        **kl_loss,
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
    shapes |= dict.fromkeys(("turn_ids", "state_keys"), jax.ShapeDtypeStruct((1, 1), jnp.int32))
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
    return Partial(weights, upper=upper, lower=lower, normalize=normalize)


def _rejection(names: str | None, thresholds: float | str | None) -> Callable[..., Any] | None:
    if names is None and thresholds is None:
        return None
    return Partial(reject, rules=parse_rules(names, thresholds))


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
            "ratio, such as gpg's"
        )
    policy_loss = with_renamed_fields(policy_loss, TWO_POLICIES)
    return {"policy_loss": corrected_in_the_update(policy_loss, importance, rejection)}


def _kl_in_reward(s: Composed) -> dict[str, Any]:
    made = make_kl_controller(
        s.kl_controller, coef=s.kl_coef, horizon=s.kl_horizon, target=s.kl_target
    )
    estimator = kl_penalty(s.kl_reward_type)
    if not s.use_kl_in_reward or s.kl_coef == 0.0:
        return {}
    return {"kl_reward": Partial(kl_in_reward, estimator=estimator), "kl_controller": made}


def _kl_in_loss(on: bool, kind: str, coef: float, is_unbiased: bool) -> dict[str, Any]:
    estimator = kl_penalty(kind)
    if not on or coef == 0.0:
        return {}
    return {"kl_loss": unbiased(estimator) if is_unbiased else estimator, "kl_loss_coef": coef}
