"""Losses and metrics of the routers of a mixture of experts.

The load-balance loss is transformers' (`load_balancing_loss_func`), after Switch Transformers
(arXiv:2101.03961). The z-loss is from ST-MoE (arXiv:2202.08906).

Shape letters: L layers, E experts.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.arguments import is_zero
from jaxrl_llm.learner.train_state import Metrics
from jaxrl_llm.models.experts import Routed

# Sums over micro-batches, [L, E]; no metrics of a step.
COUNTS = "tokens of each expert"
OWN_COUNTS = "tokens that a router would send to each expert"
ROUTER_METRICS = ("router_aux_loss", "router_z_loss", "router_load", "router_load_mean")
ROUTER_METRICS += ("router_dead_experts",)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["aux_coef", "z_coef", "bias_rate"],
    meta_fields=["by_layer", "over"],
)
@dataclass(frozen=True, kw_only=True)
class RouterLoss:
    """Coefficients of the two losses; both are 0 for a dense model."""

    aux_coef: float = 0.0
    by_layer: bool = False  # the load-balance loss of each layer by itself
    z_coef: float = 0.0
    bias_rate: float = 0.0  # size of a step of the balance bias, which is not a loss
    over: tuple[str, ...] = ()  # inside a shard_map: axes whose groups share a micro-batch

    def __call__(self, routed: Routed, share: Array) -> tuple[Array, Metrics]:
        """The contribution of a micro-batch to the loss, and metrics.

        The load-balance loss is not linear in the tokens, so each micro-batch has its own. `share`
        is the micro-batch's part of the tokens that are learned from. With `over` both belong to
        one group, and the contributions of the groups add up to the micro-batch's.
        """
        whole, share = self._of_micro_batch(routed, share)
        aux, z = load_balance(whole, by_layer=self.by_layer) * share, z_loss(whole) * share
        metrics = {"router_aux_loss": aux, "router_z_loss": z, COUNTS: routed.counts_E}
        if not is_zero(self.bias_rate):  # the config refuses it for other routers than sigmoid ones
            assert routed.own_counts_E is not None
            metrics[OWN_COUNTS] = routed.own_counts_E
        return self.aux_coef * aux + self.z_coef * z, jax.lax.stop_gradient(metrics)

    def _of_micro_batch(self, routed: Routed, share: Array) -> tuple[Routed, Array]:
        """Both with the numbers of tokens of all groups; probabilities stay the group's own."""
        if not self.over:
            return routed, share
        own = jax.lax.stop_gradient((routed.counts_E, routed.tokens, share))
        counts_E, tokens, share = jax.lax.psum(own, self.over)
        return routed._replace(counts_E=counts_E, tokens=tokens), share


def load_balance(routed: Routed, *, by_layer: bool = False) -> Float[Array, ""]:
    """E * sum over experts of f_e * p_e; the number of experts a token has, when all are equal.

    f_e are the tokens that chose the expert, p_e its probability; both are means over all tokens
    and layers. Only p has a gradient. With `by_layer` it is the mean of the layers' losses, whose
    means are over the tokens alone: then loads that differ from layer to layer do not cancel.
    """
    if by_layer:
        tokens_L1 = jnp.maximum(routed.tokens, 1.0)[:, None]
        balance_LE = routed.counts_E / tokens_L1 * (routed.probs_E / tokens_L1)
        return balance_LE.shape[1] * balance_LE.sum(axis=1).mean()
    tokens = jnp.maximum(routed.tokens.sum(), 1.0)
    counts_E, probs_E = routed.counts_E.sum(axis=0), routed.probs_E.sum(axis=0)
    return counts_E.shape[0] * (counts_E / tokens * (probs_E / tokens)).sum()


def z_loss(routed: Routed) -> Float[Array, ""]:
    """The mean over tokens and layers of log(sum over experts of exp(logit))^2."""
    return routed.squares.sum() / jnp.maximum(routed.tokens.sum(), 1.0)


def load_metrics(counts_LE: Float[Array, "L E"]) -> Metrics:
    """The busiest expert's tokens over the mean, in the worst layer and on average; unused ones.

    `router_dead_experts` counts experts of all layers that no token chose.
    """
    load_L = counts_LE.max(axis=1) / jnp.maximum(counts_LE.mean(axis=1), 1e-9)
    return {
        "router_load": load_L.max(),
        "router_load_mean": load_L.mean(),
        "router_dead_experts": (counts_LE == 0).sum().astype(jnp.float32),
    }
