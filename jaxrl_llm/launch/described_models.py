"""Whether the models that a config describes can be built, before jax is imported.

Rules of `config` know no families. The plan of a run asks again, when devices are known.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.checkpoint.layout import find_model_path, is_complete
from jaxrl_llm.config import AdaptedSettings, Config, ConfigError, ModelSettings
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.config_json import bad_value, misspelt_key, read_config_json
from jaxrl_llm.models.families import config_from_hf, hf_names
from jaxrl_llm.models.lora_targets import chosen_modules
from jaxrl_llm.plan.model_rules import check_hybrids
from jaxrl_llm.typed_records.tree import every


def check_models(config: Config) -> None:
    """Build the description of every model, find its adapters' modules, and what `resume` names.

    Models of a hub are not asked for.

    Raises: ConfigError that names the key, for a value that no model can have.
    """
    if config.resume not in ("auto", "never") and not is_complete(Path(config.resume)):
        raise ConfigError(
            f"config.resume={config.resume}: no checkpoint that was written to its end; give a "
            "folder such as RUN_DIR/checkpoints/global_step_100"
        )
    described: dict[str, ModelConfig | None] = {}
    for key, settings in every(config, ModelSettings):
        described[key] = _described(f"config.{key}", settings)
    check_hybrids(config, described)
    for key, settings in every(config, AdaptedSettings):
        own = settings.path or settings.hf_config  # it may be a model of a hub, not seen yet
        model = described[key] if own else described["actor"]
        if model is None or not settings.lora.rank or settings.lora.path:
            continue
        tensors = (tensor.name for tensor in hf_names(model, "causal_lm").values())
        try:
            chosen_modules(settings.lora.targets, tensors)
        except ValueError as error:
            raise ConfigError(f"config.{key}.{error}") from None


def _described(key: str, settings: ModelSettings) -> ModelConfig | None:
    """The model of one role; None where it has the actor's, or is of a hub."""
    if not settings.path:
        return _from_dict(key, settings.hf_config) if settings.hf_config else None
    found = find_model_path(settings.path)
    if found.checkpoint is None and not Path(found.files).is_dir():
        return None
    try:
        return config_from_hf(read_config_json(Path(found.files)))
    except ValueError as error:
        raise ConfigError(f"{key}.path={settings.path}: {error}") from None


def _from_dict(key: str, given: Mapping[str, Any]) -> ModelConfig:
    if bad := bad_value(given):
        raise ConfigError(f"{key}.hf_config.{bad.key}={bad.shown}: must be {bad.wanted}")
    if misspelt := misspelt_key(given):
        name, near = misspelt
        raise ConfigError(f"unknown key {key}.hf_config.{name}; did you mean {near!r}?")
    try:
        # A vocabulary that is not given is the tokenizer's.
        return config_from_hf({"vocab_size": 1} | dict(given))
    except ValueError as error:
        raise ConfigError(f"{key}.hf_config: {error}") from None
