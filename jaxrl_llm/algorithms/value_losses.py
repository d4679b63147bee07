"""Value losses, one value a token, [B, R]; `aggregation.py` makes one number of them."""

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.shapes import Tokens


def clipped_value_loss(
    new_values: Tokens, values: Tokens, returns: Tokens, mask: Tokens, *, cliprange: float = 0.5
) -> tuple[Tokens, dict[str, Tokens]]:
    """PPO's value loss: 0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2).

    The clip keeps the critic near its values V_old at the time of the rollout. `cliprange` is in
    units of the return: adapt it to the scale of the reward. Loss and metric are 0 outside the
    mask. Metric: `critic/vf_clipfrac`, 1 where the clipped side is larger.

    As in verl and OpenAI's baselines. Requires: a positive cliprange; inf turns the clip off.
    """
    keep = mask != 0
    new_values, values = jnp.where(keep, new_values, 0.0), jnp.where(keep, values, 0.0)
    returns = jnp.where(keep, returns, 0.0)
    unclipped = jnp.square(new_values - returns)
    # jnp.clip: on a bound verl splits the gradient in halves too, unlike torch.clamp.
    clipped = jnp.square(jnp.clip(new_values, values - cliprange, values + cliprange) - returns)
    clipfrac = jax.lax.stop_gradient((clipped > unclipped).astype(jnp.float32))
    return 0.5 * jnp.maximum(unclipped, clipped), {"critic/vf_clipfrac": clipfrac}
