"""Settings of a run that its models cannot use. What no mesh divides fails where it is sharded."""

from collections.abc import Mapping

from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.families import check_kind
from jaxrl_llm.plan.models import image_input
from jaxrl_llm.plan.roles import Role

_ROUTER_KEYS = (  # keys of the actor; by default they are off
    "router_aux_loss_coef",
    "router_z_loss_coef",
    "router_bias_rate",
    "router_aux_loss_by_layer",
)


def check_roles(config: Config, roles: Mapping[str, Role]) -> None:
    """Raises: ConfigError for settings that would change nothing, and ValueError for a scalar model
    that its family does not have."""
    for role in roles.values():
        check_kind(role.spec.config, role.spec.kind)
    if config.mesh.expert > 1 and not any(role.spec.config.mixture for role in roles.values()):
        raise ConfigError(
            f"config.mesh.expert={config.mesh.expert}: no model of the run has experts"
        )
    if config.data.max_images:
        _check_images(config, roles)
    actor = roles.get("actor")
    _check_router_keys(config, None if actor is None else actor.spec.config)


def _check_images(config: Config, roles: Mapping[str, Role]) -> None:
    """Raises: ConfigError unless all models take the images of a row alike."""
    inputs = {name: image_input(x.spec.config.vision, config.data) for name, x in roles.items()}
    for name, images in inputs.items():
        if images is None:
            family = roles[name].spec.config.family
            raise ConfigError(
                f"config.data.max_images={config.data.max_images}: the {name} is a {family} "
                "model without an image encoder; take an image model (docs/vision.md)"
            )
        if images != next(iter(inputs.values())):
            raise ConfigError(
                f"config.{name}: its images have other patches or sizes than those of "
                f"{next(iter(inputs))}; take a model with the same image encoder"
            )


def _check_router_keys(config: Config, learner: ModelConfig | None) -> None:
    """Raises: ConfigError for keys of routers that do not learn, or are of another kind."""
    mixture, keys = None if learner is None else learner.mixture, _ROUTER_KEYS
    why = "the model that learns has no routers, so nothing would change"
    if mixture is not None:
        keys = ("router_bias_rate" if mixture.scores == "softmax" else "router_z_loss_coef",)
        why = f"routers whose scores are a {mixture.scores} do not have it"
    if used := [key for key in keys if getattr(config.actor, key)]:
        raise ConfigError(f"config.actor.{used[0]}={getattr(config.actor, used[0])}: {why}")
