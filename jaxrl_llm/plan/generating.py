"""The stages that generate on the device: samples, and greedy answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.arguments import Seed
from jaxrl_llm.config import Config
from jaxrl_llm.distributed.communication import DECODE_STEPS, PREFILLS
from jaxrl_llm.generation.engine import (
    GenerationLoops,
    GenerationOutput,
    compiler_options,
    generate_on_mesh,
)
from jaxrl_llm.generation.memory import Replica
from jaxrl_llm.generation.settings import GenerationSettings
from jaxrl_llm.generation.sizes import tails_of
from jaxrl_llm.learner.rows import KEPT, ROUTES
from jaxrl_llm.learner.train_state import params_of
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.media import Images, images_in
from jaxrl_llm.plan.roles import Role, sampling_model
from jaxrl_llm.plan.stages import ModelStage
from jaxrl_llm.program.stage import StageOutput

SAMPLED = ("responses", "response_lengths", "mask", "rollout_logprobs")


def replica_of(config: Config, model: ModelConfig, *, rows: int, tensor: int) -> Replica:
    """What a replica with `rows` samples of a rollout generates, on `tensor` devices."""
    return Replica(
        config=model,
        dtype=config.rollout.dtype or config.actor.dtype,
        tensor=tensor,
        samples=rows,
        width=config.data.max_prompt_length,
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

    def keys(self, step: jax.Array) -> jax.Array:
        """The random key of a step; the keys of samples derive from it."""
        return jax.random.fold_in(jax.random.key(self.seed), step)

    def compiler_options(self, role: Role) -> dict[str, int]:
        """XLA's, for a program that generates a batch, with greedy answers or without."""
        samples = self.samples // role.generation.num_replicas
        return compiler_options(samples, self.settings.num_slots)


@dataclass(frozen=True, kw_only=True, eq=False)
class Generate(ModelStage):
    """Samples responses from the actor in its generation layout, `group` a prompt."""

    how: Generation
    compiler_options: Mapping[str, int] | tuple[()]

    generates = True
    numbers = ("how",)
    name = "gen"

    @property
    def writes(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (*SAMPLED, *self.how.recorded)

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
            images=images_in(media),
        )
        return self.output(out)

    @property
    def num_pieces(self) -> int:
        """The tails: with the loop of all slots, every decode step is a program of its own."""
        return self.how.tails(self.model)

    def pieces(
        self,
        state: Any,
        step: jax.Array,
        *,
        prompts: jax.Array,
        prompt_lengths: jax.Array,
        sample_ids: jax.Array,
        **media: jax.Array,
    ) -> GenerationLoops:
        """The generation on one device, cut between the loops of the engine."""
        spec, dtype = self.model.spec, self.how.dtype
        return GenerationLoops(
            model=lambda trained: sampling_model(spec, trained, dtype),
            trained=params_of(state),
            prompts_NP=prompts,
            lengths_N=prompt_lengths,
            sample_ids_N=sample_ids,
            seed_key=self.how.keys(step),
            settings=self.how.settings,
            images=images_in(media),
            output=self.output,
        )

    def output(self, out: GenerationOutput) -> StageOutput:
        """The result of the stage, made of a generation."""
        sampled = (out.tokens, out.lengths, out.mask, out.logprobs)
        writes = dict(zip(SAMPLED, sampled, strict=True)) | {ROUTES: out.routes, KEPT: out.kept}
        names = (*SAMPLED, *self.how.recorded)
        return StageOutput({name: writes[name] for name in names}, loop_counts(out))


def loop_counts(out: GenerationOutput) -> dict[str, Any]:
    """Metrics of the engine's loops."""
    slot_steps = out.slot_steps.sum()
    drafts = {}
    if out.drafts_offered is not None and out.drafts_accepted is not None:
        accepted, offered = out.drafts_accepted.sum(), out.drafts_offered.sum()
        drafts = {
            "rollout/draft_acceptance": accepted / jnp.maximum(offered, 1),
            "rollout/draft_share": accepted / jnp.maximum(out.lengths.sum(), 1),
        }
    return drafts | {
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

    generates = True
    numbers = ("how",)
    name = "gen_max"
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
