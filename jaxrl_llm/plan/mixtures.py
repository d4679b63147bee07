"""Mixtures of experts in a plan: what is refused before a device is touched, and router losses."""

from collections.abc import Mapping

from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.learner.router_losses import RouterLoss
from jaxrl_llm.models.families import check_family
from jaxrl_llm.plan.hybrids import check_hybrids
from jaxrl_llm.plan.roles import Role

_ROUTER_KEYS = {  # what switches each off
    "router_aux_loss_coef": "0",
    "router_z_loss_coef": "0",
    "router_bias_rate": "0",
    "router_aux_loss_by_layer": "False",
}


def check_mixtures(config: Config, roles: Mapping[str, Role]) -> None:
    """Raises: ConfigError for settings that a role's model does not work with, or cannot use."""
    check_hybrids(config, {name: role.spec.config for name, role in roles.items()})
    for name, role in roles.items():
        check_family(role.spec.config, role.spec.kind)
        if role.spec.config.mixture is not None:
            _check_mixture(config, name)
        _check_attention(role)
    mixtures = [role for role in roles.values() if role.spec.config.mixture is not None]
    if config.mesh.expert > 1 and not mixtures:
        raise ConfigError(
            f"config.mesh.expert={config.mesh.expert}: no model of the run has experts; "
            f"--config.mesh.expert=1 --config.mesh.fsdp={config.mesh.fsdp * config.mesh.expert} "
            "works"
        )
    actor = roles.get("actor")
    _check_router_keys(config, actor)


def _check_router_keys(config: Config, actor: Role | None) -> None:
    """Raises: ConfigError for keys of routers that are not there, or do not learn."""
    keys = [key for key in _ROUTER_KEYS if getattr(config.actor, key)]
    given = ", ".join(f"config.actor.{key}={getattr(config.actor, key)}" for key in keys)
    works = " ".join(f"--config.actor.{key}={_ROUTER_KEYS[key]}" for key in keys) + " works"
    if keys and (actor is None or actor.spec.config.mixture is None):
        raise ConfigError(
            f"{given}: the model that learns has no routers, so nothing would change; {works}"
        )
    _check_scores(config, actor)


def _check_scores(config: Config, actor: Role | None) -> None:
    """Raises: ConfigError for a key of the other kind of router."""
    mixture = None if actor is None else actor.spec.config.mixture
    if mixture is None:
        return
    other = "router_bias_rate" if mixture.scores == "softmax" else "router_z_loss_coef"
    if value := getattr(config.actor, other):
        raise ConfigError(
            f"config.actor.{other}={value}: the router's scores are a {mixture.scores}, which has "
            f"no such {'bias' if 'bias' in other else 'loss'}; --config.actor.{other}=0 works"
        )


def _check_mixture(config: Config, name: str) -> None:
    """Raises: ConfigError for what is not done for a model with experts."""
    if config.rollout.quantization == "float8":
        raise ConfigError(
            "config.rollout.quantization=float8 does not work with a mixture of experts, which the "
            f"model {name} is; --config.rollout.quantization=none works"
        )


def _check_attention(role: Role) -> None:
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


def replays_routes(config: Config, actor: Role) -> bool:
    """Whether the actor's tokens take the experts in its passes that they had in the rollout."""
    return config.rollout.routing_replay and actor.spec.config.mixture is not None


def router_loss(config: Config, role: Role) -> RouterLoss:
    """The router losses in an update of `role`; the coefficients are the actor's."""
    if role.spec.config.mixture is None or role.name != "actor":
        return RouterLoss()
    actor = config.actor
    return RouterLoss(
        aux_coef=actor.router_aux_loss_coef,
        by_layer=actor.router_aux_loss_by_layer,
        z_coef=actor.router_z_loss_coef,
        bias_rate=actor.router_bias_rate,
    )
