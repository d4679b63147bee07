"""The teacher of distillation: its role, and the stages that ask it about the actor's samples."""

from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.learner.forward import response_statistics
from jaxrl_llm.learner.rows import Fields, rows_of
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.trainer.dataflow import Stage, StageOutput
from jaxrl_llm.trainer.initialise import ModelSource, find_model, spec_of
from jaxrl_llm.trainer.roles import Role, make_role, params_of
from jaxrl_llm.trainer.stages import ROW, UpdateSizes, frozen_logprobs_stage, row_fields

TEACHER = "teacher"


def teacher_role(
    config: Config, actor: ModelSource, tokenizer: Tokenizer, mesh: Mesh
) -> tuple[Role, ModelSource]:
    """The role and where its weights come from; the actor's model where the config names none.

    ConfigError when its vocabulary is not the actor's: ids of one would be nonsense to the other.
    """
    settings = config.teacher
    assert settings is not None
    own = bool(settings.path or settings.hf_config)
    source = find_model(settings, tokenizer) if own else actor
    if source.config.vocab_size != actor.config.vocab_size:
        raise ConfigError(
            f"config.teacher has a vocabulary of {source.config.vocab_size} tokens and the actor "
            f"one of {actor.config.vocab_size}: take a teacher with the actor's tokenizer"
        )
    spec = spec_of(source, "causal_lm", settings)
    return make_role(TEACHER, spec, settings, mesh, exact=config.exact), source


def check_teacher(config: Config, algorithm: Algorithm) -> None:
    """ConfigError where the algorithm asks for a teacher and the config has none."""
    named = (*field_names(algorithm.advantage), *field_names(algorithm.policy_loss))
    asked = [name for name in named if name.startswith("teacher_")]
    if asked and config.teacher is None:
        raise ConfigError(
            f"{config.algorithm.path} reads {asked[0]}, and config.teacher is not set: name a "
            "model, --config.teacher.path=DIR, or train one in the run, as "
            "configs/distillation.py does"
        )


def teacher_stages(
    role: Role, sizes: UpdateSizes, *, temperature: float, top_k: int
) -> list[Stage]:
    """Its log-probs of the sampled tokens, and its likeliest tokens at each position."""

    def of_candidates(state: Any, step: jax.Array, *row: jax.Array) -> StageOutput:
        def forward(part: Fields) -> Any:
            return response_statistics(
                params_of(state),
                rows_of(part),
                spec=role.spec,
                settings=role.forward,
                temperature=temperature,
                top_k=top_k,
            ).top

        return StageOutput(writes=sizes.forward.join(forward, row_fields(row)), metrics={})

    return [
        frozen_logprobs_stage(
            role, sizes, name="teacher", writes="teacher_logprobs", temperature=temperature
        ),
        Stage(
            name="teacher_top",
            fn=of_candidates,
            reads=ROW,
            writes=("teacher_top_ids", "teacher_top_logprobs"),
            role=role.name,
        ),
    ]
