"""Losses on pairs of which one was preferred: one value a pair, averaged by the caller."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def bradley_terry(
    chosen_scores: Float[Array, " B"],
    rejected_scores: Float[Array, " B"],
    margin: Float[Array, " B"],
    *,
    center: float = 0.0,
) -> tuple[Float[Array, " B"], dict[str, Float[Array, " B"]]]:
    """The loss of a reward model on pairs, after Bradley and Terry 1952.

    loss = -log sigmoid(chosen - rejected - margin) + center (chosen + rejected)^2

    `margin` is 0 where the data give none (Llama 2, arXiv:2307.09288). Scores are known only up
    to a constant, which `center` draws to 0 (Eisenstein et al. 2023, arXiv:2312.09244; 0.01 there).
    Metrics, one value a pair: `reward_model/accuracy` (chosen over rejected; a tie is 0),
    `reward_model/margin` (chosen - rejected), `reward_model/score` (mean of the two).
    """
    gap = chosen_scores - rejected_scores
    total = chosen_scores + rejected_scores
    loss = -jax.nn.log_sigmoid(gap - margin) + center * jnp.square(total)
    metrics = {
        "reward_model/accuracy": (gap > 0).astype(jnp.float32),
        "reward_model/margin": gap,
        "reward_model/score": 0.5 * total,
    }
    return loss, jax.lax.stop_gradient(metrics)
