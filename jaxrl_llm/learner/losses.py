"""Losses over parameters: a forward pass joined to a function of `algorithms/`.

Each maker returns a `Loss` for the train step. Counts (`tokens`, `sequences`) are those of the
whole global mini-batch and travel in the batch as arrays with one entry a row, because a
micro-batch must see the same counts.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algorithms.aggregation import global_counts
from jaxrl_llm.algorithms.alias import Algorithm
from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.algorithms.kl import masked_kl
from jaxrl_llm.learner.forward import (
    ForwardSettings,
    response_statistics,
    response_values,
)
from jaxrl_llm.learner.rows import Fields, rows_of
from jaxrl_llm.learner.train_state import Params
from jaxrl_llm.learner.train_step import Loss, Metrics
from jaxrl_llm.models.base import ModelSpec


def with_counts(fields: Fields, first: Array) -> Fields:
    """`fields` with the mini-batch's own counts beside every row; call it once a mini-batch.

    `first` says that the parameters are still those that computed `old_logprobs`.
    """
    mask = _loss_mask(fields)
    rows = mask.shape[0]
    tokens, sequences = global_counts(mask)
    return fields | {
        "num_tokens": jnp.full((rows,), tokens),
        "num_sequences": jnp.full((rows,), sequences),
        "unchanged": jnp.full((rows, 1), first),
    }


def _loss_mask(fields: Fields) -> Array:
    """The tokens that count: all of the policy's, or those that no rule of rejection left out."""
    return fields.get("loss_mask", fields["mask"])


def _counts(fields: Fields) -> dict[str, Array]:
    return {
        "global_tokens": fields["num_tokens"][0],
        "global_sequences": fields["num_sequences"][0],
    }


def _token_means(metrics: Metrics, mask: Float[Array, "B R"], tokens: Array) -> Metrics:
    """Each per-token array summed over the mask and divided by the global token count."""
    return {name: (x * mask).sum() / jnp.maximum(tokens, 1) for name, x in metrics.items()}


def policy_loss(
    algorithm: Algorithm,
    *,
    spec: ModelSpec,
    settings: ForwardSettings,
    temperature: float,
    own_logprobs: bool = False,
) -> Loss:
    """The actor's loss: policy loss, entropy bonus and KL term, each aggregated the same way.

    `own_logprobs` is for the only step on its samples: the old log-probs are those that it computes
    itself, and it gives them and the entropies, [B, R], beside the metrics, for `accumulate`.
    """
    reads = field_names(algorithm.policy_loss)
    bonus_or_read = algorithm.entropy_coef != 0.0 or "entropy" in reads
    with_candidates = "top_logprobs" in reads

    def loss(params: Params, fields: Fields) -> tuple[Array, Any]:
        found = response_statistics(
            params,
            rows_of(fields),
            spec=spec,
            settings=settings,
            temperature=temperature,
            with_entropy=bonus_or_read or own_logprobs,
            candidates=fields["teacher_top_ids"] if with_candidates else None,
        )
        logprobs, entropy, top = found.logprobs, found.entropy, found.at_candidates
        counts, mask = _counts(fields), _loss_mask(fields)
        current = fields | {"logprobs": logprobs, "mask": mask}
        if entropy is not None:
            current["entropy"] = entropy
        if top is not None:
            current["top_logprobs"] = top
        if "old_logprobs" in reads:
            # Before the first update old and current log-probs are the same function of the same
            # parameters. Two compilations of it may differ in the last bit; the ratio must not.
            own = jax.lax.stop_gradient(logprobs)
            current["old_logprobs"] = (
                own if own_logprobs else jnp.where(fields["unchanged"], own, fields["old_logprobs"])
            )
        per_token, parts = algorithm.policy_loss(*(current[name] for name in reads))
        total = algorithm.aggregate(per_token, mask, **counts)
        metrics = {"actor/pg_loss": total} | _token_means(parts, mask, counts["global_tokens"])
        if bonus_or_read:
            assert entropy is not None
            bonus = algorithm.aggregate(entropy, mask, **counts)
            total = total - algorithm.entropy_coef * bonus
            metrics["actor/entropy_loss"] = bonus
        if algorithm.kl_loss is not None:
            kl = masked_kl(algorithm.kl_loss, logprobs, fields["reference_logprobs"], mask)
            term = algorithm.aggregate(kl, mask, **counts)
            total = total + algorithm.kl_loss_coef * term
            metrics["actor/kl_loss"] = term
        return total, (metrics, (logprobs, entropy)) if own_logprobs else metrics

    return loss


def value_loss(algorithm: Algorithm, *, spec: ModelSpec, settings: ForwardSettings) -> Loss:
    """The critic's loss, aggregated as the policy's is."""
    assert algorithm.value_loss is not None
    fn, reads = algorithm.value_loss, field_names(algorithm.value_loss)

    def loss(params: Params, fields: Fields) -> tuple[Array, Metrics]:
        new_values = response_values(params, rows_of(fields), spec=spec, settings=settings)
        current = fields | {"new_values": new_values}
        counts, mask = _counts(fields), fields["mask"]
        per_token, parts = fn(*(current[name] for name in reads))
        total = algorithm.aggregate(per_token, mask, **counts)
        means = _token_means(parts, mask, counts["global_tokens"])
        return total, {"critic/vf_loss": total} | means

    return loss


def tree_names(params: Params) -> tuple[str, ...]:
    """Dotted names of the leaves of a parameter tree, in tree order."""
    paths, _ = jax.tree_util.tree_flatten_with_path(params)
    return tuple(".".join(_key(entry) for entry in path) for path, _ in paths)


def _key(entry: Any) -> str:
    return str(getattr(entry, "key", entry))
