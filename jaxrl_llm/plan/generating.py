"""The stages that generate: samples, greedy answers, and the next parts of cut responses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.arguments import Seed
from jaxrl_llm.config import Config
from jaxrl_llm.distributed.communication import DECODE_STEPS, PREFILLS
from jaxrl_llm.generation.engine import (
    GenerationInPieces,
    GenerationOutput,
    Samples,
    compiler_options,
    generate_on_mesh,
)
from jaxrl_llm.generation.memory import Replica
from jaxrl_llm.generation.partial_responses import (
    ResponseParts,
    Responses,
    append,
    are_unfinished,
    join,
    join_routes,
    routes_in_place,
    versions_of,
)
from jaxrl_llm.generation.settings import GenerationSettings
from jaxrl_llm.generation.sizes import tails_of
from jaxrl_llm.learner.rows import KEPT, ROUTES
from jaxrl_llm.learner.train_state import params_of
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.media import Images
from jaxrl_llm.plan.roles import Role, sampling_model
from jaxrl_llm.plan.stages import ModelStage
from jaxrl_llm.program.stage import StageOutput
from jaxrl_llm.types import IMAGE_FIELDS

UNFINISHED = "rollout/unfinished"  # responses that go on under the next policy
SAMPLED = ("responses", "response_lengths", "mask", "rollout_logprobs")
CONTINUED: tuple[str, ...] = (*SAMPLED, "policy_versions")  # fields of responses in parts
RESPONSES = (*CONTINUED, KEPT)  # the fields of `Responses`


def replica_of(config: Config, model: ModelConfig, *, rows: int, tensor: int) -> Replica:
    """What a replica with `rows` samples of a rollout generates, on `tensor` devices.

    With partial rollouts, responses that go on have rows too, for prompt and response so far. The
    slots belong to one batch.
    """
    data = config.data
    older = config.max_staleness if config.partial_rollouts else 0
    return Replica(
        config=model,
        dtype=config.rollout.dtype or config.actor.dtype,
        tensor=tensor,
        samples=rows * (1 + older),
        width=data.max_prompt_length + (data.max_response_length if older else 0),
        live=rows,
        num_continued=rows * older,
    )


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["seed"],
    meta_fields=["samples", "dtype", "settings"],
)
@dataclass(frozen=True, kw_only=True)
class Generation:
    """The settings with which the actor generates for training."""

    samples: int  # samples of a batch, over all replicas
    dtype: str
    seed: Seed
    settings: GenerationSettings

    def run(
        self,
        role: Role,
        state: Any,
        step: jax.Array,
        prompts: jax.Array,
        lengths: jax.Array,
        sample_ids: jax.Array,
        settings: GenerationSettings,
        *,
        limits: jax.Array | None = None,
        continued: Samples | None = None,
        numbers: jax.Array | None = None,
        images: Images | None = None,
    ) -> GenerationOutput:
        """Responses of the actor, in its generation layout; `generate` says what they are."""
        spec, params = sampling_model(role.spec, params_of(state), self.dtype)
        return generate_on_mesh(
            spec,
            params,
            prompts,
            lengths,
            sample_ids,
            self.keys(step),
            settings,
            layout=role.generation,
            stored=role.layout,
            limits_N=limits,
            continued=continued,
            numbers_NK=numbers,
            images=images,
        )

    @property
    def recorded(self) -> tuple[str, ...]:
        """The fields that say how tokens were sampled, for the trainer to repeat it."""
        routes = (ROUTES,) if self.settings.record_routes else ()
        return (*routes, KEPT) if self.settings.record_kept else routes

    def tails(self, role: Role) -> int:
        """The number of tails of a generation on each replica."""
        return len(tails_of(self.settings, self.samples // role.generation.num_replicas))

    def keys(self, steps: jax.Array) -> jax.Array:
        """The random keys of steps, one or [N]; the keys of samples derive from them."""
        fold = partial(jax.random.fold_in, jax.random.key(self.seed))
        return jax.vmap(fold)(steps) if jnp.ndim(steps) else fold(steps)

    def compiler_options(self, role: Role) -> dict[str, int]:
        """XLA's, for a program that generates a batch, with greedy answers or without."""
        samples = self.samples // role.generation.num_replicas
        return compiler_options(samples, self.settings.num_slots)


