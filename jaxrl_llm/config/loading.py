"""Where a config comes from: a Python file, a packaged one, a run, or JSON."""

import importlib
import json
from pathlib import Path

from pydantic import ValidationError

from jaxrl_llm.config.messages import ConfigError, explain
from jaxrl_llm.config.overrides import Overrides, apply_overrides
from jaxrl_llm.config.records import validate
from jaxrl_llm.config.rules import check
from jaxrl_llm.config.schema import Config
from jaxrl_llm.config.tree import as_dict
from jaxrl_llm.references import is_file, load_file, nearest, nearest_file, reason, shown, where

__all__ = ["from_json", "load_config", "open_config", "packaged_configs", "to_json"]

CONFIGS = "jaxrl_llm.configs"  # the packaged configs


def load_config(config: str | Path | Config, overrides: Overrides = ()) -> Config:
    """A config with the overrides applied in order, checked.

    `config` is one, or a Python file with get_config(), the name of a packaged config such as
    "grpo", or the folder or config.json of a run. An override is a dotted key with its value: text
    as on the command line, or a Python value, as in {"actor.optimizer.learning_rate": 1e-5}.

    Raises: ConfigError, with a value or key that works.
    """
    found = config if isinstance(config, Config) else open_config(config)
    found = apply_overrides(found, overrides)
    check(found)
    return found


def packaged_configs() -> list[str]:
    """The names of the configs that come with the package."""
    folders = importlib.import_module(CONFIGS).__path__
    return sorted(file.stem for folder in folders for file in Path(folder).glob("[!_]*.py"))


def open_config(path: str | Path) -> Config:
    """The Config of a Python file, a packaged config's name, a run's folder or its config.json."""
    if not isinstance(path, str | Path) or "\0" in str(path):
        known = "a file with get_config(), the name of a packaged config such as grpo"
        raise ConfigError(f"config={shown(path)}: expected a Config, {known}, or a run's folder")
    path = str(path)
    file = Path(path).expanduser()
    if path in packaged_configs():
        return importlib.import_module(f"{CONFIGS}.{path}").get_config()
    if is_file(file / "config.json"):
        file /= "config.json"
    if not is_file(file):
        hint = nearest(path, packaged_configs()) if path.isidentifier() else nearest_file(file)
        known = f"packaged configs: {', '.join(packaged_configs())}"
        raise ConfigError(f"the config file {path} does not exist{hint}\n{known}")
    if file.suffix != ".json":
        return _run(file, path)
    try:
        return from_json(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        works = "give a Python file with get_config(), or the folder of another run"
        raise ConfigError(f"{file} is no JSON text: {error}; {works}") from None


def _run(file: Path, path: str) -> Config:
    try:
        module = load_file(file, again=True)
        if not hasattr(module, "get_config"):
            raise ConfigError(f"{path} has no get_config(); it must return a Config")
        config = module.get_config()
    except ConfigError:
        raise
    except Exception as error:  # the user's code may raise anything
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        invalid = isinstance(cause, ValidationError)
        text = str(explain(cause, Config, cause.title)) if invalid else reason(cause)
        raise ConfigError(f"{where(file, cause)}: {text}") from error
    if not isinstance(config, Config):
        raise ConfigError(f"get_config() of {path} returned {type(config).__name__}, not a Config")
    return config


def to_json(config: Config) -> str:
    """The config with all defaults as JSON text; `from_json` reads it back."""
    return json.dumps(as_dict(config), indent=2) + "\n"


def from_json(text: str) -> Config:
    """The Config that `to_json` wrote; fields are checked, rules that span fields are not."""
    try:
        return validate(Config, json.loads(text))
    except ValidationError as error:
        raise explain(error, Config, "config") from None
