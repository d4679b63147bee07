"""Learning from examples that the policy itself makes: its best samples, or a teacher's judgement.

Shapes: B samples, R response tokens, right-padded, K candidates a token.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.numerics import masked_mean, masked_sum

Estimate = tuple[Float[Array, "B R"], Float[Array, "B R"]]
Loss = tuple[Float[Array, "B R"], dict[str, Float[Array, "B R"]]]


# ------------------------------------------------------------------------- the best of n


def best_of_n(
    rewards: Float[Array, "B R"],
    mask: Float[Array, "B R"],
    group_ids: Int[Array, " B"],
    *,
    threshold: float | None = None,
) -> tuple[Float[Array, "B R"], Float[Array, "B R"]]:
    """1 on the tokens of the best sample of each group, 0 elsewhere; no gradient.

    A_i = 1 if r_i = max of the group, and the first of those that share the place, and r_i >
    `threshold` if there is one; r_i is the sum of the sample's rewards. A group none of whose
    samples passes teaches nothing. RAFT: Dong et al. 2023, arXiv:2304.06767.
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


def keep_chosen(
    advantages: Float[Array, "B R"], mask: Float[Array, "B R"]
) -> tuple[Float[Array, "B R"], dict[str, Float[Array, ""]]]:
    """The mask of the samples with a positive advantage: the others are in no loss and no mean.

    The metric is the share of samples that are kept.
    """
    kept = jnp.where((mask != 0) & (advantages > 0), mask, 0.0)
    some = jnp.any(mask != 0, axis=1)
    share = masked_mean(jnp.any(kept != 0, axis=1).astype(jnp.float32), some)
    return jax.lax.stop_gradient((kept, {"rejection_sampling/kept_fraction": share}))


def nll(logprobs: Float[Array, "B R"], mask: Float[Array, "B R"]) -> Loss:
    """Negative log-likelihood of the tokens of the mask: loss = -log pi(token).

    Supervised fine-tuning, for samples that something else chose.
    """
    return -jnp.where(mask != 0, logprobs, 0.0), {}


# ------------------------------------------------------------------------- a teacher


def no_advantage(mask: Float[Array, "B R"]) -> tuple[Float[Array, "B R"], Float[Array, "B R"]]:
    """0 everywhere: for a loss that reads none, so that nothing has to be computed for one."""
    zeros = jnp.zeros_like(mask)
    return zeros, zeros


def teacher_advantage(
    old_logprobs: Float[Array, "B R"],
    teacher_logprobs: Float[Array, "B R"],
    mask: Float[Array, "B R"],
) -> tuple[Float[Array, "B R"], Float[Array, "B R"]]:
    """How much likelier the teacher finds each sampled token: A_t = log pi_T - log pi; no gradient.

    The reverse KL by sample, with a minus: its policy gradient is that of -KL(pi || teacher) of
    each token, given those before it. Agarwal et al. 2024 (GKD), arXiv:2306.13649; as a reward a
    token, Lu et al. 2025, https://thinkingmachines.ai/blog/on-policy-distillation.
    """
    advantages = jnp.where(mask != 0, teacher_logprobs - old_logprobs, 0.0)
    return jax.lax.stop_gradient((advantages, advantages))


def reverse_kl(
    logprobs: Float[Array, "B R"],
    teacher_logprobs: Float[Array, "B R"],
    mask: Float[Array, "B R"],
    *,
    estimator: Callable[[Array, Array], Array],
) -> Loss:
    """Estimate of KL(pi || teacher) at each sampled token, as a loss.

    `estimator` is one of `kl.kl_penalty` whose gradient is that of a divergence: k2, k3, or one
    that is made straight-through. Metric: `distillation/reverse_kl`, the k1 estimate.
    """
    keep = mask != 0
    student = jnp.where(keep, logprobs, 0.0)
    teacher = jnp.where(keep, teacher_logprobs, 0.0)
    metrics = {"distillation/reverse_kl": jax.lax.stop_gradient(student - teacher)}
    return jnp.where(keep, estimator(student, teacher), 0.0), metrics


def forward_kl_top_k(
    top_logprobs: Float[Array, "B R K"],
    teacher_top_logprobs: Float[Array, "B R K"],
    mask: Float[Array, "B R"],
) -> Loss:
    """KL(teacher || pi) over the K tokens that the teacher finds likeliest, at each position.

    loss_t = sum over k of q_k (log q_k - log pi_k), q the teacher's probabilities as they are, not
    normalised over the K; `top_logprobs` are the policy's of the same tokens. What the teacher
    gives to all others is left out, so with a small K the loss may fall below 0, and the policy
    is not told where to put the rest. Hinton et al. 2015, arXiv:1503.02531; on the student's own
    samples, Agarwal et al. 2024, arXiv:2306.13649. Metric: `distillation/teacher_mass`, sum of q_k.
    """
    keep = (mask != 0)[..., None]
    teacher = jnp.where(keep, teacher_top_logprobs, 0.0)
    student = jnp.where(keep, top_logprobs, 0.0)
    q = jnp.where(keep, jnp.exp(teacher), 0.0)
    loss = jnp.sum(q * (teacher - student), axis=-1)
    return loss, {"distillation/teacher_mass": jnp.sum(q, axis=-1)}
