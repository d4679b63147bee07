"""Rules of adapters, checked without jax; see rules.py."""

from pathlib import Path

from jaxrl_llm.config.records import ConfigError
from jaxrl_llm.config.schema import AdaptedSettings, Config
from jaxrl_llm.references import nearest_file

__all__ = ["check_lora"]


def check_lora(config: Config, key: str, model: AdaptedSettings) -> None:
    """Adapters need whole layers on the actor's devices. Raises: ConfigError."""
    lora = model.lora
    if not lora.enabled:
        if model.base_dtype:
            raise ConfigError(
                f"config.{key}.base_dtype={model.base_dtype} is of frozen weights, and all weights "
                f"learn: set config.{key}.lora.rank=16, or leave base_dtype out"
            )
        return
    name = f"config.{key}.lora.{f'path={lora.path}' if lora.path else f'rank={lora.rank}'}"
    if lora.path and not (Path(lora.path) / "adapter_config.json").is_file():
        raise ConfigError(
            f"{name}: expected a folder with adapter_config.json, as PEFT and "
            f"`jaxrl export --adapter` write it{nearest_file(Path(lora.path))}"
        )
    if lora.dropout and lora.dora:
        raise ConfigError(
            f"config.{key}.lora.dropout={lora.dropout} does not work with lora.dora; set it to 0"
        )
    if config.exact == "strict" and (not lora.merge or lora.dora or lora.dropout):
        raise ConfigError(
            f"{name} with config.exact=strict: sampler and trainer compute the same bits with "
            "merged weights alone; set lora.merge=True, dora=False and dropout=0, or "
            "--config.exact=repeatable"
        )
    if not lora.targets:
        raise ConfigError(f"config.{key}.lora.targets is empty; all-linear is usual")
    if config.mesh.pipeline > 1:
        raise ConfigError(
            f"{name} does not work with config.mesh.pipeline={config.mesh.pipeline}: set "
            "mesh.pipeline to 1, and config.mesh.fsdp to the number of devices"
        )
    apart = [each for each in ("placement", "node_groups") if getattr(config, each)]
    if apart:
        raise ConfigError(
            f"{name} does not work with config.{apart[0]}: roles share the frozen weights on the "
            f"actor's devices; leave {apart[0]} out"
        )
    dtypes = [each.base_dtype or each.dtype for each in (config.critic, config.actor)]
    if key == "critic" and _shares_base(config) and dtypes[0] != dtypes[1]:
        raise ConfigError(
            f"config.critic.base_dtype is {dtypes[0]}: the critic shares the actor's frozen "
            f"weights, which are {dtypes[1]}; --config.critic.base_dtype={dtypes[1]} works"
        )
    if key == "critic" and _shares_base(config) and model.tensor != config.actor.tensor:
        raise ConfigError(
            f"config.critic.tensor={model.tensor}: the critic shares the actor's frozen weights, "
            f"which are split by config.actor.tensor={config.actor.tensor}; give both the same"
        )
    if key == "actor" and not lora.merge:
        _check_unmerged(config)


def _shares_base(config: Config) -> bool:
    """Whether the critic's adapters are on the actor's frozen weights."""
    critic = config.critic
    return bool(config.actor.lora.enabled and not critic.path and not critic.hf_config)


def _check_unmerged(config: Config) -> None:
    """Adapters that a decode step can compute apart."""
    refused = {
        "actor.lora.dora=True": config.actor.lora.dora,
        f"rollout.quantization={config.rollout.quantization}": (
            config.rollout.quantization != "none"
        ),
    }
    for what in (name for name, given in refused.items() if given):
        raise ConfigError(
            f"config.actor.lora.merge=False does not work with config.{what}; leave it True"
        )
