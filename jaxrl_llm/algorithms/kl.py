"""The KL divergence to the reference: estimators, the KL in the reward, controllers.

An estimator reads the log-probabilities [B, R] of the same sampled tokens under two policies. It
returns one value a token. Their mean over samples of the first policy estimates
KL(first || second). Schulman, "Approximating KL divergence",
http://joschu.net/blog/kl-approx.html
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.advantages import score_to_rewards, spread_to_steps
from jaxrl_llm.algorithms.fields import FieldFunction, field_names
from jaxrl_llm.algorithms.shapes import Samples, Scalar, Tokens
from jaxrl_llm.numerics import absolute, clip, masked_count, masked_mean, safe_divide

Estimator = Callable[[Tokens, Tokens], Tokens]

MAX_LOG_RATIO = 20.0  # before exp
MAX_K3 = 10.0  # so that one token does not dominate a batch
MAX_KL_ERROR = 0.2  # the largest relative error that moves an adaptive controller


def kl_k1(logprobs: Tokens, reference_logprobs: Tokens) -> Tokens:
    """logprobs - reference_logprobs: unbiased, with high variance; a token's value may be negative.

    Use it in the reward. Do not use it in a loss: the mean of its gradient is 0, so it does not
    restrain the policy. Use k2, k3 or `k1+` there.
    """
    return logprobs - reference_logprobs


def kl_abs(logprobs: Tokens, reference_logprobs: Tokens) -> Tokens:
    """|logprobs - reference_logprobs|: a distance, not an estimate of the KL; gradient 0 at 0."""
    return absolute(logprobs - reference_logprobs)


def kl_k2(logprobs: Tokens, reference_logprobs: Tokens) -> Tokens:
    """0.5 (logprobs - reference_logprobs)^2: biased, with the gradient of the KL. For a loss."""
    return 0.5 * jnp.square(logprobs - reference_logprobs)


def kl_k3(logprobs: Tokens, reference_logprobs: Tokens) -> Tokens:
    """exp(d) - d - 1 with d = reference_logprobs - logprobs: unbiased, never negative.

    d is clamped to ±20 and the result to ±10, as in verl ("low_var_kl"). A token beyond a clamp
    has no gradient: where the policy drops tokens, `kl_k3_unclamped` restrains it longer.
    """
    d = clip(reference_logprobs - logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return clip(jnp.exp(d) - d - 1.0, -MAX_K3, MAX_K3)


def kl_k3_unclamped(logprobs: Tokens, reference_logprobs: Tokens) -> Tokens:
    """exp(d) - d - 1 without a clamp, as in TRL.

    Its gradient 1 - exp(d) grows as the policy makes a token less likely; the gradient of `kl_k3`
    ends at exp(d) = 13. For d over 88 it is not finite, and the run stops.
    """
    d = reference_logprobs - logprobs
    return jnp.exp(d) - d - 1.0


def straight_through(estimator: Estimator) -> Estimator:
    """The value of `estimator` with the gradient of k2, an unbiased gradient of the KL."""

    def estimate(logprobs: Tokens, reference_logprobs: Tokens) -> Tokens:
        value = jax.lax.stop_gradient(estimator(logprobs, reference_logprobs))
        k2 = kl_k2(logprobs, reference_logprobs)
        return value + (k2 - jax.lax.stop_gradient(k2))

    return estimate


# By their names in a config, which are verl's; `KLType` of config/algorithms.py lists them too.
KL_ESTIMATORS: dict[str, Estimator] = {
    "k1": kl_k1,
    "kl": kl_k1,
    "abs": kl_abs,
    "k2": kl_k2,
    "mse": kl_k2,
    "k3": kl_k3,
    "low_var_kl": kl_k3,
    "k3_unclamped": kl_k3_unclamped,
}


def kl_penalty(name: str) -> Estimator:
    """The estimator of that name. A `+` at its end selects the straight-through gradient.

    Names: k1 (kl), abs, k2 (mse), k3 (low_var_kl), k3_unclamped.
    """
    estimator = KL_ESTIMATORS[name.removesuffix("+")]
    return straight_through(estimator) if name.endswith("+") else estimator


def unbiased(estimator: Estimator) -> Callable[..., Tokens]:
    """`estimator` weighted by the ratio to the old policy: pi / pi_old * estimate.

    The samples are of the old policy. So the plain mean is of the old policy's tokens, and the
    gradient of k3 is biased; it grows without bound where the policy drops a token that the
    reference likes. The weighted mean and its gradient are unbiased for KL(policy || reference).
    The log-ratio is clamped to ±20. DeepSeek-V3.2, arXiv:2512.02556, section 3.1.
    """

    def estimate(logprobs: Tokens, reference_logprobs: Tokens, old_logprobs: Tokens) -> Tokens:
        ratio = jnp.exp(clip(logprobs - old_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO))
        return ratio * estimator(logprobs, reference_logprobs)

    return estimate


def masked_kl(
    estimator: Callable[..., Tokens], fields: Mapping[str, Tokens], mask: Tokens
) -> Tokens:
    """The estimate at each token of the mask; value and gradient are 0 elsewhere.

    `fields` has the log-probs that the estimator reads, by the names of its parameters.

    Guarantees: padding may hold any number, also NaN. The inputs are masked first, because 0 times
    a gradient that is not finite is NaN.
    """
    policies = (jnp.where(mask != 0, fields[name], 0.0) for name in field_names(estimator))
    return jnp.where(mask != 0, estimator(*policies), 0.0)


def kl_in_reward(
    scores: Samples,
    mask: Tokens,
    old_logprobs: Tokens,
    reference_logprobs: Tokens,
    *,
    coef: Scalar,
    estimator: Estimator = kl_k1,
) -> tuple[Tokens, Tokens]:
    """(rewards, kl), [B, R]: the score at the last token minus coef times the KL of each token.

    `coef` is the state of the KL controller. Both are 0 outside the mask and have no gradient.
    """
    policies = {"logprobs": old_logprobs, "reference_logprobs": reference_logprobs}
    kl = masked_kl(estimator, policies, mask)
    return jax.lax.stop_gradient((score_to_rewards(scores, mask) - coef * kl, kl))


def with_steps(kl_reward: Callable[..., Any]) -> Callable[..., Any]:
    """`kl_reward` whose rewards of tokens also follow the field `step_rewards`."""
    own = field_names(kl_reward)
    reads = tuple(dict.fromkeys((*own, "mask", "step_rewards")))

    def with_rewards_of_steps(*values: Any, **settings: Any) -> tuple[Tokens, Tokens]:
        fields = dict(zip(reads, values, strict=True))
        rewards, kl = kl_reward(*(fields[name] for name in own), **settings)
        return spread_to_steps(rewards, fields["step_rewards"], fields["mask"]), kl

    return FieldFunction(with_rewards_of_steps, reads)


def batch_kl(kl: Tokens, mask: Tokens) -> Scalar:
    """The KL that a controller reads: mean over sequences of their token means, as in verl."""
    per_sequence = masked_mean(kl, mask, axis=1)
    return safe_divide(jnp.sum(per_sequence), masked_count(jnp.max(mask, axis=1, initial=0.0)))


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["coef"])
@dataclass(frozen=True)
class FixedKL:
    """A constant coefficient; a resumed run has the one of its config."""

    coef: float

    def init(self) -> Scalar:
        """The coefficient."""
        return jnp.float32(self.coef)

    def update(
        self, state: Scalar, current_kl: Scalar, num_samples: int, learned: Scalar | float = 1.0
    ) -> Scalar:
        """The same coefficient."""
        return state


@partial(jax.tree_util.register_dataclass, data_fields=["target"], meta_fields=["coef", "horizon"])
@dataclass(frozen=True)
class AdaptiveKL:
    """A coefficient that grows while the KL is above its target and falls while it is below.

    coef <- coef (1 + clip(kl / target - 1, -0.2, 0.2) num_samples / horizon)

    `horizon` is in samples, `target` in nats a token. Ziegler et al. 2019, arXiv:1909.08593.
    Requires: a positive target and horizon.
    """

    coef: float
    horizon: float = 10000.0
    target: float = 0.1

    def init(self) -> Scalar:
        """The coefficient of the first iteration."""
        return jnp.float32(self.coef)

    def update(
        self, state: Scalar, current_kl: Scalar, num_samples: int, learned: Scalar | float = 1.0
    ) -> Scalar:
        """One proportional step. The share `learned` of `num_samples` is behind `current_kl`.

        Raises ValueError if that many samples could make the coefficient negative.
        """
        fewest = MAX_KL_ERROR * num_samples
        if fewest >= self.horizon:
            raise ValueError(
                f"adaptive KL with horizon {self.horizon} and {num_samples} samples an iteration: "
                "one step could make the coefficient 0 or negative, which rewards distance; use a "
                f"horizon above {fewest:g}, e.g. {num_samples}"
            )
        error = jnp.clip(current_kl / self.target - 1.0, -MAX_KL_ERROR, MAX_KL_ERROR)
        return state * (1.0 + error * (num_samples / self.horizon) * learned)


# Chooses the coefficient of the KL in the reward. The state is that coefficient, float32.
KLController = FixedKL | AdaptiveKL


def make_kl_controller(name: str, *, coef: float, horizon: float, target: float) -> KLController:
    """The controller of that name, `fixed` or `adaptive`."""
    controllers = {"fixed": FixedKL(coef), "adaptive": AdaptiveKL(coef, horizon, target)}
    return controllers[name]
