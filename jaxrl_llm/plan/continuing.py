"""The stage that goes on with cut responses, in one call with a new batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.generation.engine import Rows
from jaxrl_llm.generation.partial_responses import (
    NO_VERSION,
    Parts,
    Responses,
    append,
    are_unfinished,
    join,
)
from jaxrl_llm.plan.dataflow import StageOutput
from jaxrl_llm.plan.stages import SAMPLED, UNFINISHED, Generation, ModelStage, loop_counts

# Fields of the S batches whose responses go on, [N, S, ...]. Those of the new batch have no prefix.
OLDER = "older_"
CONTINUED: tuple[str, ...] = (*SAMPLED, "policy_versions")
CONTINUING_READS = ("prompts", "prompt_lengths", "sample_ids", *CONTINUED)
OLDER_READS = tuple(OLDER + n for n in ("prompts", "prompt_lengths", "sample_ids", "steps"))


@dataclass(frozen=True, kw_only=True, eq=False)
class ContinueResponses(ModelStage):
    """The next part of each response that was cut, and the first part of a new batch.

    They share the engine's slots in one call. Prompt and response so far are prefilled again. It is
    a program of its own: a plan has one writer of a field. A batch of `older_steps` 0 is none.
    """

    how: Generation
    compiler_options: Mapping[str, int] | tuple[()]
    parts: Parts

    generates = True
    name = "gen_continue"
    writes = (*CONTINUED, *(OLDER + name for name in CONTINUED))

    @property
    def reads(self) -> tuple[str, ...]:
        older = tuple(OLDER + name for name in CONTINUED)
        return ("prompts", "prompt_lengths", "sample_ids", *OLDER_READS, *older)

    def __call__(self, state: Any, step: Any, **fields: Any) -> StageOutput:
        sampling, parts = self.how.settings.sampling, self.parts
        version = parts.first_version(step)
        older = {name: fields[OLDER + name] for name in CONTINUED}
        flat = Responses(*(_rows(older[name]) for name in CONTINUED))
        prompts, lengths, ids, steps = (_rows(fields[name]) for name in OLDER_READS)
        go_on = are_unfinished(flat, lengths, sampling) & (steps > 0)
        whole, longer = join(prompts, lengths, flat)
        longest = sampling.max_new_tokens
        limits = jnp.minimum(
            parts.limit(version, steps, longest), jnp.maximum(longest - flat.lengths_N, 1)
        )
        shape = fields[OLDER_READS[1]].shape
        # The others are rows without a prompt: they generate nothing and take no slot.
        rows = (whole, jnp.where(go_on, longer, 0), ids, self.how.keys(steps), limits)
        stacked = (x.reshape(*shape, *x.shape[1:]) for x in (*rows, flat.lengths_N))
        new_lengths = fields["prompt_lengths"]
        # The slots are those of one batch.
        settings = self.how.settings
        slots = settings.num_slots or new_lengths.shape[0] // self.model.generation.num_replicas
        out = self.how.run(
            self.model,
            state,
            step,
            fields["prompts"],
            new_lengths,
            fields["sample_ids"],
            replace(settings, num_slots=slots),
            limits=jnp.full(new_lengths.shape, parts.limit(version, step, longest)),
            alone=Rows(*stacked),
        )
        assert out.alone is not None
        new = _responses(out, version)
        after = append(flat, jax.tree.map(_rows, _responses(out.alone, version)))
        left = are_unfinished(after, lengths, sampling) & (steps > 0)
        metrics = {
            UNFINISHED: are_unfinished(new, new_lengths, sampling).sum(),
            **loop_counts(out),
        }
        each = jnp.sum(left.reshape(shape), axis=0)
        metrics |= {f"{UNFINISHED}_{i}": each[i] for i in range(shape[1])}
        writes: dict[str, Any] = dict(zip(CONTINUED, new, strict=True))
        for name, x in zip(CONTINUED, after, strict=True):
            writes[OLDER + name] = x.reshape(*shape, *x.shape[1:])
        return StageOutput(writes, metrics)


def older_fields(batches: Sequence[Any], steps: jax.Array) -> dict[str, Any]:
    """What `ContinueResponses` reads of the batches of `steps`, int32 [S]. Call it inside jit."""
    found = {
        OLDER + name: jnp.stack([batch[name] for batch in batches], axis=1)
        for name in CONTINUING_READS
    }
    shape = (batches[0]["prompts"].shape[0], len(batches))
    return found | {OLDER + "steps": jnp.broadcast_to(steps, shape)}


def _rows(x: jax.Array) -> jax.Array:
    """[N, S, ...] as rows."""
    return x.reshape(-1, *x.shape[2:])


def _responses(out: Any, version: jax.Array) -> Responses:
    """What was generated under one policy."""
    versions = jnp.where(out.mask > 0, version, NO_VERSION).astype(jnp.int32)
    return Responses(out.tokens, out.mask, out.logprobs, versions)
