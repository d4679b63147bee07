"""Rules that span fields of a config, checked without jax in milliseconds.

Bounds of one field stand on the field. A rule yields sentences: why a value cannot work, and one
that does. In them <KEY> stands for config.KEY=VALUE. Rules of sizes are in size_rules.py.
"""

import functools
import importlib.util
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl_llm.config.algorithms import GDPO, Shared
from jaxrl_llm.config.bounds import UpTo
from jaxrl_llm.config.conflicts import conflicts
from jaxrl_llm.config.graders import Code, Judge, MathAnswer, Remote
from jaxrl_llm.config.messages import ConfigError, number_text
from jaxrl_llm.config.python_objects import Given, GivenRows
from jaxrl_llm.config.records import Custom, Record, fields_of
from jaxrl_llm.config.schema import (
    AdaptedSettings,
    Config,
    ModelSettings,
    OptimizerConfig,
    SupervisedConfig,
    is_offline,
    learns_offline,
)
from jaxrl_llm.config.size_rules import (
    Faults,
    batches,
    counts,
    lengths,
    phases_of_mesh,
    placement,
    splits,
    trainings,
)
from jaxrl_llm.config.thresholds import parse_rules
from jaxrl_llm.config.tree import as_text, every, is_empty, value_at
from jaxrl_llm.data_files import check_files
from jaxrl_llm.references import (
    check_path,
    exists,
    is_folder,
    is_hub_name,
    nearest,
    nearest_file,
)

__all__ = ["check"]

# Trackers by their names in log.trackers, and the modules that they need. The extra of the package
# has the tracker's name.
PACKAGES = {
    "tensorboard": "tensorboardX",
    "wandb": "wandb",
    "trackio": "trackio",
    "mlflow": "mlflow",
}


NO_KEY = "\0"  # a "<" of a user's text


def check(config: Config) -> None:
    """Raise ConfigError for the first thing in `config` that cannot work."""
    for rule in RULES:
        for fault in rule(config):
            named = re.sub(r"<([\w.-]+)>", partial(_named, config), fault)
            raise ConfigError(named.replace(NO_KEY, "<"))


def _named(config: Config, key: re.Match[str]) -> str:
    """A key with its value, as on a command line."""
    value = value_at(config, key[1])
    text = as_text(value)
    return f"config.{key[1]}" + ("" if is_empty(value) or "…" in text else f"={text}")


def _fault(test: Callable[[Any], object], value: Any) -> str:
    """What a test that raises ValueError says."""
    try:
        test(value)
    except ValueError as error:
        return str(error).replace("<", NO_KEY)
    return ""


# ------------------------------------------------------------------------- data and run


def data(c: Config) -> Faults:
    """There are prompts and a tokenizer, and all files exist."""
    for key, given in every(c, GivenRows):
        if given.rows is None:
            yield (
                f"<{key}>: the {given.num_rows} rows of a Python program are not in this file: "
                f"rl.train(config, {key[5:].replace('rows', 'data')}=rows) gives them"
            )
    if not (c.data.train_files or c.data.train_tasks or c.data.train_rows or c.data.dataset_class):
        yield (
            "<data>: it has no training data; set --config.data.train_files=[FILE] or "
            "--config.data.train_tasks=[chain_sum]"
        )
    read = () if c.data.dataset_class else ("train_files", "val_files")  # else the class reads them
    files = {f"data.{name}": getattr(c.data, name) for name in read}
    files |= {f"{key}.files": training.files for key, training in every(c, SupervisedConfig)}
    for key, names in files.items():
        for i, name in enumerate(names):
            if fault := _fault(check_files, name):
                yield f"<{key}.{i}>: {fault}"
    tokenizer = c.data.tokenizer
    known = tokenizer in ("", "char") or is_hub_name(tokenizer)
    if not known and not exists(tokenizer):
        hint = nearest_file(Path(tokenizer))
        yield f"<data.tokenizer>: expected char or a Hugging Face folder{hint}"
    if not c.actor.path and not c.actor.hf_config:
        yield "<actor>: it has no model; set --config.actor.path=HF_DIR, or hf_config in the file"
    if not tokenizer and not c.actor.path:
        yield (
            "<data.tokenizer>: it is empty, and config.actor.path, whose tokenizer would be taken, "
            "too; --config.data.tokenizer=char works"
        )


