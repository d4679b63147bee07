"""The bias that balances the experts of a sigmoid router without a loss (arXiv:2408.15664).

It is a parameter of the router, added to the scores for the choice alone. It has no gradient and no
moments. After an optimizer step it goes up for experts to which the router would send fewer tokens
than the mean, and down for those with more. Where a pass replays the experts of a rollout, the
router's own choice counts: the bias must see what its last steps did.

Shape letters: L layers with experts, E experts.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.arguments import is_zero
from jaxrl_llm.learner.train_state import Params, is_balance


def balanced(
    new: Params, old: Params, counts_LE: Float[Array, "L E"] | None, rate: float
) -> Params:
    """`new` with the biases of `old`, each moved by `rate` towards equal tokens of all experts.

    `counts_LE` has the tokens that the routers would send to each expert in the step. Without it
    the biases stay as they were. Decay of weights does not reach them.
    """
    layers = sorted({_layer(path) for path, _ in _leaves(old) if is_balance(path)})

    def one(path: Any, new: Array, old: Array) -> Array:
        if not is_balance(path):
            return new
        if counts_LE is None or is_zero(rate):
            return old
        counts_E = counts_LE[layers.index(_layer(path))]
        return old + rate * jnp.sign(counts_E.mean() - counts_E)

    return jax.tree.map_with_path(one, new, old)


def _leaves(params: Params) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(params)


def _layer(path: Any) -> int:
    """The number of the layer in a path such as decoder/layers/3/mlp/router/balance."""
    return next(int(entry.key) for entry in path if entry.key.isdigit())
