"""Imitation of samples that the policy generates: of the best ones, or of a teacher on them.

Shapes: B samples, R response tokens, right-padded, K candidates a token.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Float

from jaxrl_llm.algorithms.fields import FieldFunction, field_names
from jaxrl_llm.algorithms.shapes import SampleIds, Scalar, Tokens
from jaxrl_llm.numerics import masked_mean, masked_sum

Estimate = tuple[Tokens, Tokens]
Loss = tuple[Tokens, dict[str, Tokens]]


# ------------------------------------------------------------------------- the best of n


def best_of_n(
    rewards: Tokens, mask: Tokens, group_ids: SampleIds, *, threshold: float | None = None
) -> tuple[Tokens, Tokens]:
    """1 on the tokens of the best sample of each group, 0 elsewhere; no gradient.

    A_i = 1 if r_i = max of the group and r_i > threshold, r_i the sum of the sample's rewards

    The first of several best samples is taken. A group without a sample above `threshold` teaches
    nothing. RAFT: Dong et al. 2023, arXiv:2304.06767.
    """
    some = jnp.any(mask != 0, axis=1)
    totals = jnp.where(some, masked_sum(rewards, mask, axis=1), -jnp.inf)
    index = jnp.arange(totals.shape[0])
    same = group_ids[:, None] == group_ids[None, :]
    earlier = index[None, :] < index[:, None]
    tied = (totals[None, :] == totals[:, None]) & earlier
    beaten = jnp.any(same & ((totals[None, :] > totals[:, None]) | tied), axis=1)
    chosen = some & ~beaten
    if threshold is not None:
        chosen &= totals > threshold
    weights = jnp.where((mask != 0) & chosen[:, None], 1.0, 0.0)
    return jax.lax.stop_gradient((weights, weights))


def keep_chosen(advantages: Tokens, mask: Tokens) -> tuple[Tokens, dict[str, Scalar]]:
    """The mask of the samples with a positive advantage; all others are in no loss and no mean.

    Metric: `rejection_sampling/kept_fraction`, the share of samples kept.
    """
    kept = jnp.where((mask != 0) & (advantages > 0), mask, 0.0)
    some = jnp.any(mask != 0, axis=1)
    share = masked_mean(jnp.any(kept != 0, axis=1).astype(jnp.float32), some)
    return jax.lax.stop_gradient((kept, {"rejection_sampling/kept_fraction": share}))


def nll(logprobs: Tokens, mask: Tokens) -> Loss:
    """Negative log-likelihood of the tokens of the mask: loss = -log pi(token).

    Supervised fine-tuning on samples that are already selected, as by `keep_chosen`.
    """
    return -jnp.where(mask != 0, logprobs, 0.0), {}


# ------------------------------------------------------------------------- a teacher


def no_advantage(mask: Tokens) -> tuple[Tokens, Tokens]:
    """0 everywhere, for a loss that reads no advantage."""
    zeros = jnp.zeros_like(mask)
    return zeros, zeros


def teacher_advantage(
    old_logprobs: Tokens, teacher_logprobs: Tokens, mask: Tokens
) -> tuple[Tokens, Tokens]:
    """On-policy distillation as an advantage: A_t = log pi_teacher - log pi; no gradient.

    A_t is minus the sampled reverse KL. Its policy gradient is the gradient of -KL(pi || teacher)
    for each token given the tokens before it. Agarwal et al. 2024 (GKD), arXiv:2306.13649; as a
    reward: Lu et al. 2025, https://thinkingmachines.ai/blog/on-policy-distillation.
    """
    advantages = jnp.where(mask != 0, teacher_logprobs - old_logprobs, 0.0)
    return jax.lax.stop_gradient((advantages, advantages))


def reverse_kl(
    logprobs: Tokens,
    teacher_logprobs: Tokens,
    mask: Tokens,
    *,
    estimator: Callable[[Array, Array], Array],
) -> Loss:
    """Estimate of KL(pi || teacher) at each sampled token, as a loss.

    `estimator` is one of `kl.kl_penalty` with the gradient of a divergence: k2, k3, or a
    straight-through one. Do not use k1. Metric: `distillation/reverse_kl`, the k1 estimate.
    """
    keep = mask != 0
    student = jnp.where(keep, logprobs, 0.0)
    teacher = jnp.where(keep, teacher_logprobs, 0.0)
    metrics = _distance(logprobs, teacher_logprobs, mask)
    return jnp.where(keep, estimator(student, teacher), 0.0), metrics


def with_distance(policy_loss: Callable[..., Any]) -> Callable[..., Any]:
    """`policy_loss` that also reports `distillation/reverse_kl`, the k1 estimate of `reverse_kl`.

    The result also reads `teacher_logprobs`. Loss and gradient do not change.
    """
    own = field_names(policy_loss)
    reads = tuple(dict.fromkeys((*own, "logprobs", "teacher_logprobs", "mask")))

    def measured(policy_loss: Callable[..., Any], *values: Any) -> Any:
        fields = dict(zip(reads, values, strict=True))
        loss, metrics = policy_loss(*(fields[name] for name in own))
        distance = _distance(fields["logprobs"], fields["teacher_logprobs"], fields["mask"])
        return loss, metrics | distance

    return FieldFunction(Partial(measured, policy_loss), reads)


def _distance(logprobs: Array, teacher_logprobs: Array, mask: Array) -> dict[str, Array]:
    gap = jnp.where(mask != 0, logprobs - teacher_logprobs, 0.0)
    return {"distillation/reverse_kl": jax.lax.stop_gradient(gap)}


def forward_kl_top_k(
    top_logprobs: Float[Array, "B R K"], teacher_top_logprobs: Float[Array, "B R K"], mask: Tokens
) -> Loss:
    """KL(teacher || pi) over the K most likely tokens of the teacher, at each position.

    loss_t = sum over k of q_k (log q_k - log pi_k)

    q_k are the teacher's probabilities, not normalised over the K; `top_logprobs` are the policy's
    for the same tokens. The teacher's mass on all other tokens is left out: with a small K the
    loss may be negative and does not constrain that mass. Metric: `distillation/teacher_mass`, the
    sum of q_k. Hinton et al. 2015, arXiv:1503.02531; on samples of the student: Agarwal et al.
    2024, arXiv:2306.13649.
    """
    keep = (mask != 0)[..., None]
    teacher = jnp.where(keep, teacher_top_logprobs, 0.0)
    student = jnp.where(keep, top_logprobs, 0.0)
    q = jnp.where(keep, jnp.exp(teacher), 0.0)
    loss = jnp.sum(q * (teacher - student), axis=-1)
    return loss, {"distillation/teacher_mass": jnp.sum(q, axis=-1)}
