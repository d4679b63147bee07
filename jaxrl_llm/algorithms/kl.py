"""The KL divergence from the reference: estimators, its place in the reward, controllers.

An estimator takes the log-probabilities of the same sampled tokens under two policies and returns
one value a token, whose mean over samples of the first policy estimates KL(first || second).
Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algorithms.advantages import score_to_rewards
from jaxrl_llm.numerics import masked_count, masked_mean, safe_divide

Tokens = Float[Array, "B R"]
Estimator = Callable[[Tokens, Tokens], Tokens]

MAX_LOG_RATIO = 20.0  # before exp
MAX_K3 = 10.0  # one token must not rule a batch
MAX_KL_ERROR = 0.2  # of an adaptive controller, relative to its target


def kl_k1(logprobs: Tokens, reference_logprobs: Tokens) -> Tokens:
    """logprobs - reference_logprobs: unbiased, of high variance, negative for single tokens.

    Right in the reward. In a loss its gradient has mean 0 and it does not hold the policy back:
    take k2, k3 or `k1+` there.
    """
    return logprobs - reference_logprobs


def kl_abs(logprobs: Tokens, reference_logprobs: Tokens) -> Tokens:
    """|logprobs - reference_logprobs|: a distance, not an estimate of the KL."""
    return jnp.abs(logprobs - reference_logprobs)


def kl_k2(logprobs: Tokens, reference_logprobs: Tokens) -> Tokens:
    """0.5 (logprobs - reference_logprobs)^2: biased, but its gradient is that of the KL."""
    return 0.5 * jnp.square(logprobs - reference_logprobs)


def kl_k3(logprobs: Tokens, reference_logprobs: Tokens) -> Tokens:
    """exp(d) - d - 1 with d = reference_logprobs - logprobs: unbiased, never negative.

    d is clamped to ±20 and the result to ±10, as in verl ("low_var_kl"); a token past either clamp
    has no gradient.
    """
    d = jnp.clip(reference_logprobs - logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jnp.clip(jnp.exp(d) - d - 1.0, -MAX_K3, MAX_K3)


def kl_k3_unclamped(logprobs: Tokens, reference_logprobs: Tokens) -> Tokens:
    """k3 as the formula has it, and as TRL computes it.

    Its gradient 1 - exp(d) holds on to a token the more, the less likely the policy has made it;
    that of `kl_k3` ends at exp(d) = 13. Where d is over 88 it is not finite, and the run stops.
    """
    d = reference_logprobs - logprobs
    return jnp.exp(d) - d - 1.0


def straight_through(estimator: Estimator) -> Estimator:
    """The value of `estimator` with the gradient of k2, which is an unbiased gradient of the KL."""

    def estimate(logprobs: Tokens, reference_logprobs: Tokens) -> Tokens:
        value = jax.lax.stop_gradient(estimator(logprobs, reference_logprobs))
        k2 = kl_k2(logprobs, reference_logprobs)
        return value + (k2 - jax.lax.stop_gradient(k2))

    return estimate


# The names that verl's users write in a config; code refers to the functions.
ESTIMATORS: dict[str, Estimator] = {
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
    """The estimator of that name; a `+` at its end asks for the straight-through gradient.

    Names: k1 (kl), abs, k2 (mse), k3 (low_var_kl), k3_unclamped. Raises ValueError for another.
    """
    base = name.removesuffix("+")
    if base not in ESTIMATORS:
        near = difflib.get_close_matches(base, ESTIMATORS, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise ValueError(
            f"no KL estimator '{name}'{hint} The names are: {', '.join(ESTIMATORS)}, "
            "each also with a + (straight-through gradient)"
        )
    return straight_through(ESTIMATORS[base]) if name.endswith("+") else ESTIMATORS[base]


def masked_kl(
    estimator: Estimator, logprobs: Tokens, reference_logprobs: Tokens, mask: Tokens
) -> Tokens:
    """The estimate at each token of the mask; 0 elsewhere, and no gradient whatever stands there.

    An estimator alone would keep a gradient of 0 times what is not finite.
    """
    first, second = (jnp.where(mask != 0, x, 0.0) for x in (logprobs, reference_logprobs))
    return jnp.where(mask != 0, estimator(first, second), 0.0)


def kl_in_reward(
    scores: Float[Array, " B"],
    mask: Tokens,
    old_logprobs: Tokens,
    reference_logprobs: Tokens,
    *,
    coef: Float[Array, ""],
    estimator: Estimator = kl_k1,
) -> tuple[Tokens, Tokens]:
    """(rewards, kl): the score at the last token less coef times the KL at every token.

    `coef` is the state of the KL controller. Both are 0 outside the mask; neither has a gradient.
    """
    kl = masked_kl(estimator, old_logprobs, reference_logprobs, mask)
    return jax.lax.stop_gradient((score_to_rewards(scores, mask) - coef * kl, kl))


def batch_kl(kl: Tokens, mask: Tokens) -> Float[Array, ""]:
    """What a controller steers by: mean over sequences of the mean over tokens, as in verl."""
    per_sequence = masked_mean(kl, mask, axis=1)
    return safe_divide(jnp.sum(per_sequence), masked_count(jnp.max(mask, axis=1, initial=0.0)))


class KLController(Protocol):
    """Chooses the coefficient of the KL in the reward; the state is that coefficient, float32."""

    def init(self) -> Float[Array, ""]:
        """The state before the first iteration."""
        ...

    def update(
        self, state: Float[Array, ""], current_kl: Float[Array, ""], num_samples: int
    ) -> Float[Array, ""]:
        """The state for the next iteration, from the `batch_kl` of this one's samples."""
        ...