def phases(c: Config) -> Faults:
    """Phases are online, and leave steps for the algorithm."""
    for i, phase in enumerate(c.phases):
        if is_offline(c) or learns_offline(phase.algorithm):
            yield (
                f"<phases.{i}>: phases are of online algorithms, and an offline one is here; run "
                "it alone and give its checkpoint as --config.actor.path"
            )
    total = sum(phase.steps for phase in c.phases)
    if c.phases and total >= c.total_steps:
        yield (
            f"<phases>: they take {total} steps of <total_steps> and leave none for "
            f"config.algorithm; --config.total_steps={total + 1} works"
        )


def run(c: Config) -> Faults:
    """Traced steps, the checkpoint to go on from, and trackers."""
    if any(step > c.total_steps for step in c.profile.steps):
        works = f"[{min(3, c.total_steps)}]" if c.total_steps else "[]"
        yield (
            "<profile.steps>: <total_steps> is the last step, and none is traced after it; "
            f"config.profile.steps={works} works"
        )
    if c.resume not in ("auto", "never") and (not c.resume or not exists(c.resume)):
        hint = nearest_file(Path(c.resume))
        yield f"<resume>: expected auto, never, or the folder of a checkpoint{hint}"
    for i, name in enumerate(c.log.trackers):
        if c.log.trackers.count(name) > 1:
            yield f"<log.trackers>: it names {name} twice; name it once"
        if fault := tracker_fault(name):
            yield f"<log.trackers.{i}>: {fault}"


def tracker_fault(name: str) -> str:
    """Why a tracker cannot be used: an unknown name, or a package that is missing."""
    if ":" in name:
        return _fault(check_path, name)
    if name not in PACKAGES:
        return (
            f"there is no such tracker{nearest(name, PACKAGES)}\nthere are: "
            f"{', '.join(PACKAGES)}, or a class of yours, my_file.py:MyTracker"
        )
    if importlib.util.find_spec(PACKAGES[name]) is None:
        return f"its package is not installed: pip install 'jaxrl_llm[{name}]'"
    return ""


# ------------------------------------------------------------------------- functions


def rewards(c: Config) -> Faults:
    """An online run has a reward, its parts fit, and graders end before their call does."""
    reward, write = c.reward, "set --config.reward.functions=[my_rewards.py:my_function]"
    if not is_offline(c):
        if not reward.functions and reward.model is None:
            yield f"<reward>: it has neither functions nor a model; {write}"
        yield from _parts(c)
        yield from _origin("reward.model", reward.model)
    yield from _origin("teacher", c.teacher)
    limits = {Code: "total_s", Judge: "total_s", Remote: "total_s", MathAnswer: "seconds"}
    for kind, name in limits.items():
        for key, grader in every(c, kind):
            seconds = getattr(grader, name)
            if seconds >= reward.timeout_s:
                yield (
                    f"<{key}.{name}>: it does not end before <reward.timeout_s>, so slow work "
                    f"counts as a failed call: --config.reward.timeout_s={seconds + 5:g} works"
                )
    for key, judge in every(c, Judge):
        if is_folder(judge.cache_file) and judge.cache_file:
            yield f"<{key}.cache_file>: it is a folder; {judge.cache_file}/answers.jsonl works"


def _parts(c: Config) -> Faults:
    """There is a weight for each reward function, and a function for GDPO."""
    weights, parts = {"reward.weights": c.reward.weights}, len(c.reward.functions)
    for key, algorithm in every(c, GDPO):
        weights[f"{key}.reward_weights"] = algorithm.reward_weights
        if not parts:
            yield (
                f"<{key}>: it standardises the reward functions one by one, and there is none; set "
                "--config.reward.functions=[exact_answer]"
            )
    for key, given in weights.items():
        if given and len(given) != parts:
            ones = ",".join(["1"] * parts)
            yield (
                f"<{key}>: {len(given)} weights for {parts} functions of config.reward.functions; "
                f"[{ones}] works"
            )


def bounds(c: Config) -> Faults:
    """No key is above another one of its record that bounds it."""
    for key, record in every(c, Record):
        for name, bound in bounds_by_keys(type(record)):
            value, most = getattr(record, name), getattr(record, bound.key)
            if value > most or value == most and not bound.itself:
                word, works = ("above", most) if bound.itself else ("not below", most - 1)
                fits = f"{number_text(works)} works"
                yield f"<{key}.{name}>: it is {word} <{key}.{bound.key}>; {fits}"


@functools.cache
def bounds_by_keys(cls: type[Record]) -> list[tuple[str, UpTo]]:
    """The fields of a record that another one bounds."""
    fields = fields_of(cls).items()
    return [(n, bound) for n, f in fields for bound in f.metadata if isinstance(bound, UpTo)]


