"""What models with layers of a gated delta rule do not work with. Imports no jax."""

import math
from collections.abc import Iterator, Mapping

from jaxrl_llm.config import Config, ConfigError, ExtraModelConfig, ModelSettings
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.typed_records.tree import every

_ROLES = {"reward.model": "reward"}  # of keys that are not the name of their role


def check_hybrids(config: Config, models: Mapping[str, ModelConfig | None]) -> None:
    """Raises: ConfigError with a remedy for a setting that a hybrid model does not work with.

    `models` are those of roles by name, or by key in the config; None has the actor's, or is not
    known.
    """
    for name, model in models.items():
        if model is None or model.delta is None:
            continue
        heads = model.delta.key_heads
        for given, works in (*_refused(config, name), *_indivisible(config, name, heads)):
            raise ConfigError(
                f"config.{given} does not work with layers of a gated delta rule, which the model "
                f"{name} has; --config.{works} works"
            )


def _refused(config: Config, name: str) -> Iterator[tuple[str, str]]:
    """The settings of this config that a hybrid model `name` refuses, and what to set instead."""
    mesh, fsdp = config.mesh, config.mesh.fsdp
    for axis in ("sequence", "pipeline"):
        if (size := getattr(mesh, axis)) > 1:
            yield f"mesh.{axis}={size}", f"mesh.{axis}=1 --config.mesh.fsdp={fsdp * size}"
    if config.exact == "strict":
        yield "exact=strict", "exact=repeatable"
    if config.rollout.quantization == "float8" and name == "actor":
        yield "rollout.quantization=float8", "rollout.quantization=none"


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
