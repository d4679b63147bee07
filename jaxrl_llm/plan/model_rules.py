"""Settings that a role's model does not work with, or cannot use. Imports no jax.

The plan of a run asks for all roles. `launch/described_models.py` asks before jax is imported.
"""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from jaxrl_llm.config import Config, ConfigError, ExtraModelConfig, ModelSettings
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.families import check_kind
from jaxrl_llm.typed_records.tree import as_text, default_at, every, value_at

if TYPE_CHECKING:  # it imports jax
    from jaxrl_llm.plan.roles import Role

_ROLES = {"reward.model": "reward"}  # of keys that are not the name of their role
_ROUTER_KEYS = (  # of the actor; by default they are off
    "router_aux_loss_coef",
    "router_z_loss_coef",
    "router_bias_rate",
    "router_aux_loss_by_layer",
)


def check_roles(config: Config, roles: "Mapping[str, Role]") -> None:
    """Raises: ConfigError for settings that a role's model does not work with, or cannot use."""
    check_hybrids(config, {name: role.spec.config for name, role in roles.items()})
    for role in roles.values():
        check_kind(role.spec.config, role.spec.kind)
        _check_attention(role)
    mixtures = [role for role in roles.values() if role.spec.config.mixture is not None]
    if config.mesh.expert > 1 and not mixtures:
        raise ConfigError(
            f"config.mesh.expert={config.mesh.expert}: no model of the run has experts; "
            f"--config.mesh.expert=1 --config.mesh.fsdp={config.mesh.fsdp * config.mesh.expert} "
            "works"
        )
    actor = roles.get("actor")
    _check_router_keys(config, None if actor is None else actor.spec.config)


def _check_router_keys(config: Config, learns: ModelConfig | None) -> None:
    """Raises: ConfigError for keys of routers that do not learn, or are of another kind."""
    mixture = None if learns is None else learns.mixture
    if mixture is None:
        keys = [f"actor.{key}" for key in _ROUTER_KEYS if getattr(config.actor, key)]
        given = ", ".join(f"config.{key}={as_text(value_at(config, key))}" for key in keys)
        works = " ".join(f"--config.{key}={as_text(default_at(config, key))}" for key in keys)
        if keys:
            why = "the model that learns has no routers, so nothing would change"
            raise ConfigError(f"{given}: {why}; {works} works")
        return
    other = "router_bias_rate" if mixture.scores == "softmax" else "router_z_loss_coef"
    if value := getattr(config.actor, other):
        raise ConfigError(
            f"config.actor.{other}={value}: the router's scores are a {mixture.scores}, which has "
            f"no such {'bias' if 'bias' in other else 'loss'}; --config.actor.{other}=0 works"
        )


def _check_attention(role: "Role") -> None:
    """Raises: ConfigError for an attention without the model's sinks or soft cap."""
    config = role.spec.config
    features = {
        "attention sinks": config.attention_sinks,
        "a soft cap": config.attention_softcap is not None,
    }
    for what in (name for name, given in features.items() if given):
        if "cudnn" in (role.forward.attention, role.passes.attention):
            raise ConfigError(
                f"attention=cudnn does not work with {what}, which the model {role.name} has; "
                "set attention=auto of it, such as --config.actor.attention=auto"
            )


# ------------------------------------------------------------------------- gated delta rules


def check_hybrids(config: Config, models: Mapping[str, ModelConfig | None]) -> None:
    """Raises: ConfigError with a remedy for a setting that a hybrid model does not work with.

    `models` are those of roles by name, or by key in the config; None has the actor's, or is not
    known.
    """
    for name, model in models.items():
        if model is None or model.delta is None:
            continue
        heads = model.delta.key_heads
        refused = (*_refused(config), *_unlike_stages(config, model))
        for given, works in (*refused, *_indivisible(config, name, heads)):
            raise ConfigError(
                f"config.{given} does not work with layers of a gated delta rule, which the model "
                f"{name} has; --config.{works} works"
            )


def _refused(config: Config) -> Iterator[tuple[str, str]]:
    """The settings of this config that a hybrid model refuses, and what to set instead."""
    if config.exact == "strict":
        yield "exact=strict", "exact=repeatable"


def _unlike_stages(config: Config, model: ModelConfig) -> Iterator[tuple[str, str]]:
    """A pipeline whose stages would compute the rule in other layers than each other."""
    mesh, delta = config.mesh, model.delta
    if mesh.pipeline == 1 or model.splits_alike(mesh.pipeline * mesh.pipeline_rounds):
        return
    assert delta is not None
    fits = (
        (stages, rounds)
        for rounds in (mesh.pipeline_rounds, 1)
        for stages in range(mesh.pipeline, 1, -1)
        if mesh.pipeline % stages == 0 and model.splits_alike(stages * rounds)
    )
    stages, rounds = next(fits, (1, 1))
    works = f"mesh.pipeline={stages}"
    if stages != mesh.pipeline:  # all devices stay in the mesh
        works += f" --config.mesh.fsdp={mesh.fsdp * mesh.pipeline // stages}"
    if rounds != mesh.pipeline_rounds:
        works += f" --config.mesh.pipeline_rounds={rounds}"
    given = f"mesh.pipeline={mesh.pipeline} and pipeline_rounds={mesh.pipeline_rounds}"
    yield f"{given} of {model.num_layers} layers in patterns of {delta.period}", works


def _settings_of(config: Config, name: str) -> Iterator[tuple[str, ModelSettings]]:
    """The settings of the model `name`, and of the roles that have the actor's."""
    for key, settings in every(config, ModelSettings):
        own = settings.path or settings.hf_config
        role = settings.name if isinstance(settings, ExtraModelConfig) else _ROLES.get(key, key)
        if name in (key, role) or (name == "actor" and not own):
            yield key, settings


def _indivisible(config: Config, name: str, key_heads: int) -> Iterator[tuple[str, str]]:
    """Tensor sizes that do not divide the heads of keys, and with them those of values."""
    mesh, own = config.mesh, {key: each.tensor for key, each in _settings_of(config, name)}
    sizes = {f"{key}.tensor": size for key, size in own.items()}
    sizes["mesh.passes.tensor"] = mesh.passes.tensor
    if name == "actor":
        sizes["mesh.generation.tensor"] = mesh.generation.tensor
    if not own or not all(own.values()):
        sizes["mesh.tensor"] = mesh.tensor
    for key, size in sizes.items():
        if size and key_heads % size:
            fits = math.gcd(size, key_heads)
            # All devices stay in the mesh.
            more = f" --config.mesh.fsdp={mesh.fsdp * size // fits}" if key == "mesh.tensor" else ""
            yield f"{key}={size} with {key_heads} key heads", f"{key}={fits}{more}"