def optimizers(c: Config) -> Faults:
    """A schedule has steps after its warm-up."""
    for key, optimizer in every(c, OptimizerConfig):
        warmup, last = optimizer.warmup_steps, optimizer.total_steps
        if optimizer.schedule != "constant" and 0 < last <= warmup:
            yield (
                f"<{key}.total_steps>: the warm-up of <{key}.warmup_steps> leaves no step for "
                f"<{key}.schedule>; {warmup + 1} works, 0 takes the run's number"
            )


def correction(c: Config) -> Faults:
    """The rules of the rollout correction have thresholds, also where nothing uses them."""
    for key, s in every(c, Shared):
        if s.rollout_rs is not None or s.rollout_rs_threshold is not None:
            if fault := _fault(partial(parse_rules, s.rollout_rs), s.rollout_rs_threshold):
                yield f"<{key}.rollout_rs_threshold>: {fault}"


def _origin(key: str, model: Any) -> Faults:
    if model is not None and not model.path and model.training is None:
        yield (
            f"<{key}>: it has no path and no training; set --config.{key}.path=DIR, or "
            f"--config.{key}.training={{}} to train it in the run"
        )


def functions(c: Config) -> Faults:
    """Files and packages of the user's functions exist; they are loaded later."""
    for key, given in every(c, Custom):
        name = given.path.rpartition(":")[2]
        if not isinstance(given, Given):
            if fault := _fault(check_path, given.path):
                yield f"<{key}.path>: {fault}"
        elif given.function is None:
            yield (
                f"<{key}>: the function {name} of a Python program is not in this file: "
                f"rl.train(config, rewards=[{name}]) gives it, or write it in a file and name it, "
                f"my_file.py:{name}"
            )
    if c.data.dataset_class and (fault := _fault(check_path, c.data.dataset_class)):
        yield f"<data.dataset_class>: {fault}"


# ------------------------------------------------------------------------- models


def models(c: Config) -> Faults:
    """Each model: its name, weights, adapters and sizes."""
    names = [model.name for model in c.models]
    for i, name in enumerate(names):
        if name in names[:i]:
            yield f"<models.{i}.name>: another model has that name; {name}_{i} works"
    for key, model in every(c, ModelSettings):
        yield from _weights(key, model)
        yield from splits(c, key, model)
        if isinstance(model, AdaptedSettings):
            yield from _lora(c, key, model)


def _weights(key: str, model: ModelSettings) -> Faults:
    training = "training." if getattr(model, "training", None) else ""
    learns = training or isinstance(model, AdaptedSettings)
    if learns and model.param_dtype != "float32":
        yield (
            f"<{key}.param_dtype>: updates smaller than half a bfloat16 step would be lost, so "
            f"weights that learn are float32; config.{key}.dtype=bfloat16 computes in it, and "
            f"config.{key}.{training}optimizer.moment_dtype=bfloat16 or .offload=true saves memory"
        )
    if model.path and not is_folder(model.path) and not is_hub_name(model.path):
        yield (
            f"<{key}.path>: no such folder{nearest_file(Path(model.path))}\n"
            f"scripts/prepare_model.py smollm2 --output={model.path} writes a small model there"
        )


def _lora(c: Config, key: str, model: AdaptedSettings) -> Faults:
    """Adapters have a folder and targets, and share the actor's frozen weights as they are."""
    lora, base = model.lora, f"{key}.base_dtype"
    if not lora.enabled:
        return
    if lora.path and not exists(Path(lora.path) / "adapter_config.json"):
        yield (
            f"<{key}.lora.path>: expected a folder with adapter_config.json, as PEFT and `jaxrl "
            f"export --adapter` write it{nearest_file(Path(lora.path) / 'adapter_config.json')}"
        )
    if not lora.targets:
        yield f"<{key}.lora.targets>: it is empty; all-linear is usual"
    actor = c.actor
    if key == "critic" and actor.lora.enabled and not model.path and not model.hf_config:
        dtype = actor.base_dtype or actor.dtype
        if (model.base_dtype or model.dtype) != dtype:
            yield (
                f"<{base}>: the critic shares the actor's frozen weights, which are {dtype}; "
                f"--config.{base}={dtype} works"
            )
        if model.tensor != actor.tensor:
            yield (
                "<critic.tensor>: the critic shares the actor's frozen weights, which are split by "
                "<actor.tensor>; give both the same"
            )


RULES: tuple[Callable[[Config], Faults], ...] = (
    counts, conflicts, placement, batches, lengths, rewards, bounds, optimizers, correction,
    phases_of_mesh, trainings, phases, data, functions, models, run,
)  # fmt: skip
