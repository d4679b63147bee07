"""Samples that are left out: no loss, mean, deviation or size of a group knows of them.

A sample is left out because its reward failed, or by choice because it was truncated. An estimator
needs no code for that: it sees an empty mask, and a group that has this sample alone.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxrl_llm.algorithms.shapes import SampleIds, Samples, Scalar, Tokens


def learned_tokens(mask: Tokens, sample_mask: Samples) -> Tokens:
    """The mask without the tokens of samples that are left out."""
    return jnp.where(sample_mask[:, None] != 0, mask, 0.0)


def in_a_group(group_ids: SampleIds) -> Bool[Array, " B"]:
    """False for samples that `without_left_out` has put in groups of their own."""
    return group_ids >= 0


def num_samples(group_ids: SampleIds) -> Scalar:
    """Number of samples without those that `without_left_out` has put in groups of their own."""
    return jnp.sum(in_a_group(group_ids), dtype=jnp.float32)


def without_left_out(
    fields: Mapping[str, Array], sample_mask: Samples, *, compares: bool
) -> dict[str, Array]:
    """The fields as an estimator must see them.

    With `compares`, a sample that is the only one left of its group is left out as well: there is
    nothing that it could be compared with.
    """
    kept = sample_mask != 0
    group_ids: SampleIds = fields["group_ids"]
    if compares:
        same = group_ids[:, None] == group_ids[None, :]
        left = (same & kept[None, :]).sum(axis=1)
        kept &= (left > 1) | (same.sum(axis=1) == 1)
    apart = -1 - jnp.arange(group_ids.shape[0], dtype=group_ids.dtype)  # a prompt has no such id
    changed = {
        "mask": learned_tokens(fields["mask"], kept),
        "group_ids": jnp.where(kept, group_ids, apart),
    }
    if "reward_parts" in fields:
        changed["reward_parts"] = jnp.where(kept[:, None], fields["reward_parts"], jnp.nan)
    return {**fields, **changed}
