"""Where a config comes from: a Python file, a packaged one, a run, or JSON; then overrides."""

import importlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jaxrl_llm.config.rules.check import check
from jaxrl_llm.config.schema import Config, run_folder
from jaxrl_llm.references import (
    exists,
    is_file,
    is_folder,
    load_file,
    nearest,
    nearest_file,
    reason,
    where,
)
from jaxrl_llm.typed_records.messages import ConfigError, explain
from jaxrl_llm.typed_records.overrides import apply_override
from jaxrl_llm.typed_records.record import validate
from jaxrl_llm.typed_records.tree import as_dict

__all__ = [
    "Overrides", "apply_overrides", "from_json", "load_config", "open_config", "packaged_configs",
    "to_json",
]  # fmt: skip

_log = logging.getLogger(__name__)

CONFIGS = "jaxrl_llm.configs"  # the packaged configs
CONFIG = "config.json"  # name of a run's config
BEGUN = ("metrics.jsonl", "checkpoints")  # either is in the folder of a run that has begun
Overrides = Mapping[str, Any] | Sequence[tuple[str, Any]]


def load_config(config: str | Path | Config, overrides: Overrides = ()) -> Config:
    """A config with the overrides applied in order, checked.

    `config` is one, or a Python file with get_config(), the name of a packaged config such as
    "grpo", or the folder or config.json of a run. An override is a dotted key with its value: text
    as on the command line, or a Python value, as in {"actor.optimizer.learning_rate": 1e-5}.

    Guarantees: a warm-up of no steps is None. The folder of a run is where it is found.
    Raises: ConfigError, with a value or key that works.
    """
    config = apply_overrides(
        config if isinstance(config, Config) else open_config(config), overrides
    )
    if config.warmup is not None and config.warmup.steps == 0:
        config = replace(config, warmup=None)
    check(config)
    return config


def apply_overrides(config: Config, overrides: Overrides) -> Config:
    """`config` with each override in order; rules that span fields are not checked.

    Data of the overrides, files or a class, replaces the config's tasks, unless the overrides name
    tasks too. A log line says so.
    """
    pairs = list(overrides.items() if isinstance(overrides, Mapping) else overrides)
    for key, value in pairs:
        config = apply_override(config, key, value)
    return _with_files_for_tasks(config, {key for key, _ in pairs})


def _with_files_for_tasks(config: Config, keys: set[str]) -> Config:
    """`config` without the tasks that data of `keys`, files or a class, replaces.

    Held-out tasks belong to the training tasks: they go with them where no held-out data is given.
    """

    def names(field: str) -> bool:
        return any(f"{key}.".startswith(f"data.{field}.") for key in keys)

    data, gone = config.data, []
    trains = [field for field in ("train_files", "dataset_class") if getattr(data, field)]
    if any(map(names, trains)) and data.train_tasks and not names("train_tasks"):
        gone.append("train_tasks")
    holds_out = bool(names("val_files") and data.val_files)
    if data.val_tasks and not names("val_tasks") and (holds_out or gone and not names("val_files")):
        gone.append("val_tasks")
    if gone:
        config = replace(config, data=replace(data, **dict.fromkeys(gone, ())))
        fields = " and ".join(f"config.data.{field}" for field in gone)
        _log.warning(
            "your data replaces the tasks of the config, %s; to use both, name tasks too: "
            "--config.data.%s=[chain_sum]",
            fields,
            gone[0],
        )
    return config


def packaged_configs() -> list[str]:
    """The names of the configs that come with the package."""
    folders = importlib.import_module(CONFIGS).__path__
    return sorted(file.stem for folder in folders for file in Path(folder).glob("[!_]*.py"))


def open_config(path: str | Path) -> Config:
    """The Config of a Python file, a packaged config's name, a run's folder or its config.json."""
    path = str(path)
    file = Path(path).expanduser()
    if path in packaged_configs():
        return importlib.import_module(f"{CONFIGS}.{path}").get_config()
    if is_file(file / CONFIG):
        file /= CONFIG
    if is_folder(file):
        raise ConfigError(
            f"the folder {path} has no {CONFIG}, so it is not the folder of a run; give the folder "
            "of a run, a file with get_config(), or the name of a packaged config such as grpo"
        )
    if not is_file(file):
        hint = nearest(path, packaged_configs()) if path.isidentifier() else nearest_file(file)
        known = f"packaged configs: {', '.join(packaged_configs())}"
        raise ConfigError(f"the config file {path} does not exist{hint}\n{known}")
    if file.suffix != ".json":
        return _run(file, path)
    try:
        config = from_json(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        works = "give a Python file with get_config(), or the folder of another run"
        raise ConfigError(f"{file} is no JSON text: {error}; {works}") from None
    return _where_it_is(config, file.parent) if file.name == CONFIG else config


def _where_it_is(config: Config, folder: Path) -> Config:
    """The config of the run in `folder`, which may have been moved, copied, or begun elsewhere.

    Its stored `run_dir` names another run, or a new one. A log line says which folder is used.
    """
    stored = run_folder(config)
    if stored.resolve() == folder.resolve() or not any(exists(folder / name) for name in BEGUN):
        return config
    _log.warning(
        "the run is in %s, and its %s names the folder %s: it goes on in %s, unless "
        "--config.run_dir=FOLDER begins another run like it",
        folder,
        CONFIG,
        stored,
        folder,
    )
    return replace(config, run_dir=str(folder))


def _run(file: Path, path: str) -> Config:
    try:
        module = load_file(file, again=True)
        if not hasattr(module, "get_config"):
            raise ConfigError(f"{path} has no get_config(); it must return a Config")
        config = module.get_config()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        cause = error.__cause__ or error
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
