"""Rejection: leave out tokens or responses on which sampler and trainer differ too much.

A rule measures the distance of the two policies for each token, or over a response (sum, mean or
maximum), by an estimator of KL(sampler || trainer). With d = old_logprobs - rollout_logprobs:
k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1. Schulman, http://joschu.net/blog/kl-approx.html
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.numerics import masked_mean, masked_sum
from jaxrl_llm.references import nearest

MAX_LOG_RATIO = 20.0
RULES = (
    *(f"token_k{i}" for i in (1, 2, 3)),
    *(f"seq_sum_k{i}" for i in (1, 2, 3)),
    *(f"seq_mean_k{i}" for i in (1, 2, 3)),
    *(f"seq_max_k{i}" for i in (2, 3)),  # k1 has a sign: its maximum means nothing
)


@dataclass(frozen=True)
class Rule:
    """Keeps what has lower <= distance <= upper."""

    name: str
    lower: float
    upper: float


def parse_rules(names: str | None, thresholds: float | str | None) -> tuple[Rule, ...]:
    """The rules of verl's `rollout_rs` and `rollout_rs_threshold`.

    `names` are separated by commas; there is one threshold for all of them or one each. The
    threshold of a k1 rule is a band "0.5_2.0" of exp(k1), the ratio of sampler to trainer; a
    number u means "1/u_u". All others have the largest distance. Raises ValueError for other text.
    """
    chosen = list(dict.fromkeys(name.strip() for name in (names or "").split(",") if name.strip()))
    given = [part.strip() for part in str(thresholds).split(",")] if thresholds is not None else []
    for name in chosen:
        if name not in RULES:
            raise ValueError(
                f"no rejection rule {name!r}{nearest(name, RULES)}\nThe rules are: "
                f"{', '.join(RULES)}"
            )
    if not chosen or len(given) not in (1, len(chosen)):
        raise ValueError(
            f"rollout_rs={names!r} with rollout_rs_threshold={thresholds!r}: give rules, and one "
            'threshold for all or one each, such as "token_k1,seq_mean_k3" with "0.5_2.0,0.01"'
        )
    given = given * len(chosen) if len(given) == 1 else given
    return tuple(_rule(name, text) for name, text in zip(chosen, given, strict=True))


def _rule(name: str, text: str) -> Rule:
    lower_text, band, upper_text = text.rpartition("_")
    ratio = name.endswith("k1")
    try:
        upper = float(upper_text)
        lower = float(lower_text) if band else 1.0 / upper
    except (ValueError, ZeroDivisionError):
        upper = lower = 0.0
    if upper <= 0 or (ratio and not 0 < lower <= upper) or (band and not ratio):
        wanted = 'a band of the ratio such as "0.5_2.0"' if ratio else "a number over 0"
        raise ValueError(f"the threshold {text!r} of the rejection rule {name}: expected {wanted}")
    if ratio:
        return Rule(name, math.log(lower), math.log(upper))
    return Rule(name, -math.inf, upper)


def reject(
    old_logprobs: Float[Array, "B R"],
    rollout_logprobs: Float[Array, "B R"],
    mask: Float[Array, "B R"],
    *,
    rules: tuple[Rule, ...],
) -> tuple[Float[Array, "B R"], dict[str, Float[Array, ""]]]:
    """The mask without the tokens that any rule rejects, [B, R], and metrics; no gradient.

    A token rule rejects tokens, a sequence rule whole responses. A distance on its bound is kept.
    Metrics: `rollout_corr/rollout_rs_masked_fraction` (share of tokens), `..._seq_masked_fraction`
    (share of responses with a rejected token); both again for each rule, with its mean distance.
    """
    keep = mask != 0
    d = jnp.where(keep, old_logprobs - rollout_logprobs, 0.0)
    d = jnp.clip(d, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    distances = {"k1": 0.0 - d, "k2": 0.5 * jnp.square(d), "k3": jnp.exp(d) - d - 1.0}
    kept, metrics = keep, {}
    for rule in rules:
        level, _, kind = rule.name.rpartition("_")
        distance = _over_sequences(distances[kind], mask, level)
        within = (distance >= rule.lower) & (distance <= rule.upper)
        kept = kept & within
        name = f"rollout_corr/rollout_rs_{rule.name}"
        metrics |= _fractions(name, keep, keep & within)
        metrics[f"{name}_mean"] = masked_mean(distance, mask)
    metrics |= _fractions("rollout_corr/rollout_rs", keep, kept)
    return jax.lax.stop_gradient((jnp.where(kept, mask, 0.0), metrics))


def _over_sequences(distance: Array, mask: Array, level: str) -> Array:
    if level == "token":
        return distance
    if level == "seq_sum":
        value = masked_sum(distance, mask, axis=1)
    elif level == "seq_mean":
        value = masked_mean(distance, mask, axis=1)
    else:
        assert level == "seq_max", level
        value = jnp.max(jnp.where(mask != 0, distance, 0.0), axis=1, initial=0.0)
    return jnp.broadcast_to(value[:, None], mask.shape)


def _fractions(name: str, before: Array, after: Array) -> dict[str, Array]:
    lost = (before & ~after).astype(jnp.float32)
    return {
        f"{name}_masked_fraction": masked_mean(lost, before),
        f"{name}_seq_masked_fraction": masked_mean(lost.max(axis=1), jnp.any(before, axis=1)),
    }