@dataclass(frozen=True)
class FixedKL:
    """A constant coefficient."""

    coef: float

    def init(self) -> Float[Array, ""]:
        """The coefficient."""
        return jnp.float32(self.coef)

    def update(
        self, state: Float[Array, ""], current_kl: Float[Array, ""], num_samples: int
    ) -> Float[Array, ""]:
        """The same coefficient."""
        return state


@dataclass(frozen=True)
class AdaptiveKL:
    """A coefficient that grows while the KL is over its target and falls while it is under.

    coef <- coef (1 + clip(kl / target - 1, -0.2, 0.2) num_samples / horizon)
    Ziegler et al. 2019, arXiv:1909.08593. `horizon` is in samples, `target` in nats a token.
    Raises ValueError unless target and horizon are positive.
    """

    coef: float
    horizon: float = 10000.0
    target: float = 0.1

    def __post_init__(self) -> None:
        if self.target <= 0 or self.horizon <= 0:
            raise ValueError(
                f"adaptive KL with target {self.target} and horizon {self.horizon}: both must be "
                "over 0; verl's are 0.1 and 10000"
            )

    def init(self) -> Float[Array, ""]:
        """The coefficient of the first iteration."""
        return jnp.float32(self.coef)

    def update(
        self, state: Float[Array, ""], current_kl: Float[Array, ""], num_samples: int
    ) -> Float[Array, ""]:
        """One proportional step; `num_samples` is the number of sequences behind current_kl.

        Raises ValueError where so many could turn the coefficient's sign.
        """
        fewest = MAX_KL_ERROR * num_samples
        if fewest >= self.horizon:
            raise ValueError(
                f"adaptive KL with horizon {self.horizon} and {num_samples} samples an iteration: "
                "one step could make the coefficient 0 or negative, which rewards distance; use a "
                f"horizon above {fewest:g}, e.g. {num_samples}"
            )
        error = jnp.clip(current_kl / self.target - 1.0, -MAX_KL_ERROR, MAX_KL_ERROR)
        return state * (1.0 + error * (num_samples / self.horizon))


def make_kl_controller(name: str, *, coef: float, horizon: float, target: float) -> KLController:
    """The controller of that name, `fixed` or `adaptive`. Raises ValueError for another."""
    if name == "fixed":
        return FixedKL(coef)
    if name == "adaptive":
        return AdaptiveKL(coef, horizon=horizon, target=target)
    raise ValueError(f"no KL controller '{name}'; the names are: fixed, adaptive")