@dataclass(frozen=True, kw_only=True, eq=False)
class Generate(ModelStage):
    """Samples responses from the actor in its generation layout, `group` a prompt.

    With `parts` they are the first parts of the responses, and each token has a version.
    """

    how: Generation
    compiler_options: Mapping[str, int] | tuple[()]
    parts: ResponseParts | None = None
    media: tuple[str, ...] = ()  # the fields of images, where there are some

    generates = True
    numbers = ("how",)
    name = "gen"

    @property
    def reads(self) -> tuple[str, ...]:
        return (*super().reads, *self.media)

    @property
    def writes(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        writes = SAMPLED if self.parts is None else CONTINUED
        return (*writes, *self.how.recorded)

    @property
    def loop_metrics(self) -> Mapping[str, str]:
        return {DECODE_STEPS: "rollout/decode_steps", PREFILLS: "rollout/prefills"}

    def __call__(
        self,
        state: Any,
        step: jax.Array,
        *,
        prompts: jax.Array,
        prompt_lengths: jax.Array,
        sample_ids: jax.Array,
        **media: jax.Array,
    ) -> StageOutput:
        out = self.how.run(
            self.model,
            state,
            step,
            prompts,
            prompt_lengths,
            sample_ids,
            self.how.settings,
            limits=self.limits(step, prompt_lengths),
            images=images_in(media),
        )
        return self.output(out, step, prompt_lengths)

    def pieces(self) -> "GenerateInPieces | None":
        """The loop of all slots, then each tail: every decode step is a program of its own."""
        count = self.how.tails(self.model)
        return GenerateInPieces(stage=self, count=count) if count else None

    def limits(self, step: jax.Array, lengths: jax.Array) -> jax.Array | None:
        """The most tokens of each response; None takes the limit of the settings."""
        parts = self.parts
        if parts is None:
            return None
        longest = self.how.settings.sampling.max_new_tokens
        return jnp.full(lengths.shape, parts.limit(parts.first_version(step), step, longest))

    def output(self, out: GenerationOutput, step: jax.Array, lengths: jax.Array) -> StageOutput:
        """The result of the stage, made of a generation."""
        settings, parts, metrics = self.how.settings, self.parts, loop_counts(out)
        # Without parts all tokens have one version, which no field needs.
        version = jnp.int32(0) if parts is None else parts.first_version(step)
        responses = _responses(out, version)
        writes = dict(zip(RESPONSES, responses, strict=True)) | {ROUTES: out.routes}
        writes = {name: writes[name] for name in self.writes if name in writes}
        if parts is None:
            return StageOutput(writes, metrics)
        left = are_unfinished(responses, lengths, settings.sampling)
        return StageOutput(writes, metrics | {UNFINISHED: left.sum()})


@dataclass(frozen=True, kw_only=True)
class GenerateInPieces:
    """`Generate` on one device, cut between the loops of the engine: see `dataflow.Pieces`."""

    stage: Generate
    count: int

    def begin(self, state: Any, step: jax.Array, **fields: jax.Array) -> tuple[Any, Any, Any]:
        """The loops of all slots."""
        how, stored = self.stage.how, params_of(state)
        spec, params = sampling_model(self.stage.model.spec, stored, how.dtype)
        return self._generation(step, **fields).begin(spec, params, stored)

    def go_on(
        self, number: int, state: Any, step: jax.Array, *carried: Any, **fields: jax.Array
    ) -> tuple[Any, Any]:
        """One tail."""
        return self._generation(step, **fields).tail(number, params_of(state), *carried)

    def end(self, step: jax.Array, passed: Any, **fields: jax.Array) -> StageOutput:
        """The responses."""
        out = self._generation(step, **fields).end(passed)
        return self.stage.output(out, step, fields["prompt_lengths"])

    def _generation(
        self,
        step: jax.Array,
        *,
        prompts: jax.Array,
        prompt_lengths: jax.Array,
        sample_ids: jax.Array,
        **media: jax.Array,
    ) -> GenerationInPieces:
        return GenerationInPieces(
            prompts_NP=prompts,
            lengths_N=prompt_lengths,
            sample_ids_N=sample_ids,
            seed_key=self.stage.how.keys(step),
            settings=self.stage.how.settings,
            limits_N=self.stage.limits(step, prompt_lengths),
            images=images_in(media),
        )


def images_in(media: Mapping[str, jax.Array]) -> Images | None:
    """The images of a batch, from its fields of them."""
    return Images(*(media[n] for n in IMAGE_FIELDS if n in media)) if media else None


def loop_counts(out: GenerationOutput) -> dict[str, Any]:
    """Metrics of the engine's loops."""
    slot_steps = out.slot_steps.sum()
    return {
        "rollout/decode_steps": out.steps.max(),
        "rollout/prefills": out.prefills.max(),
        "rollout/slot_use": out.live_slot_steps.sum() / slot_steps,
        "rollout/slots_waiting": out.stalled_slot_steps.sum() / slot_steps,
    }


@dataclass(frozen=True, kw_only=True, eq=False)
class GenerateGreedily(ModelStage):
    """The actor's most likely answer to each prompt, on the first sample of each `group`."""

    how: Generation
    group: int
    compiler_options: Mapping[str, int] | tuple[()]
    media: tuple[str, ...] = ()

    generates = True
    numbers = ("how",)
    name = "gen_max"

    @property
    def reads(self) -> tuple[str, ...]:
        return (*super().reads, *self.media)

    writes = ("greedy_responses", "greedy_lengths", "greedy_logprobs")

    def __call__(
        self,
        state: Any,
        step: jax.Array,
        *,
        prompts: jax.Array,
        prompt_lengths: jax.Array,
        sample_ids: jax.Array,
        **media: jax.Array,
    ) -> StageOutput:
        # The others of a group are rows without a prompt: they generate nothing and take no slot.
        first = jnp.arange(prompt_lengths.shape[0]) % self.group == 0
        lengths, settings = jnp.where(first, prompt_lengths, 0), self.how.settings
        asked = (prompts, lengths, sample_ids, settings)
        out = self.how.run(self.model, state, step, *asked, images=images_in(media))
        return StageOutput(
            {
                "greedy_responses": out.tokens,
                "greedy_lengths": out.lengths,
                "greedy_logprobs": out.logprobs,
            }
        )


# ------------------------------------------------------------------------- partial rollouts


# Fields of the S batches whose responses go on, [N, S, ...]. Those of the new batch have no prefix.
OLDER = "older_"
ASKED = ("prompts", "prompt_lengths", "sample_ids")
OLDER_READS = tuple(OLDER + n for n in (*ASKED, "steps"))


@dataclass(frozen=True, kw_only=True, eq=False)
class ContinueResponses(ModelStage):
    """The next part of each response that was cut, and the first part of a new batch.

    They share the engine's slots in one call. Prompt and response so far are prefilled again. It is
    a program of its own: a plan has one writer of a field. A batch of `older_steps` 0 is none. With
    routing replay the experts of each token go on too.
    """

    how: Generation
    compiler_options: Mapping[str, int] | tuple[()]
    parts: ResponseParts

    generates = True
    numbers = ("how",)
    name = "gen_continue"

    @property
    def _fields(self) -> tuple[str, ...]:
        return (*CONTINUED, *self.how.recorded)

    @property
    def writes(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (*self._fields, *(OLDER + name for name in self._fields))

    @property
    def reads(self) -> tuple[str, ...]:
        return (*ASKED, *OLDER_READS, *(OLDER + name for name in self._fields))

    def __call__(self, state: Any, step: jax.Array, **fields: jax.Array) -> StageOutput:
        sampling, parts = self.how.settings.sampling, self.parts
        version = parts.first_version(step)
        names = [name for name in RESPONSES if name in self._fields]
        flat = Responses(*(_rows(fields[OLDER + name]) for name in names))
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
        older = jax.tree.map(
            lambda x: x.reshape(*shape, *x.shape[1:]), Samples(*rows, flat.lengths_N)
        )
        new_lengths = fields["prompt_lengths"]
        # The slots belong to one batch.
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
            continued=older,
        )
        assert out.continued is not None
        new = _responses(out, version)
        after = append(flat, jax.tree.map(_rows, _responses(out.continued, version)))
        left = are_unfinished(after, lengths, sampling) & (steps > 0)
        metrics = {
            UNFINISHED: are_unfinished(new, new_lengths, sampling).sum(),
            **loop_counts(out),
        }
        each = jnp.sum(left.reshape(shape), axis=0)
        metrics |= {f"{UNFINISHED}_{i}": each[i] for i in range(shape[1])}
        writes: dict[str, Any] = dict(zip(names, new, strict=False))  # the kept tokens come last
        for name, x in zip(names, after, strict=False):
            assert x is not None
            writes[OLDER + name] = x.reshape(*shape, *x.shape[1:])
        if out.routes is not None:
            writes |= self._routes(out, fields)
        return StageOutput(writes, metrics)

    def _routes(self, out: GenerationOutput, fields: dict[str, Any]) -> dict[str, Any]:
        """The experts of the new responses, and of those that went on."""
        assert out.routes is not None
        assert out.continued is not None and out.continued.routes is not None
        new_lengths, older = fields["prompt_lengths"], fields[OLDER + ROUTES]
        sizes = {"prompt": fields["prompts"].shape[1], "response": out.tokens.shape[1]}
        none = jnp.zeros_like(new_lengths)
        begun = _rows(fields[OLDER + "response_lengths"])
        lengths = _rows(fields[OLDER + "prompt_lengths"])
        added = routes_in_place(_rows(out.continued.routes), lengths, begun, **sizes)
        return {
            ROUTES: routes_in_place(out.routes, new_lengths, none, **sizes),
            OLDER + ROUTES: join_routes(_rows(older), added).reshape(older.shape),
        }


def older_fields(batches: Sequence[Any], steps: jax.Array) -> dict[str, Any]:
    """The fields that `ContinueResponses` reads of earlier batches. Call it inside jit.

    Each batch has the fields ASKED and its responses. `steps` are their steps, int32 [S].
    """
    fields = {
        OLDER + name: jnp.stack([batch[name] for batch in batches], axis=1) for name in batches[0]
    }
    shape = (batches[0]["prompts"].shape[0], len(batches))
    return fields | {OLDER + "steps": jnp.broadcast_to(steps, shape)}


def _rows(x: jax.Array) -> jax.Array:
    """[N, S, ...] as rows."""
    return x.reshape(-1, *x.shape[2:])


def _responses(out: Any, version: jax.Array) -> Responses:
    """The responses that one policy generated."""
    versions = versions_of(out.mask, version)
    return Responses(out.tokens, out.lengths, out.mask, out.logprobs, versions, out.kept)
