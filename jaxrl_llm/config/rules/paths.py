"""Data, models, functions and packages that a config names must be on this machine.

Fields do not look: the config of a run is also read where its files are not.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from jaxrl_llm.config.graders import Judge
from jaxrl_llm.config.rules import Faults, fault_of
from jaxrl_llm.config.schema import (
    AdaptedSettings,
    Config,
    ModelSettings,
    OptimizerConfig,
    SupervisedConfig,
)
from jaxrl_llm.data_files import check_files
from jaxrl_llm.references import check_path, is_file, is_folder, is_hub_name, nearest, nearest_file
from jaxrl_llm.typed_records.python_objects import Given, GivenParams, GivenRows
from jaxrl_llm.typed_records.record import Custom
from jaxrl_llm.typed_records.tree import every, value_at

# Trackers by their names in log.trackers, and the modules that they need. The extra of the package
# has the tracker's name.
PACKAGES = {"tensorboard": "tensorboardX"} | {n: n for n in ("wandb", "trackio", "mlflow")}
SERVER = ("starlette", "uvicorn", "prometheus_client")  # packages of the extra `serve`
# The argument of `rl.train` for objects of a Python program, by the begin of their key.
WHERE = {"rollout.tools": "tools", "rollout.environment": "environment", "reward": "rewards"}
# Packages of environments by the begin of a path, such as textarena:GuessTheNumber-v0.
NAMES = ("skyrl_gym", "textarena", "reasoning_gym", "verifiers")
ADAPTED = {name: name.replace("_", "-") for name in NAMES}


def rows(c: Config) -> Faults:
    """Rows and weights are there. With a class for the data, it reads the files."""
    for key, rows in every(c, GivenRows):
        if rows.rows is None:
            works = f"rl.train(config, {key[5:].replace('rows', 'data')}=rows)"
            why = f"the {rows.num_rows} rows of a Python program are not in this file"
            yield f"<{key}>: {why}: {works} gives them"
    for key, params in every(c, GivenParams):
        if params.tree is None:
            why = f"the {params.num_arrays} arrays of a Python program are not in this file"
            yield f"<{key}>: {why}: rl.train(config, params=weights) gives them"
    keys = [] if c.data.dataset_class else ["data.train_files", "data.val_files"]
    keys += [f"{key}.files" for key, _ in every(c, SupervisedConfig)]
    for key in keys:
        for i, name in enumerate(value_at(c, key)):
            if fault := fault_of(check_files, name):
                yield f"<{key}.{i}>: {fault}"


def folders(c: Config) -> Faults:
    """Folders of models, tokenizers, adapters and checkpoints are there."""
    for key, path, expected in _folders(c):
        if not (is_file(path) if path.endswith(".json") else is_folder(path)):
            yield f"<{key}>: expected {expected}{nearest_file(Path(path))}"
    for key, judge in every(c, Judge):
        if judge.cache_file and is_folder(judge.cache_file):
            yield f"<{key}.cache_file>: it is a folder; {judge.cache_file}/answers.jsonl works"


def _folders(c: Config) -> Iterator[tuple[str, str, str]]:
    """(key, path, what is expected) of each folder or JSON file that the config names."""
    if c.resume not in ("auto", "never"):
        yield "resume", c.resume, "auto, never, or the folder of a checkpoint"
    if c.data.tokenizer not in ("", "char") and not is_hub_name(c.data.tokenizer):
        yield "data.tokenizer", c.data.tokenizer, "char or a Hugging Face folder"
    paths = [(key, model.path) for key, model in every(c, ModelSettings)]
    for key, path in [*paths, ("reference", c.reference.path)]:
        if path and not is_hub_name(path):
            small = f"as scripts/prepare_model.py smollm2 --output={path} writes it"
            yield f"{key}.path", path, f"the folder of a model, {small}"
    for key, model in every(c, ModelSettings):
        if isinstance(model, AdaptedSettings) and model.lora.path:
            expected = "a folder with adapter_config.json, as PEFT or jaxrl export writes it"
            yield f"{key}.lora.path", f"{model.lora.path}/adapter_config.json", expected


def functions(c: Config) -> Faults:
    """Files and packages of the user's functions are there; objects of a program are given."""
    named = {"data.dataset_class": c.data.dataset_class} if c.data.dataset_class else {}
    for key, optimizer in every(c, OptimizerConfig):
        paths = {"name": optimizer.name, "schedule": optimizer.schedule}
        named |= {f"{key}.{k}": x for k, x in paths.items() if isinstance(x, str) and ":" in x}
    models = every(c, ModelSettings)
    named |= {f"{key}.family": model.family for key, model in models if model.family}
    for key, custom in every(c, Custom):
        if not isinstance(custom, Given):
            named[f"{key}.path"] = custom.path
        elif custom.function is None:
            name = custom.path.rpartition(":")[2]
            why = f"{name} of a Python program is not in this file"
            if ".optimizer." in key:
                yield f"<{key}>: {why}: rl.load_config(config, {{'{key}': {name}}}) gives it"
                continue
            where = next((x for x in WHERE if key.startswith(x)), "reward")
            yield f"<{key}>: {why}: rl.train(config, {WHERE[where]}=[{name}]) gives it"
    for key, path in named.items():
        package = path.partition(":")[0]
        if package in ADAPTED and importlib.util.find_spec(package) is None:
            yield f"<{key}>: its package is not installed: pip install {ADAPTED[package]}"
        elif fault := fault_of(check_path, path):
            yield f"<{key}>: {fault}"


def server(c: Config) -> Faults:
    """A program asks a server, whose packages are an extra."""
    if c.rollout.program is not None and not all(map(importlib.util.find_spec, SERVER)):
        needs = "a program needs more packages"
        yield f"<rollout.program>: {needs}: pip install {' '.join(SERVER)}"


def trackers(c: Config) -> Faults:
    """Trackers are known, and their packages installed."""
    for i, name in enumerate(c.log.trackers):
        if fault := tracker_fault(name):
            yield f"<log.trackers.{i}>: {fault}"


def tracker_fault(name: str) -> str:
    """Why a tracker cannot be used: an unknown name, or a package that is missing."""
    if ":" in name:
        return fault_of(check_path, name)
    if name not in PACKAGES:
        known = f"{', '.join(PACKAGES)}, or a class of yours, my_file.py:MyTracker"
        return f"there is no such tracker{nearest(name, PACKAGES)}\nthere are: {known}"
    if importlib.util.find_spec(PACKAGES[name]) is None:
        return f"its package is not installed: pip install {PACKAGES[name]}"
    return ""
