"""The roles that a config of online RL describes, and where their first weights come from."""

from collections.abc import Mapping
from dataclasses import replace

from jax.sharding import Mesh

from jaxrl_llm.config import Config, ConfigError, ModelSettings
from jaxrl_llm.generation.stop_strings import Stops, stop_strings
from jaxrl_llm.models.base import ModelSpec
from jaxrl_llm.models.config import Kind
from jaxrl_llm.plan.models import (
    ModelSource,
    base_settings,
    base_spec,
    find_model,
    learner_spec,
    spec_of,
)
from jaxrl_llm.plan.roles import BASE, CRITIC_BASE, Role, make_role, strict_of
from jaxrl_llm.plan.stages import update_sizes
from jaxrl_llm.tokenizer import Tokenizer, check_vocabulary

TEACHER = "teacher"
ROLLOUT_ROLE = "rollout"  # the actor where it generates on devices of its own
ROLES = ("actor", "critic", "reference", "reward", TEACHER, ROLLOUT_ROLE, BASE, CRITIC_BASE)


def stop_ids(config: Config, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Token ids that end a response: the tokenizer's and the config's own."""
    return tuple(dict.fromkeys((*tokenizer.stop_ids, *config.rollout.stop_token_ids)))


def stops_of(config: Config, tokenizer: Tokenizer) -> Stops:
    """What ends a response. ConfigError for stop strings that the tokenizer cannot have."""
    try:
        strings = stop_strings(config.rollout.stop, tokenizer)
    except ValueError as error:
        raise ConfigError(f"config.rollout.stop: {error}") from error
    return Stops(stop_ids(config, tokenizer), strings)


def roles_of(
    config: Config,
    tokenizer: Tokenizer,
    mesh: Mesh,
    waiting: int,
    own_meshes: Mapping[str, Mesh],
) -> tuple[dict[str, Role], dict[str, ModelSource]]:
    """Every role that the config describes, and where weights come from, if not from the actor."""
    context = config.data.max_row_length
    actor = find_model(config.actor, tokenizer, context=context)
    check_vocabulary(tokenizer, actor.config.vocab_size, stop_ids(config, tokenizer))
    models: dict[str, tuple[Kind, ModelSettings]] = {
        "actor": ("causal_lm", config.actor),
        "critic": ("scalar", config.critic),
    }
    if config.reward.model is not None:
        models["reward"] = ("scalar", config.reward.model)
    if config.teacher is not None:
        models[TEACHER] = ("causal_lm", config.teacher)
    for model in config.models:
        if model.name in (*ROLES, *models):
            raise ConfigError(
                f"config.models: the name {model.name!r} is taken by a role of the trainer or by "
                "another model; give it a name of its own"
            )
        models[model.name] = (model.kind, model)
    roles, sources = {}, {"actor": actor}
    for name, (kind, settings) in models.items():
        source = actor
        if name != "actor" and (settings.path or settings.hf_config):
            source = sources[name] = find_model(settings, tokenizer, context=context)
        elif name == TEACHER:
            sources[name] = actor
        _check_vocabulary(name, source, actor)
        spec = learner_spec(source, kind, settings)
        role = _make_role(name, spec, settings, config, own_meshes.get(name), mesh)
        if spec.lora is not None:
            shared = source is actor and BASE in roles
            base = BASE if name == "actor" or shared else CRITIC_BASE
            if base not in roles:
                frozen = base_settings(settings)
                roles[base] = _make_role(
                    base, base_spec(source, kind, settings), frozen, config, None, mesh
                )
            role = replace(role, base=base)
        roles[name] = role
    iterations = {"actor": config.total_steps - waiting, "critic": config.total_steps}
    for name, number in iterations.items():
        settings = config.actor if name == "actor" else config.critic
        per_epoch = number * update_sizes(config, roles["actor"]).num_mini_batches
        steps = max(per_epoch * settings.ppo_epochs, 1)
        roles[name] = roles[name].with_optimizer(settings.optimizer, steps)
    # The policy before training is the base of its adapters.
    roles["reference"] = roles.get(BASE) or reference_role(
        config, actor, mesh, own_meshes.get("reference")
    )
    return roles, sources


def _make_role(
    name: str,
    spec: ModelSpec,
    settings: ModelSettings,
    config: Config,
    own_mesh: Mesh | None,
    mesh: Mesh,
) -> Role:
    """A role on its own mesh, which has no phases, or on that of the run."""
    phases = config.mesh if own_mesh is None else None
    strict = None
    if config.exact == "strict" and spec.kind == "causal_lm":
        strict = strict_of(spec, settings.dtype, settings.attention)
    exact = config.exact != "off"
    return make_role(
        name, spec, settings, own_mesh or mesh, phases=phases, exact=exact, strict=strict
    )


def _check_vocabulary(name: str, source: ModelSource, actor: ModelSource) -> None:
    """ConfigError when a model's vocabulary is not the actor's: it would read other tokens."""
    if source.config.vocab_size != actor.config.vocab_size and name not in ("critic", "reward"):
        raise ConfigError(
            f"config.{name} has a vocabulary of {source.config.vocab_size} tokens and the actor "
            f"one of {actor.config.vocab_size}: take a {name} with the actor's tokenizer"
        )


def reference_role(
    config: Config, source: ModelSource, mesh: Mesh, own_mesh: Mesh | None = None
) -> Role:
    """The actor as it was before training; frozen, so stored in the dtype that it computes in."""
    settings = ModelSettings(
        dtype=config.actor.dtype,
        param_dtype=config.actor.dtype,
        attention=config.actor.attention,
    )
    spec: ModelSpec = spec_of(source, "causal_lm", settings)
    return _make_role("reference", spec, settings, config, own_mesh, mesh)
